"""Numbers of rows and their norms."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class UnclearRows(RuntimeError):
    """Raised if nothing says whose the rows of a layer's call are; the caller names the layer."""


HALF = (torch.float16, torch.bfloat16)
"""Dtypes of 16 bits, whose sums are taken in float32."""

_BLOCK = 256  # numbers that are summed in one pass; of 1,024 equal ones the norm is 1e-6 off


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    """‖row‖₂, shape (rows,), to a few units in the last place however long the rows are.

    On a CPU torch sums up the squares of a row in one pass, whose rounding errors add up: in
    float32 the norm of 10^7 numbers comes out up to 0.8 % off, and a gradient that is found too
    short is neither clipped to R nor charged for what it contributes. Norms of blocks, of blocks of
    those and so on do not have this error.

    Args:
        rows: shape (rows, numbers); half precision is summed in float32.
    """
    dtype = summing_dtype(rows)
    if rows.stride(1) != 1:
        rows = rows.contiguous()  # others are summed up one by one: 2e-6 off for 256 equal numbers
    while rows.shape[1] > _BLOCK:
        block = _block(rows.shape[1])
        whole = rows.shape[1] // block * block
        blocks = rows[:, :whole].unflatten(1, (-1, block))
        norms = torch.linalg.vector_norm(blocks, dim=2, dtype=dtype)
        rest = rows[:, whole:].to(dtype)
        rows = torch.cat([norms, rest], dim=1) if rest.shape[1] else norms
    return torch.linalg.vector_norm(rows, dim=1, dtype=dtype)


def row_norms_error(numbers: int, dtype: torch.dtype) -> float:
    """Bound on the error of ``row_norms``, relative to the norm.

    The sum over the levels of blocks of what a sum of squares and its root are off by
    (docs/theory/clipping.md#thm-row-norms;
    ``test_norms_of_equal_numbers_are_within_the_pad_however_they_lie``). For K = 256 in float32 it
    is 7.8e-6; measured, with vectors of eight numbers and more, below 4e-7. Squares below the least
    normal number are lost besides: 2e-19 √numbers at most in float32.

    Args:
        numbers: of a row.
        dtype: that is summed in.
    """
    off, unit = 0.0, torch.finfo(dtype).eps / 2
    while numbers > _BLOCK:
        block = _block(numbers)
        off += (0.51 * (block + 1) + 1) * unit
        numbers = numbers // block + numbers % block
    return 1.01 * (off + (0.51 * (numbers + 1) + 1) * unit)


@functools.cache
def _block(numbers: int) -> int:
    """A length of blocks that leaves nothing over, if there is one that is not short."""
    divisors = (length for length in range(_BLOCK, _BLOCK // 4, -1) if numbers % length == 0)
    return next(divisors, _BLOCK)


def summing_dtype(p: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's clipped sum and of its noise: float32 for half precision.

    Rounding a large sum to 8 bits could move it by more than R for one example, and noise rounded
    so coarsely is not Gaussian any more; only the finished release is rounded to the parameter's
    dtype.
    """
    return torch.float32 if p.dtype in HALF else p.dtype


def check_rows(found: int, expected: int, views: int = 1) -> None:
    """Refuse per-example gradients that are not one per row of the batch.

    Args:
        expected: examples of the batch, padding included.
    """
    if found == expected * views:
        return
    if views == 1:
        raise UnclearRows(
            f"{found} per-example gradients for a batch of {expected} rows. Keep one row per "
            "example in the first dimension of every layer's input, and train on the loader's "
            "batch as a whole"
        )
    raise UnclearRows(
        f"{found} per-row gradients for a batch of {expected} examples with views={views}. Pass "
        f"the model {expected * views} rows, with the {views} views of an example next to each "
        "other, keep the rows in the first dimension of every layer's input, and train on the "
        "loader's batch as a whole"
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """True if a tensor is neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def check_dense(called: str, *values: Any) -> None:
    """Refuse tensors of which a row is not found by its place.

    Args:
        called: what is called on the values, as a message begins.
    """
    for value in _leaves(values):
        if not isinstance(value, torch.Tensor) or is_dense(value):
            continue
        if value.is_nested:
            raise RuntimeError(
                f"{called}, is called on a nested tensor, which has no row per example in its "
                "first dimension: call it on torch.nested.to_padded_tensor(x, 0.0), and pass "
                "the lengths or a mask, with one row per example, as another argument"
            )
        raise RuntimeError(
            f"{called}, is called on a sparse tensor (layout {value.layout}), which has no "
            "row per example in its first dimension: convert it with x.to_dense() in the "
            "collate function, in the loop or before this layer. An embedding of padded ids "
            "needs less memory"
        )


def _leaves(values: Any) -> list[Any]:
    """``tree_leaves``, which asks of every item what kind of tree it is; most calls have none."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (tuple, list, dict):
            found += _leaves(value.values() if type(value) is dict else value)
        else:
            found += tree_leaves(value)
    return found
