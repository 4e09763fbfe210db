"""Standard normals from a cryptographic generator: what ``secure=True`` draws from."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch

from dptrain.core import Array
from dptrain.noise.generators.gaussian import checked_seed
from dptrain.noise.generators.keystream import derive_key, key_stream
from dptrain.noise.generators.threads import for_each

BLOCK = 1 << 13
"""Entries of a row that are computed together; a constant, since it decides what a seed means."""

_HALF = BLOCK // 2
_DRAWS = 4  # independent Box-Muller draws that are summed into one normal
_WORDS = 2 * _DRAWS * _HALF  # 64-bit words a block: a radius and an angle for each pair of draws
_COST = 8  # of a normal, in units of what the fast generator takes: when threads are worth it


class SecureNormals:
    """Normals of AES-256 in counter mode, each the sum of four independent draws over 2.

    **Key stream.** Row t of a group has a key of its own, a keyed BLAKE2b of (group, t) under the
    seed with a domain tag; block k of the row (entries k·BLOCK and on, ``BLOCK`` = 8192) is
    segment k of its stream (``key_stream``). No two normals share a counter, and nobody who lacks
    the seed can tell the words from random ones unless AES or BLAKE2b is broken
    (docs/theory/noise.md#thm-key-stream; ``test_no_block_of_the_key_stream_repeats``).

    **Normals.** Uniforms have 53 bits: the radius √(-2 ln u) with u in {1, …, 2^53}·2^-53, the
    angle 2πv with v in {0, …, 2^53 - 1}·2^-53, all in float64. The cosines of four pairs, added up
    and halved, are one entry, their sines another one BLOCK/2 further on; the result is rounded
    once to float32. An entry is a pure function of (seed, group, t, its index): it depends neither
    on the length of the row nor on the slice that is asked for nor on the number of threads.

    **What this defends.** (1) Prediction: the noise cannot be computed from other noise. The fast
    generator of the CPU promises that too, the one of CUDA, Philox, does not. (2) The holes of
    floating-point sampling (Mironov 2012; Jin et al. 2022, arXiv 2112.05307): a single Box-Muller
    draw reaches few of the numbers around it, so that a released value can rule out a neighboring
    data set. The sum of four draws is reached in so many ways that trying whether a value can be
    reached takes about 2^159 operations (Holohan & Braghin 2021, arXiv 2107.10138;
    docs/theory/noise.md#thm-box-muller).

    **What it does not.** The noise is rounded to float32, correlated, scaled and added to the
    gradients in floating-point numbers; the analysis assumes ideal Gaussians
    (docs/theory/limits.md#thm-ideal-noise). It is not constant-time: timing and other side channels
    stay. Checkpoints hold the seed. Which examples are in a batch is drawn elsewhere, by a
    generator that is not cryptographic.

    On CUDA the same numbers are drawn on the CPU and copied: slower, and equal on every device.

    Args:
        seed: integer in [0, 2^128); draw it with ``secrets.randbits(128)``.

    Attributes:
        name: the generator, on every device.
        seed: whoever knows it can subtract the noise.

    Raises:
        ValueError: if the seed is not such an integer.
    """

    name = "AES-256-CTR by block, sum of four draws"

    def __init__(self, seed: int) -> None:
        self.seed = checked_seed(seed)

    def on(self, devices: Collection[str]) -> str:
        """The generator, which is the same on every kind of device."""
        return self.name

    def fill(
        self, out: torch.Tensor, *, group: int, step: int, start: int = 0, size: int | None = None
    ) -> None:
        """Overwrite ``out`` with entries ``start``, ``start`` + 1, … of row ``step`` of a group.

        Args:
            out: float32, one-dimensional and contiguous, on the CPU or a CUDA device.
            group: index of the buffer that the row belongs to; groups are independent.
            step: t ≥ 0.
            start: first entry; a slice equals the same entries of the whole row.
            size: length of the whole row, which a slice must not exceed.

        Raises:
            ValueError: if ``out`` is on another kind of device or the slice leaves the row.
        """
        assert out.dtype == torch.float32, out.dtype
        assert out.dim() == 1, out.shape
        assert out.is_contiguous()
        if start < 0 or (size is not None and start + len(out) > size):
            raise ValueError(
                f"start={start}: {len(out)} entries from there leave the row of size={size}"
            )
        if out.device.type == "cpu":
            _fill(out.detach().numpy(), row_key(self.seed, group=group, step=step), start)
        elif out.device.type == "cuda":
            host = torch.empty(len(out), dtype=torch.float32)
            _fill(host.numpy(), row_key(self.seed, group=group, step=step), start)
            out.copy_(host)
        else:
            raise ValueError(f"device={out.device}: noise is drawn on 'cpu' or 'cuda' only")


def row_key(seed: int, *, group: int, step: int) -> bytes:
    """The AES-256 key of a row."""
    return derive_key(seed, group, step, tag=b"dptrain.secure")


def _fill(out: npt.NDArray[np.float32], key: bytes, start: int) -> None:
    """Entries ``start`` and on of the row with this key, whole blocks at a time."""

    def fill(block: int) -> None:
        first = block * BLOCK - start  # where the block begins in ``out``; may lie before it
        low, high = max(first, 0), min(first + BLOCK, out.size)
        out[low:high] = _normals(_words(key, block))[low - first : high - first]

    blocks = range(start // BLOCK, -(-(start + out.size) // BLOCK)) if out.size else range(0)
    for_each(fill, blocks, entries=_COST * out.size)


def _words(key: bytes, block: int) -> npt.NDArray[np.uint64]:
    """The key stream of a block, shape (8, BLOCK/2): radii in the first four rows, then angles."""
    return key_stream(key, block, _WORDS).reshape(2 * _DRAWS, _HALF)


def _normals(words: npt.NDArray[np.uint64]) -> Array:
    """BLOCK normals from the words of a block (see the class); still float64."""
    uniforms = (words >> np.uint64(11)).astype(np.float64)
    radius, angle = uniforms[:_DRAWS], uniforms[_DRAWS:]
    radius += 1.0  # in 1 … 2^53, exact in float64: the logarithm is finite
    radius *= 2.0**-53
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    angle *= 2.0**-53 * 2.0 * np.pi
    # torch's float64 sine takes a third of numpy's time; arrays of this size stay on one thread.
    turns = torch.from_numpy(angle)
    out = np.empty(BLOCK)
    for half, wave in ((out[:_HALF], torch.cos(turns)), (out[_HALF:], torch.sin(turns))):
        draws = wave.numpy()
        draws *= radius
        np.sum(draws, axis=0, out=half)
        half *= 0.5
    return out
