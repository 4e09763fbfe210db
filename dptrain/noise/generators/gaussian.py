"""Standard normal rows that are a pure function of (seed, step, size), and cheap to draw."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from dptrain.core import checks
from dptrain.noise.generators.keystream import derive_key, key_stream
from dptrain.noise.generators.threads import for_each

CHUNK = 1 << 18
"""Normals drawn from one counter range; a constant, since it decides what a seed stands for."""

_CUDA_CHUNK = 1 << 22  # likewise; large enough to hide the launch of a kernel
_TAG = b"dptrain.noise"
_SEED_BITS = 128


def checked_seed(seed: int) -> int:
    """``seed`` if it is an integer in [0, 2^128), such as ``secrets.randbits(128)``.

    Raises:
        TypeError, ValueError: otherwise.
    """
    return checks.integer("seed", seed, minimum=0, maximum=(1 << _SEED_BITS) - 1)


def chunk_length(device: torch.device) -> int:
    """Entries of a row that one counter range holds on a device; slices at its multiples are free.

    Raises:
        ValueError: if noise cannot be drawn there.
    """
    lengths = {"cpu": CHUNK, "cuda": _CUDA_CHUNK}
    if device.type not in lengths:
        raise ValueError(f"device={device}: noise is drawn on 'cpu' or 'cuda' only")
    return lengths[device.type]


def fill_normal(
    out: torch.Tensor,
    *,
    seed: int,
    group: int,
    step: int,
    start: int = 0,
    size: int | None = None,
) -> None:
    """Overwrite ``out`` with a slice of row ``step`` of Z, a pure function of the other arguments.

    On the CPU: AES-256 in counter mode, a key for every row and a segment of its stream for every
    chunk, so that no two normals share a counter; turned into normals by the Box-Muller transform
    on as many threads as torch uses (their number does not change the result). 32 bits
    decide the radius, 32 the angle: |z| ≤ 6.77, and an ideal normal exceeds that once in 7·10^10
    draws. A cipher, because processors make its stream faster than numpy makes Philox's, and
    nobody can compute noise from other noise. torch's own CPU generator keeps 32 bits of its seed,
    few enough to try them all and subtract the noise. On CUDA: torch's Philox, seeded for every
    chunk with a 64-bit hash of (seed, group, step, chunk); its values also depend on the model of
    the GPU. The analysis assumes ideal Gaussians; these are float32.

    A chunk is drawn whole, for Box-Muller pairs lie half a chunk apart, so a slice that starts or
    ends within one costs as much as the whole chunk there.

    Args:
        out: float32, one-dimensional and contiguous, on the CPU or a CUDA device.
        seed: 0 ≤ seed < 2^128.
        group: index of the buffer that the row belongs to; groups are independent.
        step: t ≥ 0.
        start: first entry of the slice.
        size: length of the whole row, by default ``start + len(out)``; the last chunk is shorter.

    Raises:
        ValueError: if ``out`` is on another kind of device, or reaches beyond the row.
    """
    assert out.dtype == torch.float32, out.dtype
    assert out.dim() == 1, out.shape
    assert out.is_contiguous()
    size = start + len(out) if size is None else size
    if start < 0 or start + len(out) > size:
        raise ValueError(
            f"start={start} and {len(out)} entries reach beyond the row of size={size}"
        )
    length = chunk_length(out.device)
    if out.device.type == "cpu":
        key = derive_key(seed, group, step, tag=_TAG)

        def fill(whole: torch.Tensor, chunk: int) -> None:
            half = -(-len(whole) // 2)
            _box_muller(key_stream(key, chunk, half), whole)

    else:
        generator = torch.Generator(out.device)

        def fill(whole: torch.Tensor, chunk: int) -> None:
            word = derive_key(seed, group, step, chunk, tag=_TAG)[:8]
            generator.manual_seed(int.from_bytes(word, "little"))
            whole.normal_(generator=generator)

    _in_chunks(out.detach(), start, size, length, fill)


def _in_chunks(
    out: torch.Tensor,
    start: int,
    size: int,
    length: int,
    fill: Callable[[torch.Tensor, int], None],
) -> None:
    """``fill(chunk, index)`` for every chunk that [start, start + len(out)) of a row touches."""
    stop = start + len(out)

    def part(chunk: int) -> None:
        first, last = chunk * length, min((chunk + 1) * length, size)
        low, high = max(first, start), min(last, stop)
        mine = out[low - start : high - start]
        if len(mine) == last - first:
            fill(mine, chunk)
        else:
            whole = mine.new_empty(last - first)
            fill(whole, chunk)
            mine.copy_(whole[low - first : high - first])

    chunks = range(start // length, -(-stop // length) if len(out) else start // length)
    for_each(part, chunks, entries=len(out) if out.device.type == "cpu" else 0)


def _box_muller(bits: npt.NDArray[np.uint64], out: torch.Tensor) -> None:
    """``out`` ← normals, of two an element of ``bits`` (the last may be left over).

    Nothing is allocated: ``bits`` is overwritten. By torch, whose logarithms and sines take two
    thirds of the time of numpy's on one thread, and which divides an array this long among threads.
    """
    half = bits.size
    rest = len(out) - half
    words = torch.from_numpy(bits.view(np.int32))
    radius = out[:half]
    radius.copy_(words[:half].view(torch.uint32))
    radius.mul_(2.0**-32)
    radius.add_(2.0**-33)  # keeps it above 0; next to 1 it rounds to 1, a radius of 0
    radius.log_().mul_(-2.0).sqrt_()
    angle = words[:half].view(torch.float32)  # the bits that were there are used up
    angle.copy_(words[half:]).mul_(math.pi * 2.0**-31)
    other = out[half:]
    torch.sin(angle[:rest], out=other)
    other.mul_(radius[:rest])
    radius.mul_(angle.cos_())
