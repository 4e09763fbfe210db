"""Uses of a parameter in another shape, and of blocks of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from dptrain.clipping.base.row_groups import RowGroups
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.clipping.bookkeeping.uses.use import Materialized, Use


class Stacked(Use):
    """g_i is made of blocks of rows, one above the other, each with a use of its own.

    No product of one block with another is part of ‖g_i‖² = Σ ‖block‖², so the blocks are never
    padded to the parameter's shape.

    Args:
        parts: from the first rows to the last; equal in all but the first dimension.
    """

    def __init__(self, parts: Sequence[Use]) -> None:
        self.parts = list(parts)
        self.heights = [part.shape[0] for part in self.parts]
        self.rows = self.parts[0].rows
        self.fills_up = any(part.fills_up for part in self.parts)
        self.shape = torch.Size((sum(self.heights), *self.parts[0].shape[1:]))

    @override
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        return torch.cat([part.per_example(start, stop) for part in self.parts], dim=1)

    @override
    def magnitudes(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        parts, terms = zip(*(part.magnitudes(start, stop) for part in self.parts), strict=True)
        return torch.cat(parts, dim=1), max(terms)

    @override
    def norms(self) -> torch.Tensor:
        return torch.linalg.vector_norm(torch.stack([part.norms() for part in self.parts]), dim=0)

    @override
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.weighted_sum(factors) for part in self.parts])

    @override
    def select(self, index: torch.Tensor) -> Stacked:
        return Stacked([part.select(index) for part in self.parts])

    @override
    def folded(self, views: int | RowGroups) -> Use:
        return Stacked([part.folded(views) for part in self.parts])

    def merged(self, other: Use) -> Use | None:
        """Block by block, where the other can be cut into the same blocks."""
        if isinstance(other, Stacked) and other.heights == self.heights:
            blocks = other.parts
        elif isinstance(other, OuterProducts):
            sides = other.left.split(self.heights, dim=2)
            blocks = [OuterProducts(left, other.right) for left in sides]
        elif isinstance(other, Materialized):
            blocks = [Materialized(some) for some in other.gradients.split(self.heights, dim=1)]
        else:
            return None
        parts = []
        for own, block in zip(self.parts, blocks, strict=True):
            together = own.merged(block)
            if together is None:
                return None
            parts.append(together)
        return Stacked(parts)

    def compact(self) -> Use:
        """Each block in its smallest form; the gradients, where that is what all of them are."""
        parts = [part.compact() for part in self.parts]
        if all(isinstance(part, Materialized) for part in parts):
            gradients = torch.cat([part.per_example(0, self.rows) for part in parts], 1)
            return Materialized(gradients, own=True)
        return Stacked(parts)


class Viewed(Use):
    """The gradients of another use, as a view of the parameter's shape.

    Args:
        use: has as many numbers.
    """

    def __init__(self, use: Use, shape: torch.Size) -> None:
        self.use, self.rows, self.shape = use, use.rows, torch.Size(shape)
        self.fills_up = use.fills_up

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
