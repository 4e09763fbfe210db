"""Rows of a batch in groups that are clipped as one, of one size or of several."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch


class RowGroups:
    """Rows that follow one another, cut into groups that may differ in size.

    No sum depends on an order that a device is free to choose, and what is not finite in one group
    reaches no other.

    Args:
        sizes: rows of each group, at least 1; at least one group.
    """

    def __init__(self, sizes: Sequence[int] | torch.Tensor) -> None:
        self.sizes = torch.as_tensor(sizes, dtype=torch.int64).cpu()
        self.most = int(self.sizes.max())
        self._even = bool((self.sizes == self.most).all())
        self._starts = self.sizes.cumsum(0) - self.sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The first row of group ``start`` and the one past the last of group ``stop - 1``."""
        return int(self._starts[start]), int(self._starts[stop - 1] + self.sizes[stop - 1])

    def part(self, start: int, stop: int) -> RowGroups:
        """The groups ``start`` to ``stop``."""
        return RowGroups(self.sizes[start:stop])

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """A group's value for each of its rows, shape (rows,)."""
        return values.repeat_interleave(self.sizes.to(values.device))

    def summed(self, rows: torch.Tensor) -> torch.Tensor:
        """The sums of the groups' rows, shape (groups, ...)."""
        if self._even:
            return rows.unflatten(0, (-1, self.most)).sum(1)
        first = self._starts.to(rows.device)
        total = rows[first]
        for place in range(1, self.most):
            here = (self.sizes > place).nonzero()[:, 0].to(rows.device)
            total[here] = total[here] + rows[first[here] + place]
        return total

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """The groups' rows, zeros where a group has fewer than others, (groups, most, ...)."""
        if self._even:
            return rows.unflatten(0, (-1, self.most))
        owner, place = (each.to(rows.device) for each in self._places)
        table = rows.new_zeros(len(self), self.most, *rows.shape[1:])
        table[owner, place] = rows
        return table

    @functools.cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The group of each row, and its place there."""
        owner = torch.arange(len(self)).repeat_interleave(self.sizes)
        return owner, torch.arange(len(owner)) - self._starts[owner]

    @functools.cached_property
    def by_size(self) -> list[tuple[torch.Tensor, torch.Tensor, RowGroups]]:
        """Groups of about the same size together: of more than 2^(k-1) rows and at most 2^k, by k.

        Each comes as the numbers of the groups, ascending, their rows, and these as groups.
        """
        powers = torch.tensor([(size - 1).bit_length() for size in self.sizes.tolist()])
        found = []
        for power in powers.unique().tolist():
            index = (powers == power).nonzero()[:, 0]
            found.append((index, self.rows_of(index), RowGroups(self.sizes[index])))
        return found

    def rows_of(self, index: torch.Tensor) -> torch.Tensor:
        """The rows of some groups, one group after the other, on the device of ``index``."""
        at = index.cpu()
        sizes = self.sizes[at]
        skipped = self._starts[at] - (sizes.cumsum(0) - sizes)
        rows = torch.arange(int(sizes.sum())) + skipped.repeat_interleave(sizes)
        return rows.to(index.device)


def side_by_side(rows: torch.Tensor, groups: int | RowGroups) -> torch.Tensor:
    """The rows of a group in a dimension of their own, shape (groups, rows of a group, ...).

    Args:
        rows: shape (rows, ...).
        groups: so many rows each, or groups of several sizes, which are filled up with zeros.
    """
    return rows.unflatten(0, (-1, groups)) if isinstance(groups, int) else groups.padded(rows)
