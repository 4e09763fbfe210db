"""b-min-sep sampling with a largest batch: what cutting costs at most, and losses of its pair."""

from dptrain.accounting.min_sep.truncated.curve import TruncatedMinSepCurve, truncated_curve
from dptrain.accounting.min_sep.truncated.full_batches import FullBatches
from dptrain.accounting.min_sep.truncated.truncated_losses import TruncatedMinSepLosses

__all__ = ["FullBatches", "TruncatedMinSepCurve", "TruncatedMinSepLosses", "truncated_curve"]
