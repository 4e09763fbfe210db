"""Norms of per-example convolution gradients from products between pixels, without gradients."""

from __future__ import annotations

import torch

from dptrain.clipping.base.linear_norms import pad
from dptrain.clipping.base.rows import summing_dtype
from dptrain.clipping.bookkeeping.cache import chunk_size
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape, overlap, positions


def squared_norms(a: torch.Tensor, g: torch.Tensor, shape: ConvShape) -> torch.Tensor:
    """‖g_i‖² of the weight's per-example gradients, shape (B,), never too small.

    The square is that of a ghost norm, from one product between all pixels of the input, one
    between all of g, and shifted copies of the former, one dimension after the other: k_1 + k_2
    copies for k_1 · k_2 taps. It costs no more than a gradient while there are few positions, see
    ``costs``. Where positions cancel it is a difference of large numbers, so it is computed in
    float64 and rounded up (docs/theory/clipping.md#thm-convolution-norms;
    ``test_squares_are_not_too_small_and_hardly_too_large``).

    Args:
        a: inputs, shape (B, c, *spatial).
        g: gradients of the loss by the output, shape (B, p, *out).
    """
    shape.check(a, g)
    a, shape = shape.padded(a)
    dtype, inputs, outputs = torch.float64, tuple(a.shape[2:]), tuple(g.shape[2:])
    pixels, length = positions(inputs), positions(outputs)
    found = g.new_zeros(len(g), dtype=summing_dtype(g))
    numbers = shape.groups * 2 * (pixels**2 + length**2) + a[:1].numel() + g[:1].numel()
    step = chunk_size(g, 2 * numbers)  # of float64
    terms = (shape.in_channels + shape.out_channels) // shape.groups + 2 * length
    relative = pad(summing_dtype(g), terms + positions(shape.kernel))
    stages = _stages(shape, inputs, outputs, step * shape.groups, g.new_empty(0, dtype=dtype))
    for start in range(0, len(g), step):
        rows = (min(len(g), start + step) - start) * shape.groups
        x = a[start : start + step].to(dtype).reshape(rows, -1, pixels)
        y = g[start : start + step].to(dtype).reshape(rows, -1, length)
        gram = torch.bmm(x.transpose(1, 2), x).view(rows, *inputs, *inputs)
        for stage in stages:
            gram = stage.shifted_sum(gram)
        patches, outer = gram.view(rows, length, length), torch.bmm(y.transpose(1, 2), y)
        lengths = _diagonal(patches).sqrt() * _diagonal(outer).sqrt()
        bound = lengths.sum(1).square() * relative
        squares = outer.mul_(patches).sum(2).sum(1).clamp(min=0) + bound
        found[start : start + step] = squares.view(-1, shape.groups).sum(1)
    return found


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


def _diagonal(squares: torch.Tensor) -> torch.Tensor:
    return squares.diagonal(dim1=1, dim2=2)
