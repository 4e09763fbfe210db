"""Uses of rows of a table that are added up, or of which the largest numbers are taken."""

from __future__ import annotations

import functools

import torch
from typing_extensions import override

from dptrain.clipping.base.linear_norms import rank_one_norms
from dptrain.clipping.base.rows import row_norms
from dptrain.clipping.bookkeeping.uses.gathered import Gathered
from dptrain.clipping.bookkeeping.uses.uses import Use


class Bagged(Gathered):
    """g_i has Σ_{t: k_it = k} c_it · b_i in its row k: one vector, and a number for each id.

    So ‖g_i‖ is the product of two norms, and nothing is as large as positions times width.

    Args:
        ids: k, shape (rows, positions).
        coefficients: c, shape (rows, positions); 0 where there is nothing.
        gradients: b, shape (rows, width).
        length: number of rows of the table.
    """

    def __init__(
        self, ids: torch.Tensor, coefficients: torch.Tensor, gradients: torch.Tensor, length: int
    ) -> None:
        self.ids, self.coefficients, self.vectors = ids, coefficients, gradients
        self.rows = len(ids)
        self.shape = torch.Size((length, gradients.shape[1]))

    @property
    def gradients(self) -> torch.Tensor:  # type: ignore[override]
        """Those of ``Gathered``, for uses of other kinds to be added."""
        return self.coefficients[..., None] * self.vectors[:, None]

    @functools.cached_property
    def _counts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For every id of every row: the row, the id, and the sum of its coefficients."""
        length = self.shape[0]
        rows = torch.arange(self.rows, device=self.ids.device)[:, None]
        keys, segment = torch.unique(rows * length + self.ids, return_inverse=True)
        sums = self.vectors.new_zeros(len(keys))
        sums.index_add_(0, segment.flatten(), self.coefficients.to(sums).flatten())
        return keys // length, keys % length, sums

    @override
    def norms(self) -> torch.Tensor:
        rows, _, sums = self._counts
        # One id a column; a row has no more of them than positions.
        first = torch.searchsorted(rows, torch.arange(self.rows, device=rows.device))
        table = sums.new_zeros(self.rows, self.ids.shape[1])
        table[rows, torch.arange(len(rows), device=rows.device) - first[rows]] = sums
        return rank_one_norms(
            row_norms(table), row_norms(self.vectors), (table.shape[1], self.shape[1])
        )

    @override
    def squares(self) -> torch.Tensor:
        return self.norms().square()

    @override
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        rows, ids, sums = self._counts
        total = self.vectors.new_zeros(self.shape)
        return total.index_add_(0, ids, (sums * factors[rows])[:, None] * self.vectors[rows])

    @override
    def select(self, index: torch.Tensor) -> Bagged:
        return Bagged(self.ids[index], self.coefficients[index], self.vectors[index], self.shape[0])

    @override
    def compact(self) -> Use:
        return self


class Picked(Use):
    """g_i has b_id in row k_id of its column d, and nothing else.

    Args:
        ids: k, shape (rows, width).
        gradients: b, shape (rows, width).
        length: number of rows of the table.
    """

    def __init__(self, ids: torch.Tensor, gradients: torch.Tensor, length: int) -> None:
        self.ids, self.gradients = ids, gradients
        self.rows = len(ids)
        self.shape = torch.Size((length, ids.shape[1]))

    @override
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        found = self.gradients.new_zeros(stop - start, *self.shape)
        return found.scatter_(1, self.ids[start:stop, None], self.gradients[start:stop, None])

    @override
    def magnitudes(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        return self.per_example(start, stop).abs(), 0

    @override
    def norms(self) -> torch.Tensor:
        return row_norms(self.gradients)

    @override
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        total = self.gradients.new_zeros(self.shape)
        return total.scatter_add_(0, self.ids, self.gradients * factors[:, None])

    @override
    def select(self, index: torch.Tensor) -> Picked:
        return Picked(self.ids[index], self.gradients[index], self.shape[0])
