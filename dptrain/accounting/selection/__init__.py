"""Choosing among several runs on the same data: what all of them, or the best of them, cost."""

from dptrain.accounting.selection.budget import BudgetFilter, epsilon_of
from dptrain.accounting.selection.charge import Charge, least_mu, least_slack
from dptrain.accounting.selection.choice import (
    PLANNED,
    ChoicePrivacy,
    compose_runs,
    select_run,
    weakest_kind,
)
from dptrain.accounting.selection.composed import ComposedRuns
from dptrain.accounting.selection.pair import delta_at, epsilon_at, one_of_runs
from dptrain.accounting.selection.trials import NegativeBinomialTrials, PoissonTrials, TrialCount

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
    "select_run",
    "weakest_kind",
]
