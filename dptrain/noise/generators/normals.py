"""Rows of rounded standard normals: pure functions of (seed, group, step, index)."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import torch

from dptrain.core import checks, on_processor
from dptrain.noise.generators.keystream import derive_key, key_stream
from dptrain.noise.generators.rounded import (
    WORDS,
    rounded_normals,
    rounded_normals_of_tensors,
)
from dptrain.noise.generators.threads import for_each

AES = "AES-256-CTR"
"""Name of the generator of the CPU, in statements."""

PHILOX = "Philox"
"""Name of the generator of CUDA devices, in statements."""

_LAW = "rounded normals with dither"

FAST = f"{AES} by chunk ({PHILOX} on CUDA), {_LAW}"
"""Name of the generator that draws on the device itself, as states have it."""

SECURE = f"{AES} by chunk on every device, {_LAW}"
"""Name of the one that draws from cryptographic bits on every device."""

CHUNK = 1 << 16
"""Normals drawn from one counter range; a constant, since it decides what a seed stands for."""

_CUDA_CHUNK = 1 << 21  # likewise; large enough to hide the launch of a kernel
_TAG = b"dptrain.noise"
_SEED_BITS = 128


def chunk_length(device: torch.device) -> int:
    """Entries of a row that one counter range holds on a device; slices at its multiples are free.

    Raises:
        ValueError: if noise cannot be drawn there.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device}: normals are drawn on 'cpu' or 'cuda' only")
    return CHUNK if on_processor(device) else _CUDA_CHUNK


class Normals:
    """Rows of i.i.d. rounded standard normals, each a pure function of (seed, group, step, size).

    On the CPU the words are those of AES-256 in counter mode, a key for every row and a segment of
    its stream for every chunk, so that no two normals share a counter; the integers are the same on
    every processor and for every number of threads. torch's own CPU generator keeps 32 bits of its
    seed, few enough to try them all and subtract the noise. On CUDA: torch's Philox, seeded for
    every chunk with a 64-bit hash of (seed, group, step, chunk); the last bits also depend on the
    model of the GPU.

    Philox promises nothing to those who see some of its numbers. With ``secure`` the numbers of a
    CUDA device are drawn on the CPU and copied: slower, and equal on every device. That is not
    constant-time: timing and other side channels stay. Checkpoints hold the seed. Which examples
    are in a batch is drawn elsewhere, by a generator that is not cryptographic.

    Args:
        seed: integer in [0, 2^128), such as ``secrets.randbits(128)``; whoever knows it can
            subtract the noise.
        secure: cryptographic bits on every device.

    Attributes:
        name: the generator, on whatever device, as states name it.

    Raises:
        TypeError, ValueError: if the seed is no such integer.
    """

    def __init__(self, seed: int, *, secure: bool = False) -> None:
        self.seed = checks.integer("seed", seed, minimum=0, maximum=(1 << _SEED_BITS) - 1)
        self.secure, self.name = secure, SECURE if secure else FAST

    def on(self, devices: Collection[str]) -> str:
        """The generator as the guarantee names it, of rows on these kinds of device."""
        if self.secure or {"cuda", "cpu"} <= set(devices):
            return self.name
        return (
            f"{PHILOX} by chunk on CUDA, {_LAW}" if "cuda" in devices else f"{AES} by chunk, {_LAW}"
        )

    def fill(
        self,
        out: torch.Tensor,
        *,
        group: int,
        step: int,
        start: int = 0,
        size: int | None = None,
        bits: int,
        scale: float = 1.0,
    ) -> None:
        """Overwrite ``out`` with a slice of row ``step`` of a group: integers, in float64.

        An entry is a standard normal times ``scale``·2^``bits``, rounded, plus a small uniform
        dither (``rounded_normals``; docs/theory/noise.md#thm-rounded-normals). A chunk is drawn
        whole, for pairs lie half a chunk apart, so a slice that starts or ends within one costs as
        much as the whole chunk there.

        Args:
            out: float64, one-dimensional and contiguous, on the CPU or a CUDA device.
            group: index of the buffer that the row belongs to; groups are independent.
            step: t ≥ 0.
            start: first entry; a slice equals the same entries of the whole row.
            size: length of the whole row, by default ``start + len(out)``; the last chunk is
                shorter.
            bits: of the grid, which is 2^-``bits``.
            scale: factor of the standard deviation.

        Raises:
            ValueError: if ``out`` is on another kind of device, or reaches beyond the row.
        """
        flat = out.dtype == torch.float64 and out.dim() == 1 and out.is_contiguous()
        checks.invariant(flat, f"noise is drawn into a tensor of {out.dtype} and shape {out.shape}")
        size = start + len(out) if size is None else size
        if start < 0 or start + len(out) > size:
            raise ValueError(
                f"start={start} and {len(out)} entries reach beyond the row of size={size}"
            )
        length = chunk_length(out.device)
        if self.secure and out.device.type != "cpu":
            host = torch.empty(len(out), dtype=torch.float64)
            self.fill(host, group=group, step=step, start=start, size=size, bits=bits, scale=scale)
            out.copy_(host)
            return
        if on_processor(out):
            key = derive_key(self.seed, group, step, tag=_TAG)

            def fill(whole: torch.Tensor, chunk: int) -> None:
                words = key_stream(key, chunk, WORDS * -(-len(whole) // 2)).view(np.int64)
                rounded_normals(words, whole.numpy(), bits=bits, scale=scale)

        else:
            generator = torch.Generator(out.device)

            def fill(whole: torch.Tensor, chunk: int) -> None:
                word = derive_key(self.seed, group, step, chunk, tag=_TAG)[:8]
                generator.manual_seed(int.from_bytes(word, "little"))
                words = philox_words(WORDS * -(-len(whole) // 2), generator)
                rounded_normals_of_tensors(words, whole, bits=bits, scale=scale)

        _in_chunks(out.detach(), start, size, length, fill)


def philox_words(count: int, generator: torch.Generator) -> torch.Tensor:
    """Uniform 64-bit words on the device of a generator, int64, shape (count,)."""
    words = torch.empty(count, dtype=torch.int64, device=generator.device)
    return words.random_(-(1 << 63), None, generator=generator)


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
    for_each(part, chunks, entries=len(out) if on_processor(out) else 0)
