"""What every way of clipping shares: rows, norms, styles, factors."""

from dptrain.clipping.base.clipper import Admit, GradientClipper
from dptrain.clipping.base.linear_norms import ROUNDING, unit
from dptrain.clipping.base.rows import HALF, row_norms_error
from dptrain.clipping.base.styles import FLAT, Automatic, ClippingStyle, Flat, PerGroup, PerLayer
from dptrain.clipping.base.weights import summing_dtype

__all__ = [
    "FLAT",
    "HALF",
    "ROUNDING",
    "Admit",
    "Automatic",
    "ClippingStyle",
    "Flat",
    "GradientClipper",
    "PerGroup",
    "PerLayer",
    "row_norms_error",
    "summing_dtype",
    "unit",
]
