"""Streams of correlated noise for the shapes of a model."""

from dptrain.noise.factory import noise_stream
from dptrain.noise.streams.stream import NoiseStream

__all__ = ["NoiseStream", "noise_stream"]
