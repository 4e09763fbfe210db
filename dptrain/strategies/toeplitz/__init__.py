"""Strategies whose matrix is Toeplitz."""

from dptrain.strategies.toeplitz.toeplitz import BandedToeplitz, Toeplitz

__all__ = ["BandedToeplitz", "Toeplitz"]
