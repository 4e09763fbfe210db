"""Uses that are sums of outer products over positions: linear layers."""

from __future__ import annotations

import torch

from dptrain.clipping.bookkeeping.uses import CHUNK, FEW, Materialised, Use
from dptrain.clipping.linear_norms import outer_norms


class OuterProducts(Use):
    """g_i = Σ_t l_it r_itᵀ, for instance with output gradients l and inputs r of ``nn.Linear``.

    Args:
        left: l, shape (rows, positions, m).
        right: r, shape (rows, positions, n).
    """

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right
        self.rows, self.positions = left.shape[:2]
        self.shape = torch.Size((left.shape[2], right.shape[2]))

    def per_example(self, start: int, stop: int) -> torch.Tensor:
        """See :meth:`Use.per_example`."""
        return torch.bmm(self.left[start:stop].transpose(1, 2), self.right[start:stop])

    def norms(self) -> torch.Tensor:
        """Ghost norms, a few examples at a time, rounded up where positions cancel."""
        return outer_norms(self.left, self.right, most=CHUNK)

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """One product over all rows and positions, the smaller side scaled."""
        left, right, by_row = self.left, self.right, factors[:, None, None]
        if left.shape[2] <= right.shape[2]:
            left = left * by_row
        else:
            right = right * by_row
        return left.flatten(0, 1).T @ right.flatten(0, 1)

    def select(self, index: torch.Tensor) -> OuterProducts:
        """See :meth:`Use.select`."""
        return OuterProducts(self.left[index], self.right[index])

    def folded(self, views: int) -> Use:
        """More positions."""
        left, right = (
            side.unflatten(0, (-1, views)).flatten(1, 2) for side in (self.left, self.right)
        )
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
        fewer = numbers < self.positions * sum(self.shape)
        if self.positions > 1 and (fewer or self.rows * numbers <= FEW):
            return Materialised(self.per_example(0, self.rows))
        return self
