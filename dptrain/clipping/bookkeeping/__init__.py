"""Clipped sums in one forward and one backward pass (Bu et al. 2022, arXiv 2210.00038)."""

from dptrain.clipping.bookkeeping.clipper import BookkeepingClipper
from dptrain.clipping.bookkeeping.combine import norms_of_sum
from dptrain.clipping.bookkeeping.layer_tap import LayerTap
from dptrain.clipping.bookkeeping.module_taps import (
    Taps,
    check_layers,
    part_of_a_run,
    taps_of,
    uncompiled,
)
from dptrain.clipping.bookkeeping.rules.rule import GradientRule, LayerRule
from dptrain.clipping.bookkeeping.rules.table import register_layer

__all__ = [
    "BookkeepingClipper",
    "GradientRule",
    "LayerRule",
    "LayerTap",
    "Taps",
    "check_layers",
    "norms_of_sum",
    "part_of_a_run",
    "register_layer",
    "taps_of",
    "uncompiled",
]
