"""Gradients of small parameters side by side, so that a device is asked once for all of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TypeGuard

import torch

from dptrain.clipping.base.rows import row_norms
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.clipping.bookkeeping.uses.use import Materialized, Use, flat_rows
from dptrain.core import on_processor

_SMALL = 2**14  # numbers of a parameter, such as a bias, whose gradients cost less than a call


def can_wait(use: Use) -> bool:
    """True where a device is better asked for norms together with those of others."""
    return is_small(use) or is_rank_one(use)


def is_small(use: Use) -> TypeGuard[Materialized]:
    """True for gradients on a device of as many numbers as a bias has."""
    return (
        isinstance(use, Materialized)
        and use.shape.numel() <= _SMALL
        and not on_processor(use.gradients)
    )


def is_rank_one(use: Use) -> TypeGuard[OuterProducts]:
    """True for outer products of one position on a device."""
    return isinstance(use, OuterProducts) and use.positions == 1 and not on_processor(use.left)


class Bundle:
    """Per-example gradients of several parameters, as those of one.

    Args:
        uses: at least one, by the parameters' identities; of one dtype and device.

    Attributes:
        sizes: numbers of each parameter, by the same.
    """

    def __init__(self, uses: Mapping[int, Materialized]) -> None:
        self.sizes = {key: use.shape.numel() for key, use in uses.items()}
        columns = [flat_rows(use.gradients) for use in uses.values()]
        self._matrix = torch.cat(columns, dim=1)

    @functools.cached_property
    def norms(self) -> torch.Tensor:
        """‖g_i‖₂ of all parameters together, shape (rows,)."""
        return row_norms(self._matrix)

    def sums(self, factors: torch.Tensor, index: torch.Tensor | None) -> dict[int, torch.Tensor]:
        """Σ_i f_i g_i of each parameter, flat; those of ``Materialized.weighted_sum``.

        Args:
            factors: shape (rows,), for rows of ``index``.
            index: the rows that are taken; ``None``: all.
        """
        rows = self._matrix if index is None else self._matrix[index]
        total = factors.to(device=rows.device, dtype=rows.dtype) @ rows
        parts = total.split(list(self.sizes.values()))
        return dict(zip(self.sizes, parts, strict=True))
