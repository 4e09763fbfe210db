"""Correlated noise step by step: one stream for each form of strategy."""

from dptrain.noise.streams.blt import BLTStream
from dptrain.noise.streams.convolution import ConvolutionStream
from dptrain.noise.streams.flat import FlatStream
from dptrain.noise.streams.history import check_private_folder
from dptrain.noise.streams.layout import Block, Shard, shard_pieces
from dptrain.noise.streams.regeneration import RegenerationStream
from dptrain.noise.streams.registry import register_noise_stream, stream_class
from dptrain.noise.streams.ring_buffer import RingBufferStream
from dptrain.noise.streams.tree import TreeStream

__all__ = [
    "BLTStream",
    "Block",
    "ConvolutionStream",
    "FlatStream",
    "RegenerationStream",
    "RingBufferStream",
    "Shard",
    "TreeStream",
    "check_private_folder",
    "register_noise_stream",
    "shard_pieces",
    "stream_class",
]
