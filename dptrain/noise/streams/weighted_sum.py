"""The inner product of a few weights with the rows of a buffer: one pass over its memory."""

from __future__ import annotations

import torch

# bfloat16 entries that are widened at a time, so that the float32 copy stays in cache.
_WIDENED_ROWS = 64
_WIDENED_COLUMNS = 1 << 13


def add_weighted_rows(
    out: torch.Tensor, buffer: torch.Tensor, weights: torch.Tensor, *, scale: float
) -> None:
    """``out`` ← ``scale``·``out`` + Σ_s ``weights[s]``·``buffer[s]``, in float32.

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
