"""Uses of rows of a table: embeddings, and bags of these."""

from __future__ import annotations

import functools

import torch
from typing_extensions import override

from dptrain.clipping.base.linear_norms import rank_one_norms
from dptrain.clipping.base.row_groups import RowGroups, side_by_side
from dptrain.clipping.base.rows import row_norms
from dptrain.clipping.bookkeeping.uses.use import Materialized, Use, Whole


class Gathered(Use):
    """g_i has Σ_{t: k_it = k} b_it in its row k; no buffer has the length of the table.

    Args:
        ids: k, shape (rows, positions).
        gradients: b, shape (rows, positions, width).
        length: number of rows of the table.
    """

    fills_up = True

    def __init__(self, ids: torch.Tensor, gradients: torch.Tensor, length: int) -> None:
        self.ids, self.gradients = ids, gradients
        self.rows = len(ids)
        self.shape = torch.Size((length, gradients.shape[2]))

    @functools.cached_property
    def _sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of the gradients of each id of a row; see ``_by_id``."""
        return self._by_id(self.gradients)

    def _by_id(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The different ids of each row, and the sum of the values of each.

        A row has as many places as positions, those beyond its different ids with a sum of 0. So no
        size depends on the ids, and no device is waited for.

        Args:
            values: shape (rows, positions, ...).

        Returns:
            Of shapes (rows, positions) and (rows, positions, ...).
        """
        rows, positions = self.ids.shape
        ordered, order = self.ids.sort(dim=1)
        place = torch.zeros_like(ordered)
        torch.cumsum(ordered[:, 1:] != ordered[:, :-1], dim=1, out=place[:, 1:])
        ids = torch.zeros_like(ordered).scatter_(1, place, ordered)
        first = torch.arange(rows, device=ids.device)[:, None] * positions
        sums = values.new_zeros(rows * positions, *values.shape[2:])
        # In the order of the positions, as the gradients lie in memory.
        place = torch.zeros_like(place).scatter_(1, order, place).add_(first)
        sums.index_add_(0, place.flatten(), values.flatten(0, 1))
        return ids, sums.view(values.shape)

    def per_example(self, start: int, stop: int) -> torch.Tensor:
        """Gradients example by example: tables as long as the vocabulary, for lack of better."""
        return self._tables(self.gradients, start, stop)

    @override
    def magnitudes(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        return self._tables(self.gradients.abs(), start, stop), self.ids.shape[1]

    def _tables(self, gradients: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        found = gradients.new_zeros(stop - start, *self.shape)
        rows = torch.arange(stop - start, device=self.ids.device)[:, None]
        index = (rows.expand_as(self.ids[start:stop]), self.ids[start:stop])
        return found.index_put_(index, gradients[start:stop], accumulate=True)

    @override
    def norms(self) -> torch.Tensor:
        return row_norms(self._sums[1].flatten(1))

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """One addition to the table for every place of every row."""
        ids, sums = self._sums
        total = sums.new_zeros(self.shape)
        weighted = sums * factors[:, None, None]
        return total.index_add_(0, ids.flatten(), weighted.flatten(0, 1))

    @override
    def select(self, index: torch.Tensor) -> Gathered:
        return Gathered(self.ids[index], self.gradients[index], self.shape[0])

    def folded(self, views: int | RowGroups) -> Use:
        """More positions; what fills up a group adds zeros to the first row of the table."""
        ids = side_by_side(self.ids, views).flatten(1, 2)
        gradients = side_by_side(self.gradients, views).flatten(1, 2)
        return Gathered(ids, gradients, self.shape[0])

    def merged(self, other: Use) -> Use | None:
        """More positions; the sum, where the other is materialized, of a tied output layer say."""
        if isinstance(other, Materialized):
            return Materialized(self._added_to(other.gradients))
        if not isinstance(other, Gathered):
            return None
        return Gathered(
            torch.cat([self.ids, other.ids], dim=1),
            torch.cat([self.gradients, other.gradients], dim=1),
            self.shape[0],
        )

    def _added_to(self, gradients: torch.Tensor) -> torch.Tensor:
        """Tables of all rows with this use's gradients added, in memory of their own."""
        total = gradients.clone(memory_format=torch.contiguous_format)
        rows = torch.arange(self.rows, device=self.ids.device)[:, None]
        lines = (rows * self.shape[0] + self.ids).flatten()
        total.view(-1, self.shape[1]).index_add_(0, lines, self.gradients.flatten(0, 1).to(total))
        return total

    def compact(self) -> Use:
        """The gradients, for a table that is smaller than what is looked up in it.

        Products with rows of zeros and ones add up far faster than indexing does.
        """
        length = self.shape[0]
        if length > self.ids.shape[1]:
            return self
        table = torch.arange(length, device=self.ids.device)[:, None]
        picked = (self.ids[:, None, :] == table).to(self.gradients.dtype)
        # 0 · NaN is NaN in other rows of the table too, which are the same example's.
        return Materialized(torch.bmm(picked, self.gradients), own=True)


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
        """Gradients as ``Gathered`` has them, for uses of other kinds to be added."""
        return self.coefficients[..., None] * self.vectors[:, None]

    @functools.cached_property
    def _counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of the coefficients of each id of a row; see ``_by_id``."""
        return self._by_id(self.coefficients.to(self.vectors))

    @override
    def norms(self) -> torch.Tensor:
        counts = self._counts[1]
        sizes = counts.shape[1], self.shape[1]
        return rank_one_norms(row_norms(counts), row_norms(self.vectors), sizes)

    @override
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        ids, counts = self._counts
        total = self.vectors.new_zeros(self.shape)
        weighted = (counts * factors[:, None])[..., None] * self.vectors[:, None]
        return total.index_add_(0, ids.flatten(), weighted.flatten(0, 1))

    @override
    def select(self, index: torch.Tensor) -> Bagged:
        return Bagged(self.ids[index], self.coefficients[index], self.vectors[index], self.shape[0])

    @override
    def compact(self) -> Use:
        return self


class Picked(Whole):
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
    def norms(self) -> torch.Tensor:
        return row_norms(self.gradients)

    @override
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        total = self.gradients.new_zeros(self.shape)
        return total.scatter_add_(0, self.ids, self.gradients * factors[:, None])

    @override
    def select(self, index: torch.Tensor) -> Picked:
        return Picked(self.ids[index], self.gradients[index], self.shape[0])
