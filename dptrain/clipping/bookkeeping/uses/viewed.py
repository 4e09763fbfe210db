"""Uses of a parameter whose dimensions another use has in another shape."""

from __future__ import annotations

import torch
from typing_extensions import override

from dptrain.clipping.base.row_groups import RowGroups
from dptrain.clipping.bookkeeping.uses.uses import Materialized, Use


class Viewed(Use):
    """The gradients of another use, as a view of the parameter's shape.

    Args:
        use: has as many numbers.
        shape: of the parameter.
    """

    def __init__(self, use: Use, shape: torch.Size) -> None:
        self.use, self.rows, self.shape = use, use.rows, torch.Size(shape)

    @override
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        return self.use.per_example(start, stop).reshape(stop - start, *self.shape)

    @override
    def magnitudes(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        magnitudes, terms = self.use.magnitudes(start, stop)
        return magnitudes.reshape(stop - start, *self.shape), terms

    @override
    def norms(self) -> torch.Tensor:
        return self.use.norms()

    @override
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        return self.use.weighted_sum(factors).reshape(self.shape)

    @override
    def select(self, index: torch.Tensor) -> Viewed:
        return Viewed(self.use.select(index), self.shape)

    @property
    @override
    def fills_up(self) -> bool:
        return self.use.fills_up

    @override
    def folded(self, views: int | RowGroups) -> Use:
        return Viewed(self.use.folded(views), self.shape)

    @override
    def merged(self, other: Use) -> Use | None:
        if not isinstance(other, Viewed):
            return None
        together = self.use.merged(other.use)
        return None if together is None else Viewed(together, self.shape)

    @override
    def compact(self) -> Use:
        use = self.use.compact()
        if isinstance(use, Materialized):
            return use.viewed(self.shape)
        return Viewed(use, self.shape)
