"""Accountants of b-min-sep sampling."""

from dptrain.accounting.min_sep.importance import MinSepImportance
from dptrain.accounting.min_sep.law import (
    MinSepLaw,
    min_sep_law,
    min_sep_refusal,
    participations,
)
from dptrain.accounting.min_sep.recursion import log_mixture
from dptrain.accounting.min_sep.renyi import MinSepRenyi
from dptrain.accounting.min_sep.tilted_estimate import TiltedEstimate
from dptrain.accounting.min_sep.truncated import (
    FullBatches,
    TruncatedMinSepImportance,
    TruncatedMinSepRenyi,
    often_cut,
    whole_batches,
)

__all__ = [
    "FullBatches",
    "MinSepImportance",
    "MinSepLaw",
    "MinSepRenyi",
    "TiltedEstimate",
    "TruncatedMinSepImportance",
    "TruncatedMinSepRenyi",
    "log_mixture",
    "min_sep_law",
    "min_sep_refusal",
    "often_cut",
    "participations",
    "whole_batches",
]
