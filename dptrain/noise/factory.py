"""Which stream serves which strategy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dptrain.noise.ring_buffer import RingBufferStream
from dptrain.noise.stream import NoiseStream
from dptrain.strategies.strategy import Strategy
from dptrain.strategies.toeplitz import BandedToeplitz

_STREAMS = ((BandedToeplitz, RingBufferStream),)
"""What a strategy is (a class or mixin) and the stream that serves it; the first match wins."""


def noise_stream(
    strategy: Strategy, *, steps: int, like: Sequence[torch.Tensor], seed: int
) -> NoiseStream:
    """Rows of C^-1 Z for tensors shaped ``like`` these, one a step.

    Args:
        strategy: the strategy matrix C; it is bound to ``steps`` if it is not yet.
        steps: n, the number of rows that the stream hands out.
        like: parameters (or tensors) whose shapes, dtypes and devices the noise has.
        seed: any integer in [0, 2^128); whoever knows it can subtract the noise. Draw it with
            ``secrets.randbits(128)``.

    Raises:
        TypeError: if ``strategy`` is not a strategy.
        ValueError: if no stream serves the strategy, it does not fit the steps, or another
            argument is out of range.
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy={strategy!r}: expected a dptrain.strategies strategy")
    for kind, stream in _STREAMS:
        if isinstance(strategy, kind):
            return stream(strategy, steps=steps, like=like, seed=seed)
    served = ", ".join(kind.__name__ for kind, _ in _STREAMS)
    raise ValueError(
        f"strategy={type(strategy).__name__}: no noise stream serves it; served are: {served}"
    )
