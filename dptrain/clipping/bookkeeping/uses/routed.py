"""Uses of matrices of which every position has one: experts."""

from __future__ import annotations

import torch
from typing_extensions import override

from dptrain.clipping.base.linear_norms import outer_norms
from dptrain.clipping.base.row_groups import RowGroups, side_by_side
from dptrain.clipping.bookkeeping.uses.outer import scaled
from dptrain.clipping.bookkeeping.uses.use import CHUNK, Use


class Routed(Use):
    """g_i has Σ_{t: e_it = e} l_it r_itᵀ for its expert e.

    Products of positions of different experts are no part of ‖g_i‖²
    (docs/theory/clipping.md#thm-outer-norms).

    Args:
        left: l, shape (rows, positions, m).
        right: r, shape (rows, positions, n).
        experts: e, shape (rows, positions).
        count: of experts.
    """

    fills_up = True

    def __init__(
        self, left: torch.Tensor, right: torch.Tensor, experts: torch.Tensor, count: int
    ) -> None:
        self.left, self.right, self.experts, self.count = left, right, experts, count
        self.rows, self.positions = left.shape[:2]
        self.shape = torch.Size((count, left.shape[2], right.shape[2]))

    @override
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        return self._formed(self.left[start:stop], self.right[start:stop], start, stop)

    @override
    def magnitudes(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        left, right = self.left[start:stop].abs(), self.right[start:stop].abs()
        return self._formed(left, right, start, stop), self.positions

    def _formed(
        self, left: torch.Tensor, right: torch.Tensor, start: int, stop: int
    ) -> torch.Tensor:
        found = []
        for expert in range(self.count):
            # Others' values are left out, not multiplied away: 0 · NaN is NaN.
            others = (self.experts[start:stop] != expert)[..., None]
            own = left.masked_fill(others, 0.0).transpose(1, 2)
            found.append(torch.bmm(own, right.masked_fill(others, 0.0)))
        return torch.stack(found, dim=1)

    @override
    def norms(self) -> torch.Tensor:
        """Ghost norms, a few examples at a time, rounded up where positions cancel."""
        return outer_norms(self.left, self.right, CHUNK, kinds=self.experts)

    @override
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        left, right = scaled(self.left, self.right, factors)
        left, right, experts = left.flatten(0, 1), right.flatten(0, 1), self.experts.flatten()
        order = experts.argsort()
        counts = torch.bincount(experts, minlength=self.count).tolist()
        pairs = zip(left[order].split(counts), right[order].split(counts), strict=True)
        return torch.stack([a.T @ b for a, b in pairs])

    @override
    def select(self, index: torch.Tensor) -> Routed:
        return Routed(self.left[index], self.right[index], self.experts[index], self.count)

    @override
    def folded(self, views: int | RowGroups) -> Use:
        """More positions; what fills up a group adds zeros to the first expert."""
        left, right, experts = (
            side_by_side(part, views).flatten(1, 2)
            for part in (self.left, self.right, self.experts)
        )
        return Routed(left, right, experts, self.count)

    @override
    def merged(self, other: Use) -> Use | None:
        """More positions."""
        if not isinstance(other, Routed):
            return None
        left, right, experts = (
            torch.cat(pair, dim=1)
            for pair in (
                (self.left, other.left),
                (self.right, other.right),
                (self.experts, other.experts),
            )
        )
        return Routed(left, right, experts, self.count)
