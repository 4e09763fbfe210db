"""Gradients of a convolution's weight that are formed, and kept as they are formed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from dptrain.clipping.base.products import multiplies_bfloat16
from dptrain.clipping.base.row_groups import RowGroups
from dptrain.clipping.base.rows import HALF, row_norms, summing_dtype
from dptrain.clipping.bookkeeping.cache import own_size
from dptrain.clipping.bookkeeping.convolution.direct import TapGradients, cheaper_order
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape
from dptrain.clipping.bookkeeping.uses.use import Materialized, Use, Whole
from dptrain.core import on_processor


class Formed(Whole):
    """Per-example gradients of a convolution's weight, in the order in which they are formed.

    Each matrix product then writes a block without gaps. Norms and weighted sums need no other
    order. Of gradients in half precision both are those of the very numbers that are kept, taken in
    float32: what rounding changed is clipped with the rest.

    Args:
        blocks: with every tap of the first dimension once.
    """

    def __init__(self, blocks: Sequence[TapGradients], geometry: ConvShape) -> None:
        self.blocks, self.geometry = list(blocks), geometry
        self.rows = len(self.blocks[0].storage) // geometry.groups
        self.shape = torch.Size(geometry.weight_shape)

    def per_example(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Gradients of examples ``start`` to ``stop``; of half precision, in float32."""
        rows = [block.rows(self.geometry.groups)[start:stop] for block in self.blocks]
        return self._weights([some.to(summing_dtype(some)) for some in rows])

    @override
    def norms(self) -> torch.Tensor:
        parts = [row_norms(block.rows(self.geometry.groups)) for block in self.blocks]
        return parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts), dim=0)

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """Σ_i f_i g_i; an example of factor 0 may be anything, NaN too, and is overwritten.

        On a device, which would be waited for to know, every example has to be finite.
        """
        unused = factors == 0
        broken, totals = on_processor(factors) and bool(unused.any()), []
        for block in self.blocks:
            rows = block.rows(self.geometry.groups)
            if broken:
                rows[unused] = 0
            totals.append(_weighted(factors, rows)[None])
        return self._weights(totals)[0]

    @override
    def select(self, index: torch.Tensor) -> Formed:
        sizes = self.rows, self.geometry.groups
        return self._of([b.storage.unflatten(0, sizes)[index].flatten(0, 1) for b in self.blocks])

    @override
    def folded(self, views: int | RowGroups) -> Use:
        return Materialized(self.per_example()).folded(views)

    def merged(self, other: Use) -> Use | None:
        """The sum, where the other is formed in the same order."""
        if not isinstance(other, Formed) or other.geometry != self.geometry:
            return None
        pairs = zip(self.blocks, other.blocks, strict=True)
        return self._of([_summed(one.storage, another.storage) for one, another in pairs])

    def _of(self, storages: Sequence[torch.Tensor]) -> Formed:
        pairs = zip(self.blocks, storages, strict=True)
        return Formed([block._replace(storage=some) for block, some in pairs], self.geometry)

    def _weights(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows of each block, of shape (examples, numbers), as (examples, *weight.shape)."""
        groups = self.geometry.groups
        found = [b.as_weights(some, groups) for b, some in zip(self.blocks, rows, strict=True)]
        if len(found) == 1:
            return found[0].reshape(len(found[0]), *self.shape)
        taps = [tap for block in self.blocks for tap in block.taps]
        places = [taps.index(tap) for tap in range(len(taps))]
        parts = [part for some in found for part in some.unbind(3)]
        return torch.stack([parts[place] for place in places], dim=3)


def _weighted(factors: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Σ_i f_i row_i; of half precision in float32, as f_i in 8 bits could be too large.

    So many rows are taken to float32 at a time as stay in a core's own cache.
    """
    if rows.dtype not in HALF:
        return factors.to(rows.dtype) @ rows
    factors = factors.to(torch.float32)
    total = factors.new_zeros(rows.shape[1])
    many = own_size(rows.shape[1])
    for some, part in zip(factors.split(many), rows.split(many), strict=True):
        total += some @ part.float()
    return total


def _summed(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    dtype = summing_dtype(first)
    return first.to(dtype) + second.to(dtype)


def kept_gradients(a: torch.Tensor, g: torch.Tensor, shape: ConvShape) -> Formed:
    """Like ``form_gradients``, for gradients of which nothing else is known or will be.

    Output gradients in bfloat16, as autocast has them, are multiplied as such where the processor
    has units for it, and every gradient that results is rounded once, as the gradient of the weight
    is in ordinary training. Norm and clipped sum are then of these, which no others may stand for.
    """
    return _formed(a, g, shape, g.dtype if multiplies_bfloat16(g) else summing_dtype(g))


def form_gradients(a: torch.Tensor, g: torch.Tensor, shape: ConvShape) -> Formed:
    """All per-example gradients; half precision is summed in float32.

    A kernel row slides over whole rows of the input. So if shifted copies of the input are made
    for the taps of all dimensions but the first (a workspace of a few examples, which stays in the
    cache), the inputs of each tap of the first dimension are a slice of that workspace without
    gaps between rows, and its gradients are one product with g. Compared to unfolding all taps
    that is the k-th part of the copying; compared to a convolution with an example in each group,
    the products are larger. Strides in the first dimension put the rows of each remainder next to
    each other.

    Args:
        a: inputs, shape (B, c, *spatial).
        g: gradients of the loss by the output, shape (B, p, *out).
    """
    return _formed(a, g, shape, summing_dtype(g))


def _formed(a: torch.Tensor, g: torch.Tensor, shape: ConvShape, dtype: torch.dtype) -> Formed:
    shape.check(a, g)
    a, shape = shape.padded(a)
    return Formed(cheaper_order(a, g, shape, dtype).blocks(), shape)
