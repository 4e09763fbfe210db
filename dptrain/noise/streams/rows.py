"""Rows of buffers: their weighted sums, and how they are stored in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from dptrain.core import Array
from dptrain.noise.generators import chunk_length
from dptrain.noise.generators.keystream import derive_key, key_stream
from dptrain.noise.streams.layout import Block

_DROPPED = 16  # bits of a float32 that bfloat16 has no room for
# bfloat16 entries that are widened at a time, so that the float32 copy stays in cache.
_WIDENED_ROWS = 64
_WIDENED_COLUMNS = 1 << 13


def weights_by_slot(
    past: Array, step: int, slots: int, devices: Iterable[torch.device]
) -> dict[torch.device, torch.Tensor]:
    """Factors of the rows of a ring, in which step u stands in slot u mod ``slots``.

    Args:
        past: of the latest ``len(past)`` ≤ ``slots`` steps before ``step``, the oldest first. Only
            these slots are filled.
        step: t.
        slots: rows of the ring.
        devices: where factors are wanted.

    Returns:
        float32 of shape (len(past),) for each device.
    """
    steps = np.arange(step - len(past), step)
    ordered = np.empty(len(past))
    ordered[steps % max(slots, 1)] = past
    return {
        device: torch.tensor(ordered, dtype=torch.float32, device=device) for device in set(devices)
    }


def add_weighted_rows(
    out: torch.Tensor, buffer: torch.Tensor, weights: torch.Tensor, *, scale: float
) -> None:
    """The inner product of a few weights with the rows of a buffer, in one pass over its memory.

    ``out`` ← ``scale``·``out`` + Σ_s ``weights[s]``·``buffer[s]``, in float32.

    Args:
        out: float32, shape (len,).
        buffer: float32 or bfloat16, shape (rows, len).
        weights: float32, shape (rows,), on the device of both.
        scale: factor of what ``out`` holds.
    """
    if buffer.dtype is torch.float32 or buffer.device.type != "cpu":
        out.addmv_(buffer.t().to(torch.float32), weights, beta=scale)
        return
    widened = torch.empty(min(_WIDENED_ROWS, len(buffer)), min(_WIDENED_COLUMNS, len(out)))
    for start in range(0, len(out), _WIDENED_COLUMNS):
        piece = out[start : start + _WIDENED_COLUMNS]
        for first in range(0, len(buffer), _WIDENED_ROWS):
            rows = slice(first, first + _WIDENED_ROWS)
            part = buffer[rows, start : start + _WIDENED_COLUMNS]
            copy = widened[: len(part), : len(piece)].copy_(part)
            piece.addmv_(copy.t(), weights[rows], beta=1.0 if first else scale)


def round_randomly(
    values: torch.Tensor, out: torch.Tensor, *, seed: int, step: int, index: int, block: Block
) -> None:
    """``out`` ← ``values`` rounded to bfloat16, up or down at random, so that the mean is kept.

    A float32 between two neighbors of bfloat16 goes to either with the probability that makes
    E[out] = values exactly: a uniform 16-bit number is added to the bits of the float32 below its
    last 16, which are then cut off. The error is less than 2^-7 of the value and its standard
    deviation at most 2^-8 of it. The bits are a function of (seed, group, step, index, entry), in a
    domain of their own beside the normals'; they come from the same cipher (CUDA: Philox).

    Args:
        values: float32, shape (len,), the entries of ``block``.
        out: bfloat16, shape (len,), not overlapping ``values``.
        seed: 0 ≤ seed < 2^128.
        step: t.
        index: which of the rows of this step's state.
        block: the place of the entries in their row, so that a slice rounds as the whole row does.
    """
    length = chunk_length(values.device)
    chunk = block.start // length
    inside = slice(block.start - chunk * length, block.stop - chunk * length)
    whole = min(length, block.size - chunk * length)
    numbers = (block.group, step, index, chunk)
    key = derive_key(seed, *numbers, tag=b"dptrain.rounding")
    if values.device.type == "cpu":
        words = key_stream(key, 0, -(-inside.stop // 4)).view(np.uint16)[inside]
        bits = torch.from_numpy(words.astype(np.int32))
    else:
        generator = torch.Generator(values.device)
        generator.manual_seed(int.from_bytes(key[:8], "little"))
        drawn = torch.empty(whole, dtype=torch.int32, device=values.device)
        bits = drawn.random_(0, 1 << _DROPPED, generator=generator)[inside]
    bits += values.view(torch.int32)
    bits &= -1 << _DROPPED
    out.copy_(bits.view(torch.float32))  # exact: the dropped bits are zero
