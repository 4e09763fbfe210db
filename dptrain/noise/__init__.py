"""Streams of correlated noise for the shapes of a model."""

from dptrain.noise.factory import noise_stream
from dptrain.noise.rounding import Rounding
from dptrain.noise.streams import (
    Block,
    FlatStream,
    check_private_folder,
    register_noise_stream,
    shard_pieces,
)

__all__ = [
    "Block",
    "FlatStream",
    "Rounding",
    "check_private_folder",
    "noise_stream",
    "register_noise_stream",
    "shard_pieces",
]
