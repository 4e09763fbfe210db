"""Strategies that are any lower-triangular matrix."""

from dptrain.strategies.matrices.lower_triangular import LowerTriangular

__all__ = ["LowerTriangular"]
