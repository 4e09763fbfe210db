"""The geometry of a convolution: which input position a tap of the kernel reads for an output."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class ConvShape:
    """The numbers of a convolution that gradients of its weight follow from, D in each tuple.

    Args:
        in_channels: c.
        out_channels: p.
        kernel: taps in each dimension.
        stride: steps between output positions.
        dilation: steps between taps.
        padding: (before, after) in each dimension; they differ for "same" and an even kernel.
        groups: channels are in this many blocks, each connected to its own.
        padding_mode: "zeros", "reflect", "replicate" or "circular".
    """

    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int = 1
    padding_mode: str = "zeros"

    @classmethod
    def of(cls, layer: nn.Module) -> ConvShape:
        """The shape of an ``nn.Conv1d``, ``Conv2d`` or ``Conv3d``."""
        if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            raise TypeError(
                f"layer is a {type(layer).__name__}, and only Conv1d, Conv2d and Conv3d have "
                "per-example gradients here: register your own rule for it, or use "
                "Gradients(mode='hooks')"
            )
        return cls._of(layer, layer.in_channels, layer.out_channels)

    @classmethod
    def _of(cls, layer: nn.modules.conv._ConvNd, inputs: int, outputs: int) -> ConvShape:
        return cls(
            in_channels=inputs,
            out_channels=outputs,
            kernel=tuple(layer.kernel_size),
            stride=tuple(layer.stride),
            dilation=tuple(layer.dilation),
            padding=_pairs(layer),
            groups=layer.groups,
            padding_mode=layer.padding_mode,
        )

    @classmethod
    def adjoint(
        cls, layer: nn.Module, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> ConvShape:
        """The shape of the convolution that a transposed one is the adjoint of.

        It leads from what the layer returns to what it is given, with the same weight W. As
        ⟨g, Aᵀx⟩ = ⟨A g, x⟩, the gradient of ⟨g, layer(x)⟩ by W is that of ⟨conv(g), x⟩: of a
        convolution with input g whose output has the gradient x.

        Args:
            layer: an ``nn.ConvTranspose1d``, ``ConvTranspose2d`` or ``ConvTranspose3d``.
            inputs: spatial sizes of what it is given.
            outputs: spatial sizes of what it returned, which tell the output padding of the call.
        """
        assert isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
        found = cls._of(layer, layer.out_channels, layer.in_channels)
        # Output padding of a stride or more (a dilation allows it) makes room for further outputs
        # of the convolution, which the layer was given nothing for: that much padding is left out.
        spare = [
            stride * (more - size)
            for more, size, stride in zip(
                found.output_sizes(outputs), inputs, found.stride, strict=True
            )
        ]
        padding = tuple(
            (before, after - rest)
            for (before, after), rest in zip(found.padding, spare, strict=True)
        )
        return dataclasses.replace(found, padding=padding)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """(p, c / groups, *kernel)."""
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    def with_dimension(self, at: int) -> ConvShape:
        """One dimension more, across which the kernel does not reach, before dimension ``at``."""

        def more(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
            return (*values[:at], value, *values[at:])

        return dataclasses.replace(
            self,
            kernel=more(self.kernel, 1),
            stride=more(self.stride, 1),
            dilation=more(self.dilation, 1),
            padding=more(self.padding, (0, 0)),
        )

    def output_sizes(self, spatial: tuple[int, ...]) -> tuple[int, ...]:
        """The output's spatial sizes for the input's."""
        each = zip(spatial, self.padding, self.kernel, self.stride, self.dilation, strict=True)
        sizes = [
            (size + sum(pads) - dilation * (taps - 1) - 1) // stride + 1
            for size, pads, taps, stride, dilation in each
        ]
        return tuple(sizes)

    def padded(self, a: torch.Tensor) -> tuple[torch.Tensor, ConvShape]:
        """The input padded as the mode says, and the shape that is left to do; zeros are left."""
        if self.padding_mode == "zeros":
            return a, self
        return self._with_padding(a, self.padding_mode)

    def symmetric(self, a: torch.Tensor) -> tuple[torch.Tensor, ConvShape]:
        """Like ``padded``, and padded too where before and after differ (torch wants one)."""
        a, shape = self.padded(a)
        if all(before == after for before, after in shape.padding):
            return a, shape
        return shape._with_padding(a, "constant")

    def _with_padding(self, a: torch.Tensor, mode: str) -> tuple[torch.Tensor, ConvShape]:
        widths = [width for pads in reversed(self.padding) for width in pads]
        bare = ((0, 0),) * len(self.kernel)
        shape = dataclasses.replace(self, padding=bare, padding_mode="zeros")
        return F.pad(a, widths, mode=mode), shape

    def check(self, a: torch.Tensor, g: torch.Tensor) -> None:
        """Refuse inputs and output gradients that do not belong to this convolution."""
        if a.dim() == 2 + len(self.kernel) and a.shape[1] == self.in_channels:
            expected = (len(a), self.out_channels, *self.output_sizes(tuple(a.shape[2:])))
            if g.shape == expected:
                return
        raise ValueError(
            f"a has shape {tuple(a.shape)} and g has shape {tuple(g.shape)}, which do not fit "
            f"{self}: pass the batched input of this layer, (B, in_channels, *spatial), and the "
            "gradient with respect to its output"
        )


def overlap(start: int, step: int, inputs: int, outputs: int) -> tuple[slice, slice] | None:
    """The outputs o and inputs start + step·o where both exist; ``None`` where there are none."""
    low = max(0, -(start // step))
    high = min(outputs, (inputs - 1 - start) // step + 1)
    if high <= low:
        return None
    return slice(low, high), slice(start + step * low, start + step * (high - 1) + 1, step)


def positions(sizes: tuple[int, ...]) -> int:
    """Number of positions of a grid."""
    return math.prod(sizes)


def _pairs(layer: nn.modules.conv._ConvNd) -> tuple[tuple[int, int], ...]:
    if layer.padding == "valid":
        return ((0, 0),) * len(layer.kernel_size)
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((int(width), int(width)) for width in layer.padding)
