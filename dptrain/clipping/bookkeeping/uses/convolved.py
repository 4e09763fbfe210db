"""Uses of convolution weights."""

from __future__ import annotations

import torch
from typing_extensions import override

from dptrain.clipping.base.products import multiplies_bfloat16
from dptrain.clipping.base.row_groups import RowGroups, side_by_side
from dptrain.clipping.base.rows import summing_dtype
from dptrain.clipping.bookkeeping.convolution.convolution import Costs, costs, weighted_sum
from dptrain.clipping.bookkeeping.convolution.gram import squared_norms
from dptrain.clipping.bookkeeping.convolution.grouped import gradients_in_groups, runs_in_groups
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape, positions
from dptrain.clipping.bookkeeping.convolution.unfolded import unfolded_gradients
from dptrain.clipping.bookkeeping.uses.arranged import Viewed
from dptrain.clipping.bookkeeping.uses.formed import form_gradients, kept_gradients
from dptrain.clipping.bookkeeping.uses.use import FEW, Folded, Materialized, Use
from dptrain.core import on_processor

# Gradients that are kept may be so many times the layer's inputs and output gradients. Those make
# way for them, and so does, as the backward pass goes on, what ordinary training also holds for
# each convolution: the outputs of its normalization and of its nonlinearity.
_HELD = 3


class Convolved(Use):
    """A convolution's inputs and output gradients.

    Args:
        a: inputs, shape (rows, c, *spatial).
        g: gradients of the loss by the output, shape (rows, p, *out).
    """

    fills_up = True

    def __init__(self, a: torch.Tensor, g: torch.Tensor, geometry: ConvShape) -> None:
        self.a, self.g, self.geometry = a, g, geometry
        self.rows, self.shape = len(g), torch.Size(geometry.weight_shape)

    @override
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        return form_gradients(self.a[start:stop], self.g[start:stop], self.geometry).per_example()

    @override
    def magnitudes(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        a, g = self.a[start:stop].abs(), self.g[start:stop].abs()
        return form_gradients(a, g, self.geometry).per_example(), positions(g.shape[2:])

    def norms(self) -> torch.Tensor:
        """Ghost norms, rounded up where positions cancel."""
        squares = squared_norms(self.a, self.g, self.geometry)
        return squares.sqrt().to(summing_dtype(self.g)).to(self.g.device)

    @override
    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        return weighted_sum(self.a, self.g, factors, self.geometry)

    @override
    def select(self, index: torch.Tensor) -> Convolved:
        return Convolved(self.a[index], self.g[index], self.geometry)

    @override
    def folded(self, views: int | RowGroups) -> Use:
        return ConvolvedGroups(self, views)

    def forming(self) -> Costs | None:
        """The costs of gradients that are few, or small and cheaper than ghost norms; or none."""
        numbers = self.shape.numel()
        small = numbers <= _HELD * (self.a[:1].numel() + self.g[:1].numel())
        half = multiplies_bfloat16(self.g)
        found = costs(self.geometry, tuple(self.a.shape[2:]), half=half)
        worth = self.rows * numbers <= FEW or (small and found.cheaper != "gram")
        return found if worth else None

    def compact(self) -> Use:
        """The gradients, where they are worth forming."""
        found = self.forming()
        if found is None:
            return self
        dtype = summing_dtype(self.g)
        if not on_processor(self.g):
            gradients = unfolded_gradients(self.a, self.g, self.geometry, dtype)
            return Materialized(gradients, own=True)
        if found.groups < found.products:
            a, g = self.a.to(dtype), self.g.to(dtype)
            if runs_in_groups(g):
                return Materialized(*gradients_in_groups(a, g, self.geometry), own=True)
        return kept_gradients(self.a, self.g, self.geometry)


class ConvolvedGroups(Folded):
    """Sums over groups of rows of a convolution's gradients, as gradients of one row for each.

    The rows of a group stand along a dimension of their own, across which the kernel does not
    reach: the gradient of that convolution is the sum of theirs. It costs what gradients of single
    rows cost, and holds a group's in place of each row's.

    Args:
        views: as of ``Folded``.
    """

    use: Convolved

    def _joint(self, start: int, stop: int) -> Convolved:
        """The groups of the range as rows, of a convolution with one dimension more."""
        rows, part = slice(*self.groups.span(start, stop)), self.groups.part(start, stop)
        a, shape = self.use.geometry.padded(self.use.a[rows])
        # After the first dimension: its taps then read what is next to each other in memory.
        a, g = (side_by_side(each, part).movedim(1, 3) for each in (a, self.use.g[rows]))
        return Convolved(a, g, shape.with_dimension(1))

    @override
    def per_example(self, start: int, stop: int) -> torch.Tensor:
        return self._joint(start, stop).per_example(0, stop - start).reshape(-1, *self.shape)

    @override
    def magnitudes(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        found, terms = self._joint(start, stop).magnitudes(0, stop - start)
        return found.reshape(-1, *self.shape), terms

    @override
    def norms(self) -> torch.Tensor:
        """Ghost norms, rounded up where positions or rows cancel."""
        return self._joint(0, self.rows).norms()

    @override
    def compact(self) -> Use:
        """The gradients, where they are worth forming."""
        joint = self._joint(0, self.rows)
        if joint.forming() is None:
            return self
        return Viewed(kept_gradients(joint.a, joint.g, joint.geometry), self.shape)
