"""Blocks on images of one, two or three dimensions: convolutions and normalizations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.architectures_parts import (
    Branches,
    First,
    Repeated,
    Residual,
    Shape,
    Start,
    followed,
)

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
INSTANCE_NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d}
Made = tuple[nn.Module, Shape]


def image_stem(draw: Any, rows: int, without: frozenset[str]) -> Start:
    """Images (rows, C, *spatial), perhaps with the channels last in memory."""
    dimensions = draw(st.sampled_from([1, 2, 2, 3]))
    shape = (
        draw(st.integers(1, 4)),
        *(draw(st.integers(2, 7 if dimensions < 3 else 4)) for _ in range(dimensions)),
    )
    last = dimensions == 2 and "channels last" not in without and draw(st.booleans())
    stem = ChannelsLast() if last else First()
    return Start(stem, (torch.randn(rows, *shape),), shape)


class ChannelsLast(nn.Module):
    """The input laid out with the channels last, and requiring a gradient.

    Without one, the backward pass of a GroupNorm on it ends the process with a segmentation fault
    (torch 2.13 on a CPU).
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().requires_grad_().contiguous(memory_format=torch.channels_last)


class _Scales(nn.Module):
    """One convolution on an image and on a part of it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        middle = tuple(range(2, x.dim()))
        return self.layer(x) + self.layer(x[:, :, 1:]).mean(middle, keepdim=True)


def _conv(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    """Any convolution whose output is not empty."""
    dimensions = len(shape) - 1
    groups = draw(st.sampled_from([g for g in (1, 2, 3, 4) if shape[0] % g == 0]))
    out = groups * draw(st.integers(1, 3))
    kernel, stride, padding, dilation = [], [], [], []
    mode = draw(
        st.sampled_from(
            ["zeros"]
            if "padding_mode" in without
            else ["zeros", "zeros", "zeros", "reflect", "replicate", "circular"]
        )
    )
    for size in shape[1:]:
        padding.append(draw(st.integers(0, min(2, size - 1))))
        room = size + 2 * padding[-1]
        kernel.append(draw(st.integers(1, min(3, room))))
        most = 1 if kernel[-1] == 1 else (room - 1) // (kernel[-1] - 1)
        dilation.append(draw(st.integers(1, min(2, most))))
        stride.append(draw(st.integers(1, 3)))
    options: dict[str, Any] = {"padding": tuple(padding)}
    same = (
        "same"
        if all(
            d * (k - 1) // 2 + 1 < n for d, k, n in zip(dilation, kernel, shape[1:], strict=True)
        )
        and not ("even_same" in without and any(k % 2 == 0 for k in kernel))
        else "valid"
    )
    if draw(st.integers(0, 3)) == 0:
        options["padding"] = same
        stride = [1] * dimensions
        fits = all(d * (k - 1) < n for d, k, n in zip(dilation, kernel, shape[1:], strict=True))
        if same == "valid" and not fits:
            kernel, dilation = [1] * dimensions, [1] * dimensions
    layer = CONVOLUTIONS[dimensions](
        shape[0],
        out,
        tuple(kernel),
        stride=tuple(stride),
        dilation=tuple(dilation),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=mode,
        **options,
    )
    with torch.no_grad():
        spatial = layer(torch.zeros(1, *shape)).shape[2:]
    return followed(draw, layer, without), (out, *spatial)


class _Sized(nn.Module):
    """A transposed convolution that is told the size of its output."""

    def __init__(self, layer: nn.Module, size: Shape) -> None:
        super().__init__()
        self.layer, self.size = layer, list(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.size)


def _transposed(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    """Any transposed convolution whose output is not empty, nor large."""
    dimensions = len(shape) - 1
    groups = draw(st.sampled_from([g for g in (1, 2, 3, 4) if shape[0] % g == 0]))
    out = groups * draw(st.integers(1, 3))
    options: dict[str, list[int]] = {
        name: [] for name in ("kernel_size", "stride", "padding", "dilation", "output_padding")
    }
    for size in shape[1:]:
        kernel = draw(st.integers(1, 3))
        stride = draw(st.integers(1, 3 if size < 4 else 1))
        dilation = draw(st.integers(1, 2))
        extra = draw(st.integers(0, max(stride, dilation) - 1))
        length = (size - 1) * stride + dilation * (kernel - 1) + extra + 1
        drawn = (kernel, stride, draw(st.integers(0, min(2, (length - 1) // 2))), dilation, extra)
        for values, value in zip(options.values(), drawn, strict=True):
            values.append(value)
    layer = TRANSPOSED[dimensions](
        shape[0],
        out,
        groups=groups,
        bias=draw(st.booleans()),
        **{name: tuple(values) for name, values in options.items()},
    )
    with torch.no_grad():
        spatial = tuple(layer(torch.zeros(1, *shape)).shape[2:])
    sized: nn.Module = layer
    # torch takes sizes up to a stride more than the least.
    near = all(a < b for a, b in zip(layer.output_padding, layer.stride, strict=True))
    if near and "output size" not in without and draw(st.booleans()):
        layer.output_padding = (0,) * dimensions  # the size tells
        sized = _Sized(layer, spatial)
    return followed(draw, sized, without), (out, *spatial)


def _keeping(draw: Any, shape: Shape) -> nn.Module:
    """A convolution whose output has the shape of its input."""
    layer = CONVOLUTIONS[len(shape) - 1]
    return layer(shape[0], shape[0], 3, padding=1, bias=draw(st.booleans()))


def _pointwise(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    out = draw(st.integers(1, 4))
    layer = CONVOLUTIONS[len(shape) - 1](shape[0], out, 1, bias=draw(st.booleans()))
    return followed(draw, layer, without), (out, *shape[1:])


def _conv_reused(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    layer = _keeping(draw, shape)
    kinds: list[Callable[[], nn.Module]] = [
        lambda: Repeated(layer, 2),
        lambda: Residual(followed(draw, layer, without)),
        lambda: Branches(layer, _keeping(draw, shape)),
    ]
    if shape[1] > 1:
        kinds.append(lambda: _Scales(layer))
    return draw(st.sampled_from(kinds))(), shape


def _group_norm(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    """One number has no deviation: torch refuses to normalize it, here and below."""
    numbers = torch.Size(shape).numel()
    allowed = [g for g in (1, 2, 3, 4) if shape[0] % g == 0 and g < numbers]
    if not allowed:
        return _pointwise(draw, shape, without)
    return followed(draw, nn.GroupNorm(draw(st.sampled_from(allowed)), shape[0]), without), shape


def _prelu(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    layer = nn.PReLU(draw(st.sampled_from([1, shape[0]])))
    return followed(draw, layer, without), shape


def _instance_norm(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    if len(shape) - 1 not in INSTANCE_NORMS or torch.Size(shape[1:]).numel() < 2:
        return _group_norm(draw, shape, without)
    layer = INSTANCE_NORMS[len(shape) - 1](shape[0], affine=True)
    return followed(draw, layer, without), shape


IMAGE_BLOCKS: dict[str, Callable[[Any, Shape, frozenset[str]], Made]] = {
    "convolution": _conv,
    "pointwise convolution": _pointwise,
    "convolution reused": _conv_reused,
    "transposed convolution": _transposed,
    "prelu over pixels": _prelu,
    "group norm": _group_norm,
    "instance norm": _instance_norm,
}
