"""Standard normal rows that are a pure function of (seed, step, size), and cheap to draw."""

from __future__ import annotations

import functools
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

CHUNK = 1 << 17
"""Normals drawn from one counter range; a constant, since it decides what a seed stands for."""

_SEED_BITS = 128
# A smaller row takes a few ms at most, and waking threads on a busy machine costs as much.
_PARALLEL_FROM = 8 * CHUNK


def checked_seed(seed: int) -> int:
    """``seed`` if it is an integer in [0, 2^128).

    Raises:
        ValueError: otherwise.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise ValueError(f"seed={seed!r}: must be an integer, such as secrets.randbits(128)")
    if not 0 <= seed < 1 << _SEED_BITS:
        raise ValueError(
            f"seed={seed}: must be between 0 and 2**128 - 1, such as secrets.randbits(128)"
        )
    return int(seed)


def fill_normal(out: torch.Tensor, *, seed: int, group: int, step: int) -> None:
    """Overwrite ``out`` with row ``step`` of Z, a pure function of the arguments and its size.

    On the CPU: Philox with a 128-bit key hashed from (seed, group) and the step and the chunk in
    its counter, so that no two rows share a counter, turned into normals by the Box-Muller
    transform in blocks that a few threads share (their number does not change the result). 32 bits
    decide the radius, 32 the angle: |z| ≤ 6.77, and an ideal normal exceeds that once in 7·10^10
    draws. torch's own CPU generator is not used: it keeps 32 bits of its seed, few enough to try
    them all and subtract the noise. On CUDA: torch's Philox, seeded every step with a 64-bit hash
    of (seed, group, step). The analysis assumes ideal Gaussians; these are float32.

    Args:
        out: float32, one-dimensional and contiguous, on the CPU or a CUDA device.
        seed: 0 ≤ seed < 2^128.
        group: index of the buffer that the row belongs to; groups are independent.
        step: t ≥ 0.

    Raises:
        ValueError: if ``out`` is on another kind of device.
    """
    assert out.dtype == torch.float32, out.dtype
    assert out.dim() == 1, out.shape
    assert out.is_contiguous()
    if out.device.type == "cpu":
        key = np.frombuffer(_hash(seed, group, size=16), dtype="<u8").astype(np.uint64)
        _fill_cpu(out.detach().numpy(), key, step)
    elif out.device.type == "cuda":
        generator = torch.Generator(out.device)
        generator.manual_seed(int.from_bytes(_hash(seed, group, step, size=8), "little"))
        out.normal_(generator=generator)
    else:
        raise ValueError(f"device={out.device}: noise is drawn on 'cpu' or 'cuda' only")


def _hash(*numbers: int, size: int) -> bytes:
    """``size`` bytes that depend on all numbers; the tag keeps other users of the seed apart."""
    data = b"".join(number.to_bytes(_SEED_BITS // 8, "little") for number in numbers)
    return hashlib.blake2b(data, digest_size=size, person=b"dptrain.noise").digest()


def _fill_cpu(out: npt.NDArray[np.float32], key: npt.NDArray[np.uint64], step: int) -> None:
    starts = range(0, out.size, CHUNK)

    def fill(start: int) -> None:
        philox = np.random.Philox(key=key, counter=[0, 0, start // CHUNK, step])
        _box_muller(philox, out[start : start + CHUNK])

    workers = torch.get_num_threads()
    if workers > 1 and out.size >= _PARALLEL_FROM:
        list(_pool(os.getpid(), workers).map(fill, starts))
    else:
        for start in starts:
            fill(start)


def _box_muller(bits: np.random.Philox, out: npt.NDArray[np.float32]) -> None:
    half = -(-out.size // 2)
    rest = out.size - half
    words = bits.random_raw(half).view(np.uint32)
    radius = out[:half]
    np.copyto(radius, words[:half], casting="unsafe")
    radius *= np.float32(2.0**-32)
    radius += np.float32(2.0**-33)  # keeps it above 0; next to 1 it rounds to 1, a radius of 0
    np.log(radius, out=radius)
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    angle = words[half:].view(np.int32).astype(np.float32)
    angle *= np.float32(np.pi * 2.0**-31)
    np.sin(angle[:rest], out=out[half:])
    out[half:] *= radius[:rest]
    radius *= np.cos(angle, out=angle)


@functools.lru_cache(maxsize=4)
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """One pool per process: the threads of a parent do not survive a fork."""
    return ThreadPoolExecutor(workers, thread_name_prefix="dptrain-noise")
