"""Sampling schemes of examples, each with its stream of batches."""

from dptrain.sampling.schemes.any_size import AnySizeScheme
from dptrain.sampling.schemes.drawing import successes

__all__ = ["AnySizeScheme", "successes"]
