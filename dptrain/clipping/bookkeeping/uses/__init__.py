"""Uses: what one call of a layer adds to the gradients of a parameter."""
