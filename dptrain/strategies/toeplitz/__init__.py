"""Strategies whose matrix is Toeplitz."""
