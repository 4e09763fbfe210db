"""Norms of per-example convolution gradients from products between pixels, without gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dptrain.clipping.base.linear_norms import (
    Squares,
    fits_single,
    gram_product,
    gram_squares,
    in_dtype,
    parts_of_rows,
    rounded_up,
)
from dptrain.clipping.base.rows import summing_dtype
from dptrain.clipping.bookkeeping.cache import chunk_size
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape, overlap, positions


def squared_norms(a: torch.Tensor, g: torch.Tensor, shape: ConvShape) -> torch.Tensor:
    """‖g_i‖² of the weight's per-example gradients in float64, shape (B,), never too small.

    The square is that of a ghost norm, from one product between all pixels of the input, one
    between all of g, and shifted copies of the former, one dimension after the other: k_1 + k_2
    copies for k_1 · k_2 taps. It costs no more than a gradient while there are few positions, see
    ``costs``. Where positions cancel it is a difference of large numbers, so it is rounded up by
    what it may be off by (docs/theory/clipping.md#thm-convolution-norms;
    ``test_squares_are_not_too_small_and_hardly_too_large``).

    Args:
        a: inputs, shape (B, c, *spatial).
        g: gradients of the loss by the output, shape (B, p, *out).
    """
    shape.check(a, g)
    a, shape = shape.padded(a)

    inputs, outputs, groups = tuple(a.shape[2:]), tuple(g.shape[2:]), shape.groups
    pixels, length, taps = positions(inputs), positions(outputs), positions(shape.kernel)
    sizes = shape.out_channels // groups, shape.in_channels // groups
    numbers = groups * 2 * (pixels**2 + length**2) + a[:1].numel() + g[:1].numel()

    def squares(index: torch.Tensor | None, dtype: torch.dtype) -> Iterator[Squares]:
        step = chunk_size(g, numbers * dtype.itemsize // 4)
        stages = _stages(shape, inputs, outputs, step * groups, in_dtype(g.new_empty(0), dtype))
        for some in parts_of_rows(len(g), index, step):
            x, y = (
                in_dtype(side[some], dtype).unflatten(1, (groups, -1)).flatten(0, 1).flatten(2)
                for side in (a, g)
            )
            x, y = x.transpose(1, 2), y.transpose(1, 2)
            gram = gram_product(x, x).view(-1, *inputs, *inputs)
            for stage in stages:
                gram = stage.shifted_sum(gram)
            patches = gram.view(-1, length, length)
            found = gram_squares([gram_product(y, y)], [patches], sizes, taps=taps)
            # Groups of channels have weights of their own, whose squares add.
            yield Squares(*(each.view(-1, groups).sum(1) for each in found))

    single = fits_single((a, g), length, sizes, taps)
    return rounded_up(squares, g.new_empty(0, dtype=summing_dtype(g)), single=single, factors=[g])


class _Stage:
    """The sum over the taps of one dimension, in a workspace that is kept.

    Args:
        moves: (where in the outputs, where in the inputs), for each tap.
        dimension: d, among the D spatial ones.
        total: workspace, with the outputs' size in dimension d, twice.
    """

    def __init__(
        self, moves: list[tuple[slice, slice]], dimension: int, total: torch.Tensor
    ) -> None:
        self.moves, self.total = moves, total
        count = (total.dim() - 1) // 2
        self.axes = (1 + dimension, 1 + count + dimension)

    def shifted_sum(self, gram: torch.Tensor) -> torch.Tensor:
        """Sums over taps of products between inputs; positions outside are 0."""
        total = self.total[: len(gram)]
        total.zero_()
        for target, source in self.moves:
            self._at(total, target).add_(self._at(gram, source))
        return total

    def _at(self, tensor: torch.Tensor, where: slice) -> torch.Tensor:
        index = [slice(None)] * tensor.dim()
        for axis in self.axes:
            index[axis] = where
        return tensor[tuple(index)]


def _stages(
    shape: ConvShape,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    rows: int,
    like: torch.Tensor,
) -> list[_Stage]:
    """The last dimension first: rows of the others then stay together in memory."""
    sizes, found = list(inputs), []
    for d in reversed(range(len(inputs))):
        moves = []
        for tap in range(shape.kernel[d]):
            start = tap * shape.dilation[d] - shape.padding[d][0]
            move = overlap(start, shape.stride[d], inputs[d], outputs[d])
            if move is not None:
                moves.append(move)
        sizes[d] = outputs[d]
        if moves != [(slice(0, inputs[d]), slice(0, inputs[d], 1))]:
            found.append(_Stage(moves, d, like.new_empty(rows, *sizes, *sizes)))
    return found
