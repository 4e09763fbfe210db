"""Accountants of b-min-sep sampling."""

from dptrain.accounting.min_sep.any_matrix import AnyMatrixMonteCarlo
from dptrain.accounting.min_sep.importance import MinSepImportance
from dptrain.accounting.min_sep.law import MinSepLaw
from dptrain.accounting.min_sep.losses import MinSepLosses
from dptrain.accounting.min_sep.monte_carlo import (
    MinSepMonteCarlo,
    min_sep_law,
    min_sep_refusal,
)
from dptrain.accounting.min_sep.renyi import MinSepRenyi
from dptrain.accounting.min_sep.tilted_estimate import TiltedEstimate
from dptrain.accounting.min_sep.truncated import (
    FullBatches,
    TruncatedMinSepImportance,
    TruncatedMinSepMonteCarlo,
    TruncatedMinSepRenyi,
    whole_batches,
)

__all__ = [
    "AnyMatrixMonteCarlo",
    "FullBatches",
    "MinSepImportance",
    "MinSepLaw",
    "MinSepLosses",
    "MinSepMonteCarlo",
    "MinSepRenyi",
    "TiltedEstimate",
    "TruncatedMinSepImportance",
    "TruncatedMinSepMonteCarlo",
    "TruncatedMinSepRenyi",
    "min_sep_law",
    "min_sep_refusal",
    "whole_batches",
]
