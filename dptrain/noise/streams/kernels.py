"""The loops over a block of noise: compiled by numba where it pays, by numpy with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dptrain.core import Array, on_processor
from dptrain.noise.generators.compiled import chosen

_COLUMNS = 1 << 13  # entries that are summed up at a time, so that they stay in cache


def add_past(
    noise: torch.Tensor, buffer: torch.Tensor, weights: Sequence[float], finer: float
) -> None:
    """``noise`` ← ⌊(noise + ⌊``finer``·Σ_s ``weights[s]``·``buffer[s]``⌉) / ``finer`` + ½⌋.

    The last rounding is up at halves, since rounding to even would not go along with a shift by an
    odd number, and the proof needs that (docs/theory/noise.md#thm-release).
    The sum is taken in float64, row by row in their order. On the CPU exact buffers give the same
    bits on every processor, compiled or not.

    Args:
        noise: float64, shape (len,): whole numbers.
        buffer: int32, float64 or bfloat16, shape (rows, len), rows ≥ ``len(weights)``.
        weights: a factor of each of the first rows.
        finer: a power of two.
    """
    if on_processor(noise) and buffer.dtype is not torch.bfloat16:
        rows = buffer[: len(weights)].numpy()
        add = chosen(_add_past, _add_past_in_loops, _PAST, entries=len(noise))
        add(noise.numpy(), rows, np.array(weights, dtype=np.float64), finer)
        return
    past = torch.zeros_like(noise)
    for row, weight in zip(buffer, weights, strict=False):
        past.add_(row, alpha=weight)
    noise.add_(past.mul_(finer).round_()).mul_(1.0 / finer).add_(0.5).floor_()


def decay(row: torch.Tensor, factor: float, noise: torch.Tensor) -> None:
    """``row`` ← ``factor``·row + noise, all float64 of shape (len,)."""
    if on_processor(row):
        step = chosen(_decay, _decay_in_loops, _DECAY, entries=len(row))
        step(row.numpy(), factor, noise.numpy())
    else:
        row.mul_(factor).add_(noise)


def put_on_grid(values: torch.Tensor, noise: torch.Tensor, grid: float) -> None:
    """``values`` ← ``grid``·(⌊values/grid⌉ + noise), computed in float64.

    What is rounded beyond 2^53 is rounded after the whole numbers were added: post-processing.

    Args:
        values: float32 or float64, shape (len,).
        noise: float64, shape (len,): whole numbers.
    """
    supported = values.dtype in (torch.float32, torch.float64) and values.is_contiguous()
    if on_processor(values) and supported:
        put = chosen(_put_on_grid, _put_on_grid_in_loops, _GRID, entries=len(values))
        put(values.numpy(), noise.numpy(), 1.0 / grid, grid)
        return
    exact = values.double()  # a copy, or the values themselves
    exact.mul_(1.0 / grid).round_().add_(noise).mul_(grid)
    if exact is not values:
        values.copy_(exact)


def put_all_on_grid(several: Sequence[torch.Tensor], noise: torch.Tensor, grid: float) -> None:
    """``put_on_grid`` for what the noise is for, one after the other; few calls on a device.

    Args:
        several: float32 or float64, on one device, each of shape (len,).
        noise: float64, shape (sum of the lengths,): whole numbers.
    """
    sizes = [values.shape[0] for values in several]
    alike = len(several) > 1 and len({values.dtype for values in several}) == 1
    if on_processor(noise) or not alike:
        for values, own in zip(several, noise.split(sizes), strict=True):
            put_on_grid(values, own, grid)
    else:
        together = torch.cat(list(several))
        put_on_grid(together, noise, grid)
        torch._foreach_copy_(list(several), list(together.split(sizes)))


_PAST = (
    "void(float64[::1], int32[:, ::1], float64[::1], float64)",
    "void(float64[::1], float64[:, ::1], float64[::1], float64)",
)


def _add_past(noise: Array, rows: Any, weights: Array, finer: float) -> None:
    for start in range(0, len(noise), _COLUMNS):
        piece = noise[start : start + _COLUMNS]
        past = np.zeros(len(piece))
        for row, weight in zip(rows[:, start : start + _COLUMNS], weights, strict=True):
            past += row * weight
        piece += np.rint(past * finer)
        piece *= 1.0 / finer
        piece += 0.5
        np.floor(piece, out=piece)


def _add_past_in_loops(noise: Any, rows: Any, weights: Any, finer: float) -> None:
    coarser = 1.0 / finer
    past = np.empty(_COLUMNS)
    count = len(weights)
    for start in range(0, len(noise), _COLUMNS):
        size = min(_COLUMNS, len(noise) - start)
        for i in range(size):
            past[i] = 0.0
        k = 0
        while k + 4 <= count:  # four at a time: the sum is loaded and stored less often
            a, b, c, d = weights[k], weights[k + 1], weights[k + 2], weights[k + 3]
            row0, row1 = rows[k, start : start + size], rows[k + 1, start : start + size]
            row2, row3 = rows[k + 2, start : start + size], rows[k + 3, start : start + size]
            for i in range(size):
                past[i] = (((past[i] + row0[i] * a) + row1[i] * b) + row2[i] * c) + row3[i] * d
            k += 4
        if k + 2 <= count:
            a, b = weights[k], weights[k + 1]
            row0, row1 = rows[k, start : start + size], rows[k + 1, start : start + size]
            for i in range(size):
                past[i] = (past[i] + row0[i] * a) + row1[i] * b
            k += 2
        if k < count:
            a = weights[k]
            row0 = rows[k, start : start + size]
            for i in range(size):
                past[i] += row0[i] * a
        piece = noise[start : start + size]
        for i in range(size):
            piece[i] = np.floor((piece[i] + np.rint(past[i] * finer)) * coarser + 0.5)


_DECAY = ("void(float64[::1], float64, float64[::1])",)


def _decay(row: Array, factor: float, noise: Array) -> None:
    row *= factor
    row += noise


def _decay_in_loops(row: Any, factor: float, noise: Any) -> None:
    for i in range(len(row)):
        row[i] = row[i] * factor + noise[i]


_GRID = (
    "void(float32[::1], float64[::1], float64, float64)",
    "void(float64[::1], float64[::1], float64, float64)",
)


def _put_on_grid(values: Any, noise: Array, inverse: float, grid: float) -> None:
    exact = values.astype(np.float64) * inverse
    np.rint(exact, out=exact)
    exact += noise
    exact *= grid
    values[:] = exact


def _put_on_grid_in_loops(values: Any, noise: Any, inverse: float, grid: float) -> None:
    for i in range(len(values)):
        values[i] = (np.rint(values[i] * inverse) + noise[i]) * grid
