"""Per-example weight gradients of a convolution by batched matrix products."""

from __future__ import annotations

import math
from itertools import product

import torch

from dptrain.clipping.base.rows import row_norms, summing_dtype
from dptrain.clipping.bookkeeping.cache import chunk_size
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape, overlap, positions


class ConvGradients:
    """Per-example gradients of a convolution's weight, in the order in which they are formed.

    The order is (taps of the first dimension, B, groups, c / groups, other taps, p / groups): each
    matrix product then writes a block without gaps. Norms and weighted sums need no other order.

    Args:
        storage: shape (taps of the first dimension, B · groups, c / groups · other taps,
            p / groups).
        shape: of the convolution.
    """

    def __init__(self, storage: torch.Tensor, shape: ConvShape) -> None:
        self.storage, self.shape = storage, shape
        taps, rows, c, p = storage.shape
        self._rows = storage.view(taps, rows // shape.groups, shape.groups * c * p)

    def __len__(self) -> int:
        """The number B of examples."""
        return self._rows.shape[1]

    def gradients(self) -> torch.Tensor:
        """A view of shape (B, *weight.shape)."""
        return _as_weights(self._rows, self.shape)

    def norms(self) -> torch.Tensor:
        """‖g_i‖₂, shape (B,), to a few units in the last place."""
        taps, examples, numbers = self._rows.shape
        parts = row_norms(self._rows.view(taps * examples, numbers)).view(taps, examples)
        return torch.linalg.vector_norm(parts, dim=0)

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """Σ_i f_i g_i, shape weight.shape; an example of factor 0 may be anything, NaN too.

        Args:
            factors: shape (B,). Gradients of factor 0 are overwritten with 0.
        """
        unused = factors == 0
        if bool(unused.any()):
            self._rows[:, unused] = 0
        total = torch.stack([factors.to(rows.dtype) @ rows for rows in self._rows])
        return _as_weights(total[:, None], self.shape)[0]


def storage_size(shape: ConvShape, examples: int) -> tuple[int, int, int, int]:
    """The shape of ``ConvGradients``' storage, for a caller that reuses one."""
    c, p = shape.in_channels // shape.groups, shape.out_channels // shape.groups
    return shape.kernel[0], examples * shape.groups, c * positions(shape.kernel[1:]), p


def form_gradients(
    a: torch.Tensor, g: torch.Tensor, shape: ConvShape, out: torch.Tensor | None = None
) -> ConvGradients:
    """All per-example gradients; half precision is summed in float32.

    A kernel row slides over whole rows of the input. So if shifted copies of the input are made
    for the taps of all dimensions but the first (a workspace of a few examples, which stays in the
    cache), the inputs of each tap of the first dimension are a slice of that workspace without
    gaps between rows, and its gradients are one product with g. Compared to unfolding all taps
    that is the k-th part of the copying; compared to a convolution with an example in each group,
    the products are larger and nothing is put into another layout. Strides in the first dimension
    put the rows of each remainder next to each other.

    Args:
        a: inputs, shape (B, c, *spatial).
        g: gradients of the loss by the output, shape (B, p, *out).
        shape: of the convolution.
        out: contiguous memory of ``storage_size`` and of g's summing dtype; fresh where
            ``None``.

    Raises:
        ValueError: if shapes do not belong together.
    """
    shape.check(a, g)
    a, shape = shape.padded(a)
    dtype, examples = summing_dtype(g), len(g)
    size = storage_size(shape, examples)
    if out is None:
        out = g.new_empty(size, dtype=dtype)
    elif out.shape != size or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(
            f"out has shape {tuple(out.shape)} and {out.dtype}: expected contiguous memory of "
            f"shape {size} and {dtype}, see storage_size()"
        )
    if examples:
        _Products(a, g, shape, dtype).into(out)
    return ConvGradients(out, shape)


class _Products:
    """The products of one layer; the arguments are those of ``form_gradients``."""

    def __init__(
        self, a: torch.Tensor, g: torch.Tensor, shape: ConvShape, dtype: torch.dtype
    ) -> None:
        self.a, self.g, self.shape, self.dtype = a, g, shape, dtype
        stride, dilation = shape.stride[0], shape.dilation[0]
        starts = [tap * dilation for tap in range(shape.kernel[0])]
        self.remainders = sorted({start % stride for start in starts})
        # Where each tap of the first dimension finds its rows: remainder, first row.
        self.taps = [(self.remainders.index(s % stride), s // stride) for s in starts]
        self.inner, self.length = positions(g.shape[3:]), positions(g.shape[2:])
        self.rows = max(first for _, first in self.taps) + g.shape[2]
        self.width = shape.in_channels // shape.groups * positions(shape.kernel[1:])
        self.chunk = min(len(g), chunk_size(g, self._numbers()))

    def _numbers(self) -> int:
        """Numbers that one example touches."""
        inputs = len(self.remainders) * self.shape.groups * self.width * self.rows * self.inner
        return inputs + self.g[:1].numel() + math.prod(self.shape.weight_shape)

    def into(self, out: torch.Tensor) -> None:
        """Write all gradients."""
        groups, ready = self.shape.groups, 0
        if needs_copies := self._needs_copies():
            workspace, (places, sources) = self._workspace(), self._copies()
        results = out.unbind(0)
        for start in range(0, len(self.g), self.chunk):
            examples = min(self.chunk, len(self.g) - start)
            part = self.a.narrow(0, start, examples)
            if needs_copies:
                if examples != ready:  # else the views are those of the last turn
                    used, ready = workspace.narrow(1, 0, examples), examples
                    targets, inputs = [used[place] for place in places], self._by_tap(used)
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(part[source])
            else:
                inputs = self._by_tap(part.to(self.dtype).contiguous()[None])
            outputs = self.g.narrow(0, start, examples).to(self.dtype)
            transposed = outputs.reshape(examples * groups, -1, self.length).transpose(1, 2)
            for result, rows in zip(results, inputs, strict=True):
                into = result.narrow(0, start * groups, examples * groups)
                torch.bmm(rows, transposed, out=into)

    def _workspace(self) -> torch.Tensor:
        """Zeros for the shifted copies of a chunk."""
        size = (len(self.remainders), self.chunk, self.shape.in_channels)
        kernel, inner = self.shape.kernel[1:], self.g.shape[3:]
        return self.g.new_zeros((*size, *kernel, self.rows, *inner), dtype=self.dtype)

    def _by_tap(self, used: torch.Tensor) -> list[torch.Tensor]:
        """For each tap of the first dimension its part of the workspace."""
        count = used.shape[1] * self.shape.groups
        inputs = used.view(len(used), count, self.width, self.rows * self.inner)
        return [
            inputs[remainder].narrow(2, first * self.inner, self.length)
            for remainder, first in self.taps
        ]

    def _needs_copies(self) -> bool:
        """Whether the workspace would be anything but the input itself."""
        inner = zip(
            self.shape.kernel[1:], self.shape.stride[1:], self.shape.padding[1:], strict=True
        )
        first_plain = self.shape.stride[0] == 1 and self.a.shape[2] == self.rows
        return not (
            first_plain
            and self.shape.padding[0] == (0, 0)
            and all(taps == stride == 1 and pads == (0, 0) for taps, stride, pads in inner)
        )

    def _copies(self) -> tuple[list[tuple[int | slice, ...]], list[tuple[slice, ...]]]:
        """Where in the workspace, and where in the input, is everything that is no border."""
        shape, every = self.shape, slice(None)
        places: list[tuple[int | slice, ...]] = []
        origins: list[tuple[slice, ...]] = []
        before, stride, size = shape.padding[0][0], shape.stride[0], self.a.shape[2]
        for number, remainder in enumerate(self.remainders):
            rows = overlap(remainder - before, stride, size, self.rows)
            for taps in product(*map(range, shape.kernel[1:])):
                ranges = [rows]
                for d, tap in enumerate(taps, start=1):
                    at = tap * shape.dilation[d] - shape.padding[d][0]
                    inputs, outputs = self.a.shape[2 + d], self.g.shape[2 + d]
                    ranges.append(overlap(at, shape.stride[d], inputs, outputs))
                if any(pair is None for pair in ranges):
                    continue
                targets = [pair[0] for pair in ranges if pair is not None]
                sources = [pair[1] for pair in ranges if pair is not None]
                places.append((number, every, every, *taps, *targets))
                origins.append((every, every, *sources))
        return places, origins


def _as_weights(rows: torch.Tensor, shape: ConvShape) -> torch.Tensor:
    """(taps of the first dimension, B, numbers) as (B, *weight.shape), without copying."""
    c, p = shape.in_channels // shape.groups, shape.out_channels // shape.groups
    examples, others = rows.shape[1], shape.kernel[1:]
    rows = rows.reshape(shape.kernel[0], examples, shape.groups, c, *others, p)
    last = rows.dim() - 1
    order = (1, 2, last, 3, 0, *range(4, last))
    return rows.permute(order).reshape(examples, *shape.weight_shape)
