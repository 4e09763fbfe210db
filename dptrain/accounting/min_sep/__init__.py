"""Accountants of b-min-sep sampling."""

from dptrain.accounting.min_sep.importance import MinSepImportance
from dptrain.accounting.min_sep.law import often_cut
from dptrain.accounting.min_sep.pair import (
    MinSepLaw,
    min_sep_law,
    min_sep_refusal,
    participations,
    whole_batches,
)
from dptrain.accounting.min_sep.recursion import log_mixture
from dptrain.accounting.min_sep.renyi import MinSepRenyi
from dptrain.accounting.min_sep.tilted_estimate import TiltedEstimate
from dptrain.accounting.min_sep.truncated import FullBatches

__all__ = [
    "FullBatches",
    "MinSepImportance",
    "MinSepLaw",
    "MinSepRenyi",
    "TiltedEstimate",
    "log_mixture",
    "min_sep_law",
    "min_sep_refusal",
    "often_cut",
    "participations",
    "whole_batches",
]
