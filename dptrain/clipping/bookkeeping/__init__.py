"""Clipped sums in one forward and one backward pass (Bu et al. 2022, arXiv 2210.00038)."""

from dptrain.clipping.bookkeeping.clipper import BookkeepingClipper
from dptrain.clipping.bookkeeping.combine import norms_of_sum
from dptrain.clipping.bookkeeping.module import BookkeepingModule, check_layers, tapped_layer
from dptrain.clipping.bookkeeping.rules.rules import GradientRule, LayerRule, register_layer
from dptrain.clipping.bookkeeping.tap import LayerTap

__all__ = [
    "BookkeepingClipper",
    "BookkeepingModule",
    "GradientRule",
    "LayerRule",
    "LayerTap",
    "check_layers",
    "norms_of_sum",
    "register_layer",
    "tapped_layer",
]
