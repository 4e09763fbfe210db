"""Choosing among several runs on the same data: what all of them, or the best of them, cost."""

from dptrain.accounting.selection.choice import ChoicePrivacy, compose_runs, select_run
from dptrain.accounting.selection.pair import one_of_runs
from dptrain.accounting.selection.trials import NegativeBinomialTrials, PoissonTrials, TrialCount

__all__ = [
    "ChoicePrivacy",
    "NegativeBinomialTrials",
    "PoissonTrials",
    "TrialCount",
    "compose_runs",
    "one_of_runs",
    "select_run",
]
