"""Buffered linear Toeplitz strategies."""
