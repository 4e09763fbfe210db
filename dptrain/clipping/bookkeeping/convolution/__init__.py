"""Norms and clipped sums of a convolution's weight gradients."""
