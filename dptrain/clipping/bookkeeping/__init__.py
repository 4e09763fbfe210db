"""Clipped sums in one forward and one backward pass (Bu et al. 2022, arXiv 2210.00038)."""

from dptrain.clipping.bookkeeping.clipper import BookkeepingClipper
from dptrain.clipping.bookkeeping.module import BookkeepingModule, check_layers
from dptrain.clipping.bookkeeping.rules.rules import GradientRule, LayerRule, register_layer

__all__ = [
    "BookkeepingClipper",
    "BookkeepingModule",
    "GradientRule",
    "LayerRule",
    "check_layers",
    "register_layer",
]
