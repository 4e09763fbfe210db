"""Uses of convolution weights."""

from __future__ import annotations

import torch
from typing_extensions import override

from dptrain.clipping.base.row_groups import RowGroups
from dptrain.clipping.bookkeeping.convolution.convolution import (
    ConvGradients,
    ConvShape,
    costs,
    form_gradients,
    gradients_in_groups,
    per_example_weight_gradients,
    runs_in_groups,
    squared_norms,
    weighted_sum,
)
from dptrain.clipping.bookkeeping.convolution.shape import positions
from dptrain.clipping.bookkeeping.uses.uses import FEW, Materialized, Use

# Gradients that are kept may be so many times the layer's inputs and output gradients. Those make
# way for them, and so does, as the backward pass goes on, what ordinary training also holds for
# each convolution: the outputs of its normalization and of its nonlinearity.
_HELD = 3


class Convolved(Use):
    """A convolution's inputs and output gradients.

    Args:
        a: inputs, shape (rows, c, *spatial).
        g: gradients of the loss by the output, shape (rows, p, *out).
        geometry: of the convolution.
    """

    def __init__(self, a: torch.Tensor, g: torch.Tensor, geometry: ConvShape) -> None:
        self.a, self.g, self.geometry = a, g, geometry
        self.rows, self.shape = len(g), torch.Size(geometry.weight_shape)

    @override
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        return per_example_weight_gradients(self.a[start:stop], self.g[start:stop], self.geometry)

    @override
    def magnitudes(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        a, g = self.a[start:stop].abs(), self.g[start:stop].abs()
        return per_example_weight_gradients(a, g, self.geometry), positions(g.shape[2:])

    def norms(self) -> torch.Tensor:
        """Ghost norms, rounded up where positions cancel."""
        return squared_norms(self.a, self.g, self.geometry).sqrt()

    @override
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        return weighted_sum(self.a, self.g, factors, self.geometry)

    @override
    def select(self, index: torch.Tensor) -> Convolved:
        return Convolved(self.a[index], self.g[index], self.geometry)

    def compact(self) -> Use:
        """The gradients, where they are few, or cheaper to form than ghost norms and not large."""
        numbers = self.shape.numel()
        small = numbers <= _HELD * (self.a[:1].numel() + self.g[:1].numel())
        found = costs(self.geometry, tuple(self.a.shape[2:]))
        if self.rows * numbers > FEW and (not small or found.cheaper == "gram"):
            return self
        if found.groups < found.products and runs_in_groups(self.g):
            return Materialized(*gradients_in_groups(self.a, self.g, self.geometry))
        return Formed(form_gradients(self.a, self.g, self.geometry))


class Formed(Use):
    """Gradients of a convolution in the order in which they are formed.

    Args:
        formed: the gradients.
    """

    def __init__(self, formed: ConvGradients) -> None:
        self.formed = formed
        self.rows, self.shape = len(formed), torch.Size(formed.shape.weight_shape)

    @override
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        return self.formed.gradients(start, stop)

    @override
    def magnitudes(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        return self.per_example(start, stop).abs(), 0

    @override
    def norms(self) -> torch.Tensor:
        return self.formed.norms()

    @override
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        return self.formed.weighted_sum(factors)

    @override
    def select(self, index: torch.Tensor) -> Formed:
        return Formed(self.formed.select(index))

    @override
    def folded(self, views: int | RowGroups) -> Use:
        return Materialized(self.formed.gradients()).folded(views)

    def merged(self, other: Use) -> Use | None:
        """The sum, where the other is formed in the same order."""
        if isinstance(other, Formed) and other.formed.shape == self.formed.shape:
            return Formed(self.formed.plus(other.formed))
        return None
