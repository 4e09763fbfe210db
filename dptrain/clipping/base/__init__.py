"""Rows, norms, styles and factors, which every way of clipping shares."""

from dptrain.clipping.base.book import Book
from dptrain.clipping.base.linear_norms import ROUNDING, unit
from dptrain.clipping.base.precision import in_full_float32
from dptrain.clipping.base.rows import HALF, row_norms_error, summing_dtype
from dptrain.clipping.base.styles import FLAT, Automatic, ClippingStyle, Flat, PerGroup, PerLayer

__all__ = [
    "FLAT",
    "HALF",
    "ROUNDING",
    "Automatic",
    "Book",
    "ClippingStyle",
    "Flat",
    "PerGroup",
    "PerLayer",
    "in_full_float32",
    "row_norms_error",
    "summing_dtype",
    "unit",
]
