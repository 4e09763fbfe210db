"""Noise as it was added before releases were on a grid: float32 numbers, added to float32 sums.

Kept to be measured beside what took its place, and to be attacked: it tells what it was added to
(docs/guides/floating-point.md). Nothing trains with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from dptrain.noise.generators import derive_key, for_each, key_stream
from dptrain.strategies import BLT, Strategy
from dptrain.strategies.toeplitz import BandedToeplitz, Toeplitz

_CHUNK = 1 << 18


class FloatNoise:
    """A row of C^-1 Z in float32 at a time, by Box-Muller on 32-bit words.

    Args:
        strategy: with bands, of a banded inverse, or a BLT; bound here.
        steps: n.
        like: one parameter, of which the size matters.
        seed: integer in [0, 2^128).
    """

    grid_bits = 24
    rounding_error = None

    def __init__(self, strategy: Strategy, *, steps: int, like: torch.Tensor, seed: int) -> None:
        bound = strategy.bind(steps)
        assert isinstance(bound, Toeplitz)
        self.step, self._seed = 0, seed
        self._row = torch.zeros(like.numel())
        self._theta: torch.Tensor | None = None
        if isinstance(bound, BLT):
            assert bound.theta is not None
            assert bound.omega is not None
            self._theta = torch.tensor(bound.theta)[:, None]
            self._weights = -torch.tensor(bound.omega)
            count = len(bound.theta)
        else:
            self._banded = isinstance(bound, BandedToeplitz)
            column = bound.first_column(steps) if self._banded else bound.inverse_column(steps)
            past = np.trim_zeros(column, "b")[1:]
            self._past = -past if self._banded else past
            count = len(past)
        edges = [*range(0, like.numel(), _CHUNK), like.numel()]
        self._blocks = list(itertools.pairwise(edges))
        self._buffers = [torch.zeros(count, high - low) for low, high in self._blocks]

    def release(self, sums: Sequence[torch.Tensor | None], deviation: float) -> list[torch.Tensor]:
        """The sums with the next row, added in float32."""
        if self._theta is None:
            count = len(self._past)
            filled = min(self.step, count)
            order = np.arange(self.step - filled, self.step) % max(count, 1)
            weights = np.empty(filled)
            weights[order] = self._past[filled - 1 :: -1] if filled else []
            self._weights = torch.tensor(weights, dtype=torch.float32)
        for_each(self._advance, range(len(self._blocks)), entries=len(self._row))
        self.step += 1
        found, at = [], 0
        for total in sums:
            assert total is not None
            row = self._row[at : at + total.numel()].view_as(total)
            found.append(total.add_(row, alpha=deviation))
            at += total.numel()
        return found

    def _advance(self, number: int) -> None:
        low, high = self._blocks[number]
        row, buffer = self._row[low:high], self._buffers[number]
        key = derive_key(self._seed, 0, self.step, tag=b"dptrain.noise")
        words = key_stream(key, number, -(-(high - low) // 2))
        box_muller(torch.from_numpy(words.view(np.int32)), row)
        if self._theta is not None:
            row.addmv_(buffer.t(), self._weights)
            torch.addcmul(buffer, buffer, self._theta - 1.0, out=buffer).add_(row)
        elif len(self._past):
            drawn = row if self._banded else row.clone()
            row.addmv_(buffer[: len(self._weights)].t(), self._weights)
            buffer[self.step % len(self._past)].copy_(row if self._banded else drawn)


def box_muller(words: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` ← float32 normals of 32-bit words, int32 of the same length (or one more)."""
    half = len(words) // 2
    rest = len(out) - half
    radius = out[:half]
    radius.copy_(words[:half].view(torch.uint32))
    radius.mul_(2.0**-32).add_(2.0**-33).log_().mul_(-2.0).sqrt_()
    angle = words[:half].view(torch.float32)
    angle.copy_(words[half:]).mul_(math.pi * 2.0**-31)
    other = out[half:]
    torch.sin(angle[:rest], out=other)
    other.mul_(radius[:rest])
    radius.mul_(angle.cos_())
