"""Accountants that few runs need, and mechanisms in the terms of the library dp_accounting."""

from dptrain.contrib.accountants.any_matrix import AnyMatrixMonteCarlo
from dptrain.contrib.accountants.dp_event import to_dp_event
from dptrain.contrib.accountants.several_picks import AllocationMonteCarlo, SubsetLosses
from dptrain.contrib.accountants.several_picks_importance import AllocationImportance

__all__ = [
    "AllocationImportance",
    "AllocationMonteCarlo",
    "AnyMatrixMonteCarlo",
    "SubsetLosses",
    "to_dp_event",
]
