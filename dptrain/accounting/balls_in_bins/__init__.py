"""Accountants of balls-in-bins sampling and random allocation."""

from dptrain.accounting.balls_in_bins.bins_losses import LARGEST_NORMAL, BallsInBinsLosses
from dptrain.accounting.balls_in_bins.conditional_composition import (
    ConditionalComposition,
    bin_means,
    compose_steps,
)
from dptrain.accounting.balls_in_bins.importance import BallsInBinsImportance
from dptrain.accounting.balls_in_bins.one_pick import AllocationCurve, AllocationPLD, picks_refusal
from dptrain.accounting.balls_in_bins.posterior_hazards import Step, hazard_log_odds, steps
from dptrain.accounting.balls_in_bins.renyi import BallsInBinsRenyi
from dptrain.accounting.balls_in_bins.subset_means import UNIT, log_subset_means, rounding

__all__ = [
    "LARGEST_NORMAL",
    "UNIT",
    "AllocationCurve",
    "AllocationPLD",
    "BallsInBinsImportance",
    "BallsInBinsLosses",
    "BallsInBinsRenyi",
    "ConditionalComposition",
    "Step",
    "bin_means",
    "compose_steps",
    "hazard_log_odds",
    "log_subset_means",
    "picks_refusal",
    "rounding",
    "steps",
]
