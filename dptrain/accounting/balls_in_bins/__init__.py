"""Accountants of balls-in-bins sampling and random allocation."""

from dptrain.accounting.balls_in_bins.conditional_composition import (
    ConditionalComposition,
    bin_means,
    compose_steps,
)
from dptrain.accounting.balls_in_bins.importance import BallsInBinsImportance
from dptrain.accounting.balls_in_bins.losses import BallsInBinsLosses
from dptrain.accounting.balls_in_bins.monte_carlo import BallsInBinsMonteCarlo
from dptrain.accounting.balls_in_bins.one_pick import AllocationPLD
from dptrain.accounting.balls_in_bins.posterior_hazards import Step, hazard_log_odds, steps
from dptrain.accounting.balls_in_bins.random_allocation import RandomAllocationRenyi
from dptrain.accounting.balls_in_bins.renyi import BallsInBinsRenyi
from dptrain.accounting.balls_in_bins.several_picks import AllocationMonteCarlo, SubsetLosses
from dptrain.accounting.balls_in_bins.several_picks_importance import AllocationImportance

__all__ = [
    "AllocationImportance",
    "AllocationMonteCarlo",
    "AllocationPLD",
    "BallsInBinsImportance",
    "BallsInBinsLosses",
    "BallsInBinsMonteCarlo",
    "BallsInBinsRenyi",
    "ConditionalComposition",
    "RandomAllocationRenyi",
    "Step",
    "SubsetLosses",
    "bin_means",
    "compose_steps",
    "hazard_log_odds",
    "steps",
]
