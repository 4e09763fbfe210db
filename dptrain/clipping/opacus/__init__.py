"""Clipped sums from Opacus's per-example gradients."""
