"""Uses that are sums of outer products over positions: linear layers."""

from __future__ import annotations

import torch
from typing_extensions import override

from dptrain.clipping.base.linear_norms import Gram, outer_norms, rank_one_norms
from dptrain.clipping.base.products import outer_product
from dptrain.clipping.base.row_groups import RowGroups, side_by_side
from dptrain.clipping.base.rows import row_norms
from dptrain.clipping.bookkeeping.uses.use import CHUNK, FEW, Materialized, SideNorms, Use


class OuterProducts(Use):
    """g_i = Σ_t l_it r_itᵀ, for instance with output gradients l and inputs r of ``nn.Linear``.

    Args:
        left: l, shape (rows, positions, m).
        right: r, shape (rows, positions, n).
        left_norms: ‖l_i‖ for one position, where other uses have the same side.
        right_norms: likewise.
        grams: of l and of r, where other uses have the same sides.
    """

    fills_up = True

    def __init__(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        left_norms: SideNorms | None = None,
        right_norms: SideNorms | None = None,
        grams: tuple[Gram | None, Gram | None] = (None, None),
    ) -> None:
        self.left, self.right = left, right
        self._left_norms, self._right_norms = left_norms, right_norms
        self._grams = grams
        self.rows, self.positions = left.shape[:2]
        self.shape = torch.Size((left.shape[2], right.shape[2]))

    @override
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        return torch.bmm(self.left[start:stop].transpose(1, 2), self.right[start:stop])

    def norms(self) -> torch.Tensor:
        """Ghost norms, a few examples at a time, rounded up where positions cancel."""
        if self.positions > 1:
            return outer_norms(self.left, self.right, CHUNK, self._grams)
        return rank_one_norms(*self.sides_of_one)

    @property
    def sides_of_one(self) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
        """‖l_i‖ and ‖r_i‖ of the only position, and their sizes."""
        left, right = self._left_norms, self._right_norms
        return (
            row_norms(self.left[:, 0]) if left is None else left.values,
            row_norms(self.right[:, 0]) if right is None else right.values,
            (self.left.shape[2], self.right.shape[2]),
        )

    @override
    def magnitudes(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        left, right = self.left[start:stop].abs(), self.right[start:stop].abs()
        return torch.bmm(left.transpose(1, 2), right), self.positions

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """One product over all rows and positions, the smaller side scaled."""
        left, right = scaled(self.left, self.right, factors)
        if left.stride(0) < left.stride(1) or right.stride(0) < right.stride(1):
            # Positions first, as recurrent layers have them: the order of the sum is free.
            left, right = left.transpose(0, 1), right.transpose(0, 1)
        return outer_product(left.flatten(0, 1), right.flatten(0, 1))

    @override
    def select(self, index: torch.Tensor) -> OuterProducts:
        return OuterProducts(self.left[index], self.right[index])

    def folded(self, views: int | RowGroups) -> Use:
        """More positions."""
        left, right = (side_by_side(side, views).flatten(1, 2) for side in (self.left, self.right))
        return OuterProducts(left, right)

    def merged(self, other: Use) -> Use | None:
        """More positions."""
        if not isinstance(other, OuterProducts):
            return None
        return OuterProducts(
            torch.cat([self.left, other.left], dim=1), torch.cat([self.right, other.right], dim=1)
        )

    def compact(self) -> Use:
        """The gradients, where they are few, or fewer numbers than what they are made of."""
        numbers = self.shape.numel()
        fewer = numbers <= self.positions * sum(self.shape)
        if self.positions > 1 and (fewer or self.rows * numbers <= FEW):
            return Materialized(self.per_example(0, self.rows), own=True)
        return self


def scaled(
    left: torch.Tensor, right: torch.Tensor, factors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides, the rows of the smaller one times their factors."""
    by_row = factors[:, None, None]
    if left.shape[2] <= right.shape[2]:
        return left * by_row, right
    return left, right * by_row
