"""Uses: what one call of a layer adds to the gradients of a parameter."""

from dptrain.clipping.bookkeeping.uses.use import Use, chunked_norms, rounding_errors

__all__ = ["Use", "chunked_norms", "rounding_errors"]
