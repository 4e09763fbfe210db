"""What clipping needs of a convolution's weight gradients."""
