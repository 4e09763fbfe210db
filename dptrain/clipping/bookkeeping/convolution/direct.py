"""Per-example weight gradients of a convolution by batched matrix products."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from itertools import product
from typing import ClassVar, NamedTuple

import torch
from typing_extensions import override

from dptrain.clipping.bookkeeping.cache import product_size
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape, overlap, positions
from dptrain.core import on_processor

# Rows of a product, or numbers next to each other in a copy, from which on they are not few.
_MANY = 16


class TapGradients(NamedTuple):
    """Gradients of some taps of the first dimension, of all examples.

    Attributes:
        storage: of shape (B, p, taps, other taps, c) where channels are last, else
            (B · groups, taps, c / groups, other taps, p / groups).
    """

    taps: tuple[int, ...]
    storage: torch.Tensor
    channels_last: bool

    def rows(self, groups: int) -> torch.Tensor:
        """The gradients as rows, shape (B, numbers)."""
        return self.storage.unflatten(0, (len(self.storage) // groups, groups)).flatten(1)

    def as_weights(self, rows: torch.Tensor, groups: int) -> torch.Tensor:
        """Rows as ``rows`` has them, as (B, p, c / groups, taps, *other taps)."""
        found = rows.view(len(rows), groups, *self.storage.shape[1:])
        last = found.dim() - 1
        order = (2, last, 3) if self.channels_last else (last, 3, 2)
        return found.permute(0, 1, *order, *range(4, last)).flatten(1, 2)


def cheaper_order(
    a: torch.Tensor, g: torch.Tensor, shape: ConvShape, dtype: torch.dtype
) -> TapProducts:
    """The products that form the gradients, by the order of the copies that costs less.

    Channels are put last one number at a time, which takes as long as copies in short pieces do. It
    pays where taps overlap, so that every number is copied more than once, and in long pieces then;
    and where a product is wide enough only with all taps that may share it. With one thread of an
    Intel processor with 512-bit vectors, an 8×8 kernel of stride 2 on one channel took 0.7 of the
    time with channels first, 4×4 of stride 2 on 16 channels 0.8, 3×3 on 64 channels 0.9; 3×3 on
    three channels, where neither is so, would have taken 1.2, and 1×1 of stride 2 1.7 (MKL held to
    vectors of 256 bits: 0.6, 1, 1, 1.1 and 1.7).

    Args:
        a: inputs, shape (B, c, *spatial).
        g: gradients of the loss by the output, shape (B, p, *out).
        shape: of the convolution, with no other padding than zeros.
        dtype: of the factors of the products, and of the gradients.
    """
    first = ChannelsFirst(a, g, shape, dtype)
    if shape.groups > 1 or not on_processor(g) or not first.needs_copies:
        return first  # on no other device was it measured
    last = ChannelsLast(a, g, shape, dtype)
    overlap = positions(shape.kernel[1:]) > positions(shape.stride[1:]) and last.piece >= _MANY
    shared = first.width < _MANY <= last.width
    return last if overlap or shared else first


class TapProducts(abc.ABC):
    """The products of one layer; the arguments are those of ``cheaper_order``."""

    channels_last: ClassVar[bool]

    def __init__(
        self, a: torch.Tensor, g: torch.Tensor, shape: ConvShape, dtype: torch.dtype
    ) -> None:
        self.a, self.g, self.shape, self.dtype = a, g, shape, dtype
        stride, dilation = shape.stride[0], shape.dilation[0]
        starts = [tap * dilation for tap in range(shape.kernel[0])]
        self.remainders = list(dict.fromkeys(start % stride for start in starts))
        # Place of the rows of each tap of the first dimension: remainder, first row.
        self.taps = [(self.remainders.index(s % stride), s // stride) for s in starts]
        self.inner, self.length = positions(g.shape[3:]), positions(g.shape[2:])
        self.rows = max(first for _, first in self.taps) + g.shape[2]
        self.in_group = shape.in_channels // shape.groups
        self.out_group = shape.out_channels // shape.groups
        self.width = self.in_group * positions(shape.kernel[1:])  # of a tap's gradients

    def blocks(self) -> list[TapGradients]:
        """All gradients, a few examples at a time."""
        groups, examples = self.shape.groups, len(self.g)
        found = [
            TapGradients(
                taps,
                self.g.new_empty((examples * groups, *size), dtype=self.dtype),
                self.channels_last,
            )
            for taps, size in self.sizes()
        ]
        if not examples:
            return found
        numbers = self.numbers() + self.g[:1].numel() + math.prod(self.shape.weight_shape)
        numbers = numbers * self.dtype.itemsize // torch.float32.itemsize
        turns = -(-examples // product_size(self.g, numbers))
        step, ready = -(-examples // turns), 0
        results = [self.matrices(block.storage) for block in found]
        for start in range(0, examples, step):
            many = min(step, examples - start)
            if many != ready:
                self.prepare(many)
                ready = many
            g = self.g.narrow(0, start, many).to(self.dtype)
            outputs = g.reshape(many * groups, self.out_group, self.length)
            into = [result.narrow(0, start * groups, many * groups) for result in results]
            self.multiply(self.a.narrow(0, start, many), outputs, into)
        return found

    @abc.abstractmethod
    def sizes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The taps of each block, and the sizes of its storage but the first."""

    @abc.abstractmethod
    def numbers(self) -> int:
        """Numbers that one example has in the workspace."""

    @abc.abstractmethod
    def matrices(self, storage: torch.Tensor) -> torch.Tensor:
        """A block's storage as what products are written into."""

    @abc.abstractmethod
    def prepare(self, examples: int) -> None:
        """Make the workspace for so many examples at a time."""

    @abc.abstractmethod
    def multiply(self, a: torch.Tensor, g: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
        """Write the gradients of a few examples.

        Args:
            g: their output gradients, shape (examples · groups, p / groups, positions).
            into: their part of the matrices of each block.
        """


class ChannelsFirst(TapProducts):
    """Shifted copies in the order of the input, and a product for each tap."""

    channels_last = False

    @override
    def sizes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        size = (1, self.in_group, *self.shape.kernel[1:], self.out_group)
        return [((tap,), size) for tap in range(len(self.taps))]

    @override
    def numbers(self) -> int:
        copies = positions(self.shape.kernel[1:]) * self.rows * self.inner
        return len(self.remainders) * self.shape.in_channels * copies

    @override
    def matrices(self, storage: torch.Tensor) -> torch.Tensor:
        return storage.flatten(1, -2)

    @override
    def prepare(self, examples: int) -> None:
        if not self.needs_copies:
            return
        size = (len(self.remainders), examples, self.shape.in_channels)
        size = (*size, *self.shape.kernel[1:], self.rows, *self.g.shape[3:])
        workspace = self.g.new_zeros(size, dtype=self.dtype)
        places, self._sources = self._copies()
        self._targets, self._inputs = (
            [workspace[place] for place in places],
            self._by_tap(workspace),
        )

    def _by_tap(self, workspace: torch.Tensor) -> list[torch.Tensor]:
        """For each tap of the first dimension its part of the workspace."""
        count = workspace.shape[1] * self.shape.groups
        inputs = workspace.view(len(workspace), count, self.width, self.rows * self.inner)
        return [
            inputs[remainder].narrow(2, first * self.inner, self.length)
            for remainder, first in self.taps
        ]

    @override
    def multiply(self, a: torch.Tensor, g: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
        if self.needs_copies:
            for target, source in zip(self._targets, self._sources, strict=True):
                target.copy_(a[source])
        else:
            self._inputs = self._by_tap(a.to(self.dtype).contiguous()[None])
        transposed = g.transpose(1, 2)
        for inputs, out in zip(self._inputs, into, strict=True):
            torch.bmm(inputs, transposed, out=out)

    @functools.cached_property
    def needs_copies(self) -> bool:
        """True if the workspace would be anything but the input itself."""
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
        """Places in the workspace, and places in the input, of all that is not border."""
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


class ChannelsLast(TapProducts):
    """Shifted copies that have the channels of a position next to each other.

    So have neighboring taps, and one copy makes those of all taps. Remainders are side by side:
    taps that begin at the same row of them share a product. For one group of channels.
    """

    channels_last = True

    def __init__(
        self, a: torch.Tensor, g: torch.Tensor, shape: ConvShape, dtype: torch.dtype
    ) -> None:
        super().__init__(a, g, shape, dtype)
        self._tap = self.width  # numbers of one tap of the first dimension at a position
        # First row, first remainder, and how many of those that follow.
        self._runs: list[tuple[int, int, int]] = []
        for remainder, first in self.taps:
            start, before, many = self._runs[-1] if self._runs else (-1, 0, 0)
            if (start, before + many) == (first, remainder):
                self._runs[-1] = (start, before, many + 1)
            else:
                self._runs.append((first, remainder, 1))
        self.width = self._tap * max(many for _, _, many in self._runs)

    @property
    def piece(self) -> int:
        """Numbers that are next to each other where they are copied from and to."""
        together = len(self.shape.kernel) > 1 and self.shape.dilation[-1] == 1
        return self.in_group * (self.shape.kernel[-1] if together else 1)

    @override
    def sizes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        done = 0
        for _, _, many in self._runs:
            size = (self.out_group, many, *self.shape.kernel[1:], self.in_group)
            found.append((tuple(range(done, done + many)), size))
            done += many
        return found

    @override
    def numbers(self) -> int:
        copies = self.rows * self.inner * len(self.remainders) * self._tap
        return copies + self.in_group * positions(self._bordered())

    def _bordered(self) -> tuple[int, ...]:
        """Sizes of the input with all around it that any tap reads."""
        shape, outputs = self.shape, self.g.shape[3:]
        last = [(self.rows - 1) * shape.stride[0] + max(self.remainders)]
        for d, size in enumerate(outputs, start=1):
            taps = (shape.kernel[d] - 1) * shape.dilation[d]
            last.append((size - 1) * shape.stride[d] + taps)
        inputs = zip(self.a.shape[2:], shape.padding, last, strict=True)
        return tuple(max(before + size, most + 1) for size, (before, _), most in inputs)

    @override
    def matrices(self, storage: torch.Tensor) -> torch.Tensor:
        return storage.flatten(2)

    @override
    def prepare(self, examples: int) -> None:
        shape, outputs = self.shape, self.g.shape[3:]
        sizes = self._bordered()
        new = self.g.new_empty if sizes == tuple(self.a.shape[2:]) else self.g.new_zeros
        bordered = new((examples, *sizes, self.in_group), dtype=self.dtype)
        within = bordered
        for d, (size, (before, _)) in enumerate(zip(self.a.shape[2:], shape.padding, strict=True)):
            within = within.narrow(1 + d, before, size)
        self._within = within.movedim(-1, 1)

        taps, many = shape.kernel[1:], len(self.remainders)
        copies = bordered.new_empty((examples, self.rows, *outputs, many, *taps, self.in_group))
        self._targets = copies.unbind(2 + len(outputs))
        example, first, *others, _ = bordered.stride()
        steps = [own * step for own, step in zip(shape.stride, (first, *others), strict=True)]
        between = [own * step for own, step in zip(shape.dilation[1:], others, strict=True)]
        strides, like = (example, *steps, *between, 1), self._targets[0].shape
        self._sources = [bordered.as_strided(like, strides, r * first) for r in self.remainders]

        matrices = copies.view(examples, self.rows * self.inner, many * self._tap)
        self._inputs = [
            matrices.narrow(1, start * self.inner, self.length).narrow(
                2, before * self._tap, together * self._tap
            )
            for start, before, together in self._runs
        ]

    @override
    def multiply(self, a: torch.Tensor, g: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
        self._within.copy_(a)
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)
        for inputs, out in zip(self._inputs, into, strict=True):
            torch.bmm(g, inputs, out=out)
