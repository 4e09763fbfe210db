"""The inner product of a few weights with the rows of a buffer: one pass over its memory."""

from __future__ import annotations

import torch

_WIDENED_ENTRIES = 1 << 17  # of float32 at a time, so that the widened copy stays in cache


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
    width = max(1024, _WIDENED_ENTRIES // max(1, len(buffer)))
    for start in range(0, len(out), width):
        widened = buffer[:, start : start + width].float()
        out[start : start + width].addmv_(widened.t(), weights, beta=scale)
