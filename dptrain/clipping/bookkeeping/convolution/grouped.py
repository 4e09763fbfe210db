"""Per-example weight gradients by one convolution of torch's, an example in each group."""

from __future__ import annotations

import functools
import os

import torch
import torch.nn.functional as F

from dptrain.clipping.base.rows import row_norms
from dptrain.clipping.bookkeeping.cache import chunk_size
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape, positions
from dptrain.core import on_processor

_VECTOR, _STEP = 16, 4
# Multiplications that take as long as putting a number into another layout, and as long as to
# write, read for the norm and read for the sum each number of a gradient.
_TOUCH = 10
_KEEP = 64
# oneDNN's kernels for a channel in each group are small ones: up to this many taps in a dimension
# they took a tenth of the time of products, on two cores; with 28 they took twice as long.
_LARGEST_KERNEL = 24
_CHANNELS_ALONE = 3  # multiplications that take as long as one of these kernels'


def runs_in_groups(g: torch.Tensor) -> bool:
    """True if torch has kernels of its own for this: oneDNN's, of float32 on a CPU."""
    here = on_processor(g) and g.dtype == torch.float32
    return bool(here and torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


def gradients_in_groups(
    a: torch.Tensor, g: torch.Tensor, shape: ConvShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """All per-example gradients, and their norms, taken while they are in the cache.

    Channels of all examples are made channels of one, in as many groups: the backward pass of that
    convolution has every example's gradient. Where each channel is convolved alone, as in depthwise
    layers, its gradient is the input convolved with the output's gradient for a kernel, so that
    a forward pass has them as well.

    Args:
        a: inputs, shape (B, c, *spatial).
        g: gradients of the loss by the output, shape (B, p, *out).

    Returns:
        Shapes (B, *weight.shape) and (B,).
    """
    shape.check(a, g)
    joint = _joint_forward if channels_alone(shape, tuple(a.shape[2:])) else _joint_backward
    a, shape = shape.symmetric(a)
    found, norms = g.new_empty(len(g), *shape.weight_shape), g.new_empty(len(g))
    step = chunk_size(g, found[:1].numel())
    for start in range(0, len(g), step):
        part = joint(a[start : start + step], g[start : start + step], shape)
        found[start : start + step] = part
        norms[start : start + step] = row_norms(part.flatten(1))
    return found, norms


def _joint_backward(a: torch.Tensor, g: torch.Tensor, shape: ConvShape) -> torch.Tensor:
    rows, (p, *rest) = len(g), shape.weight_shape
    _, total, _ = torch.ops.aten.convolution_backward(
        g.reshape(1, rows * p, *g.shape[2:]),
        a.reshape(1, rows * shape.in_channels, *a.shape[2:]),
        g.new_empty(()).expand(rows * p, *rest),  # only its shape is looked at
        None,
        list(shape.stride),
        [before for before, _ in shape.padding],
        list(shape.dilation),
        False,
        [0] * len(shape.kernel),
        rows * shape.groups,
        [False, True, False],
    )
    return total.view(rows, p, *rest)


def _joint_forward(a: torch.Tensor, g: torch.Tensor, shape: ConvShape) -> torch.Tensor:
    padding = [before for before, _ in shape.padding]
    sizes = zip(padding, shape.stride, g.shape[2:], strict=True)
    if any(width > stride * (size - 1) for width, stride, size in sizes):
        # More than the kernel covers, for which oneDNN has no fast one.
        a = F.pad(a, [width for width in reversed(padding) for _ in range(2)])
        padding = [0] * len(padding)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(padding) - 1]
    # Steps between outputs are steps between taps here, and the other way round.
    found = convolve(
        a.reshape(1, -1, *a.shape[2:]),
        g.reshape(-1, 1, *g.shape[2:]),
        stride=shape.dilation,
        padding=tuple(padding),
        dilation=shape.stride,
        groups=g.shape[0] * g.shape[1],
    )
    for d, taps in enumerate(shape.kernel, start=2):
        found = found.narrow(d, 0, taps)  # what strides leave over of the input goes further
    return found.reshape(len(g), *shape.weight_shape)


def channels_alone(shape: ConvShape, spatial: tuple[int, ...]) -> bool:
    """True if every channel has a kernel of its own and the output is small enough to be one."""
    alone = shape.groups == shape.in_channels == shape.out_channels
    return alone and max(shape.output_sizes(spatial)) <= _LARGEST_KERNEL


def cost_in_groups(shape: ConvShape, spatial: tuple[int, ...]) -> float:
    """Time of an example's gradient, norm and part of the sum, in multiplications of a convolution.

    oneDNN fills up vectors of 16 with a group's output channels, and steps of 4 with its input
    channels; inputs and output gradients are put into another layout.
    """
    length, taps = positions(shape.output_sizes(spatial)), positions(shape.kernel)
    c, p = shape.in_channels // shape.groups, shape.out_channels // shape.groups
    if channels_alone(shape, spatial):
        layout = shape.in_channels * (positions(spatial) + length)
        return shape.groups * taps * (_CHANNELS_ALONE * length + _KEEP) + _TOUCH * layout
    filled = -(-c // _STEP) * _STEP * -(-p // _VECTOR) * _VECTOR
    layout = shape.in_channels * positions(spatial) + shape.out_channels * length
    return shape.groups * taps * (length * filled + _KEEP * c * p) + _TOUCH * layout


@functools.cache
def product_rate() -> float:
    """Multiplications of a convolution in the time of one of a batched matrix product.

    MKL, which torch multiplies matrices with, uses vectors of 512 bits on processors of Intel only,
    and oneDNN, which has its convolutions, wherever there are any. On an AMD EPYC (family 26, one
    thread) 3×3 convolutions of 64 to 256 channels made 85 to 105 multiplications a nanosecond, and
    the products of the same sizes 40 to 43. Of family 25, which passes 512 bits in two halves, the
    convolutions made 54 and the products 37 to 45; what tells the two apart is an instruction that
    AMD has from family 26 on. This goes by the processor and not by a clock: another kernel adds up
    in another order, and a step that is made again after a checkpoint has to come out the same bit
    for bit.
    """
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is None or not torch.backends.mkl.is_available():
        return 1.0
    known = ask()
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    wide = known.get("avx512_f", False) and allowed.startswith(
        ("ALL", "DEFAULT", "AVX512", "AVX10")
    )
    if not wide or "Intel" in str(known.get("cpu_name", "Intel")):
        return 1.0
    return 2.0 if known.get("avx512_vp2intersect", True) else 1.3
