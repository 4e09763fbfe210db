"""Accountants that few runs need, and mechanisms in the terms of the library dp_accounting."""

from dptrain.contrib.accountants.any_matrix import MinSepAnyMatrix
from dptrain.contrib.accountants.dp_event import to_dp_event
from dptrain.contrib.accountants.several_picks import SubsetLosses
from dptrain.contrib.accountants.several_picks_importance import AllocationImportance

__all__ = [
    "AllocationImportance",
    "MinSepAnyMatrix",
    "SubsetLosses",
    "to_dp_event",
]
