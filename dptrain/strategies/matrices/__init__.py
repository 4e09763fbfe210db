"""Strategies that are any lower-triangular matrix."""
