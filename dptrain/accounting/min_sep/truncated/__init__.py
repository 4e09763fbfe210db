"""b-min-sep sampling with a largest batch: what cutting costs at most, and losses of its pair."""

from dptrain.accounting.min_sep.truncated.full_batches import FullBatches
from dptrain.accounting.min_sep.truncated.importance import (
    TruncatedMinSepImportance,
    often_cut,
)
from dptrain.accounting.min_sep.truncated.renyi import (
    TruncatedMinSepCurve,
    TruncatedMinSepRenyi,
    whole_batches,
)
from dptrain.accounting.min_sep.truncated.truncated_losses import TruncatedMinSepLosses

__all__ = [
    "FullBatches",
    "TruncatedMinSepCurve",
    "TruncatedMinSepImportance",
    "TruncatedMinSepLosses",
    "TruncatedMinSepRenyi",
    "often_cut",
    "whole_batches",
]
