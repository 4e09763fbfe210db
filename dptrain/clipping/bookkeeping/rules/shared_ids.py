"""Ids that an embedding looks up for all examples at once, as positions are."""

from __future__ import annotations

import torch

from dptrain.clipping.base.rows import UnclearRows


def are_shared(ids: torch.Tensor, rows: int, *, stayed: bool = False) -> bool:
    """Whether all examples share these ids, where no passes over few rows have shown it.

    Args:
        ids: that are looked up.
        rows: that the model sees.
        stayed: whether there were as many for another number of rows.

    Raises:
        UnclearRows: for ids that may be the examples' or shared.
    """
    if ids.dim() and len(ids) == rows:
        if rows == 1 or not (stayed or ids.dim() == 1):
            return False
        raise UnclearRows(
            f"it looks up ids of shape {tuple(ids.shape)} in a batch of {rows} rows, which may be "
            "positions that all examples share or the examples' own: give what all examples share "
            "the shape (1, positions), and ids of the examples' own the shape (rows, 1)"
        )
    if _like_positions(ids):
        return True
    raise UnclearRows(
        f"it looks up ids of shape {tuple(ids.shape)} in a batch of {rows} rows, which are neither "
        "consecutive, as positions are, nor all the same, and may be the examples' own: put the "
        "examples in the first dimension, and give what they share a row for each of them "
        "(ids.expand(rows, ...))"
    )


def _like_positions(ids: torch.Tensor) -> bool:
    """Whether ids follow one another, either way, or are all the same."""
    steps = ids.flatten().diff()
    return bool(((steps == steps[:1]) & (steps.abs() <= 1)).all())
