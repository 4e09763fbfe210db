"""Sums of uses: of all those of a parameter, and of the rows of a record."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from typing_extensions import override

from dptrain.clipping.base.linear_norms import (
    Squares,
    fits_single,
    gram_product,
    gram_squares,
    in_dtype,
    parts_of_rows,
    rounded_up,
)
from dptrain.clipping.base.row_groups import RowGroups
from dptrain.clipping.bookkeeping.uses.gathered import Gathered
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.clipping.bookkeeping.uses.use import CHUNK, Materialized, Use, chunked_norms


def merge(uses: list[Use]) -> list[Use]:
    """The same sum with as few uses as their forms allow."""
    merged: list[Use] = []
    for use in uses:
        for k, other in enumerate(merged):
            together = other.merged(use)
            if together is None:
                together = use.merged(other)
            if together is not None:
                merged[k] = together
                break
        else:
            merged.append(use)
    return merged


def norms_of_sum(uses: list[Use]) -> torch.Tensor:
    """‖Σ_u g_i^u‖₂, shape (rows,), without the gradients themselves where that can be.

    Args:
        uses: of one parameter.
    """
    uses = merge(uses)
    if len(uses) == 1:
        return uses[0].norms()
    table = next((use for use in uses if isinstance(use, Gathered)), None)
    others = [use for use in uses if use is not table]
    if table is None or len(others) > 1 or not isinstance(others[0], OuterProducts):
        return chunked_norms(uses)
    return _with_table(table, others[0])


def _with_table(table: Gathered, other: OuterProducts) -> torch.Tensor:
    """Norms for weights tied between an embedding and an output layer.

    A row of a table is an outer product with a vector that has a single 1, so the sum is one of
    outer products: its Gram matrices are put together from numbers that are picked and products.
    """
    positions = table.ids.shape[1] + other.positions
    sizes = table.shape[0], table.shape[1]

    def squares(index: torch.Tensor | None, dtype: torch.dtype) -> Iterator[Squares]:
        step = max(1, CHUNK // (2 * positions**2))
        for some in parts_of_rows(table.rows, index, step):
            sides = table.ids, table.gradients, other.left, other.right
            ids, b, left, right = (side[some] for side in sides)
            left = in_dtype(left, dtype)
            ids = ids.to(left.device)
            picked = left.gather(2, ids[:, None, :].expand(-1, other.positions, -1))
            same = (ids[:, :, None] == ids[:, None, :]).to(dtype)
            own = gram_product(left, left)
            mine = torch.cat(
                [torch.cat([same, picked.transpose(1, 2)], 2), torch.cat([picked, own], 2)], 1
            )
            both = in_dtype(torch.cat([b, right], dim=1), dtype)
            yield gram_squares([mine], [gram_product(both, both)], sizes)

    single = fits_single((table.gradients, other.left, other.right), positions, sizes)
    found = rounded_up(squares, table.gradients, single=single)
    return found.sqrt().to(table.gradients.dtype).to(table.gradients.device)


def folded(use: Use, groups: int | RowGroups) -> Use:
    """The sums over groups of rows, without much to fill up groups with.

    A use that puts the rows of a group beside each other has as much to work on as if all groups
    were as large as the largest. In parts whose largest group is twice the smallest at most, it has
    twice the rows that there are.
    """
    if isinstance(groups, int) or not use.fills_up:
        return use.folded(groups)
    if len(groups.by_size) == 1:
        return use.folded(groups)
    parts = [Part(index, [use.select(rows).folded(part)]) for index, rows, part in groups.by_size]
    return Parted(parts, len(groups), groups)


class Part(NamedTuple):
    """Some records: their places, ascending, and the uses that add up to their gradients."""

    records: torch.Tensor
    uses: list[Use]


class Parted(Use):
    """Each record is in one of several parts, which are as uses of their own.

    Args:
        parts: without one in common; no part is empty.
        rows: records of all parts.
        groups: the rows that were folded; uses of the same ones have the same parts.
    """

    def __init__(self, parts: Sequence[Part], rows: int, groups: RowGroups | None) -> None:
        self.parts, self.rows, self._groups = list(parts), rows, groups
        self.shape = self.parts[0].uses[0].shape if self.parts else torch.Size()

    def _within(self, start: int, stop: int) -> Iterator[tuple[torch.Tensor, Part, int, int]]:
        """For each part with records in the range: their places there, the part, its range."""
        for part in self.parts:
            first = int((part.records < start).sum())
            last = int((part.records < stop).sum())
            if last > first:
                yield part.records[first:last] - start, part, first, last

    def _put_together(
        self, start: int, stop: int, made: Callable[[Part, int, int], torch.Tensor]
    ) -> torch.Tensor:
        """For the records in the range what is made of each part, in their places."""
        found: torch.Tensor | None = None
        for places, part, first, last in self._within(start, stop):
            rows = made(part, first, last)
            found = rows.new_empty(stop - start, *rows.shape[1:]) if found is None else found
            found[places.to(rows.device)] = rows
        assert found is not None
        return found

    @override
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        def added(part: Part, first: int, last: int) -> torch.Tensor:
            each = (use.per_example(first, last) for use in part.uses)
            return functools.reduce(torch.add, each)

        return self._put_together(start, stop, added)

    @override
    def magnitudes(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        terms: list[int] = []

        def added(part: Part, first: int, last: int) -> torch.Tensor:
            rows, counts = zip(*(use.magnitudes(first, last) for use in part.uses), strict=True)
            terms.append(sum(counts) + len(part.uses))
            return functools.reduce(torch.add, rows)

        return self._put_together(start, stop, added), max(terms)

    @override
    def norms(self) -> torch.Tensor:
        return self._put_together(0, self.rows, lambda part, _, __: norms_of_sum(list(part.uses)))

    @override
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor | None = None
        for part in self.parts:
            own = factors[part.records.to(factors.device)]
            for use in part.uses:
                found = use.weighted_sum(own)
                total = found if total is None else total.add_(found)
        return factors.new_zeros(self.shape) if total is None else total

    @override
    def select(self, index: torch.Tensor) -> Parted:
        """The records of ``index``, ascending."""
        place = torch.full((self.rows,), -1, dtype=torch.int64)
        place[index.cpu()] = torch.arange(len(index))
        parts = []
        for part in self.parts:
            kept = (place[part.records] >= 0).nonzero()[:, 0]
            if len(kept):
                uses = [use.select(kept.to(index.device)) for use in part.uses]
                parts.append(Part(place[part.records[kept]], uses))
        selected = Parted(parts, len(index), None)
        selected.shape = self.shape
        return selected

    @override
    def merged(self, other: Use) -> Use | None:
        """The same parts with the uses of both; what is materialized is cut into these parts."""
        if isinstance(other, Parted) and self._groups is not None and other._groups is self._groups:
            pairs = zip(self.parts, other.parts, strict=True)
            parts = [Part(one.records, [*one.uses, *two.uses]) for one, two in pairs]
        elif isinstance(other, Materialized):
            device = other.gradients.device
            parts = [
                Part(p.records, [*p.uses, other.select(p.records.to(device))]) for p in self.parts
            ]
        else:
            return None
        return Parted(parts, self.rows, self._groups)

    @override
    def compact(self) -> Use:
        """Each part in its smallest form; the gradients, where that is what all of them are."""
        parts = [Part(part.records, [use.compact() for use in part.uses]) for part in self.parts]
        found = Parted(parts, self.rows, self._groups)
        if all(isinstance(use, Materialized) for part in parts for use in part.uses):
            return Materialized(found.per_example(0, self.rows), own=True)
        return found
