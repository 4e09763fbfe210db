"""Choosing among several runs on the same data: what all of them, or the best of them, cost."""

from dptrain.contrib.selection.budget import BudgetFilter, epsilon_of
from dptrain.contrib.selection.charge import Charge, least_mu, least_slack
from dptrain.contrib.selection.choice import (
    PLANNED,
    ChoicePrivacy,
    compose_runs,
    select_run,
    weakest_kind,
)
from dptrain.contrib.selection.composed import ComposedRuns
from dptrain.contrib.selection.pair import delta_at, epsilon_at, one_of_runs
from dptrain.contrib.selection.plots import plot_composed
from dptrain.contrib.selection.trials import NegativeBinomialTrials, PoissonTrials, TrialCount

__all__ = [
    "PLANNED",
    "BudgetFilter",
    "Charge",
    "ChoicePrivacy",
    "ComposedRuns",
    "NegativeBinomialTrials",
    "PoissonTrials",
    "TrialCount",
    "compose_runs",
    "delta_at",
    "epsilon_at",
    "epsilon_of",
    "least_mu",
    "least_slack",
    "one_of_runs",
    "plot_composed",
    "select_run",
    "weakest_kind",
]
