"""Rows of buffers: their weights, and how they are stored in bfloat16."""

from __future__ import annotations

import threading

import numpy as np
import torch

from dptrain.core import Array, on_processor
from dptrain.noise.generators import chunk_length
from dptrain.noise.generators.keystream import derive_key, key_stream
from dptrain.noise.generators.normals import CHUNK
from dptrain.noise.streams.layout import Block

_DROPPED = 16  # bits of a float32 that bfloat16 has no room for
_memory = threading.local()


def weights_by_slot(past: Array, step: int, slots: int) -> list[float]:
    """Factors of the rows of a ring, in which step u stands in slot u mod ``slots``.

    Args:
        past: of the latest ``len(past)`` ≤ ``slots`` steps before ``step``, the oldest first. Only
            these slots are filled.
        step: t.
        slots: rows of the ring.

    Returns:
        One for each filled slot, in their order.
    """
    steps = np.arange(step - len(past), step)
    ordered = np.empty(len(past))
    ordered[steps % max(slots, 1)] = past
    return ordered.tolist()


def scratch(name: str, length: int, device: torch.device) -> torch.Tensor:
    """Memory of this thread for ``length`` float64 numbers, one for each name; not cleared."""
    if device.type != "cpu" or length > CHUNK:
        return torch.empty(length, dtype=torch.float64, device=device)
    kept: dict[str, torch.Tensor] = vars(_memory).setdefault("tensors", {})
    if name not in kept:
        kept[name] = torch.empty(CHUNK, dtype=torch.float64)
    return kept[name][:length]


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
        index: which of the rows of this step's state.
        block: the place of the entries in their row, so that a slice rounds as the whole row does.
    """
    length = chunk_length(values.device)
    chunk = block.start // length
    inside = slice(block.start - chunk * length, block.stop - chunk * length)
    whole = min(length, block.size - chunk * length)
    numbers = (block.group, step, index, chunk)
    key = derive_key(seed, *numbers, tag=b"dptrain.rounding")
    if on_processor(values):
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
