"""Per-example weight gradients of a convolution on a device: one copy of the input, one product."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dptrain.clipping.bookkeeping.cache import product_size
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape, positions


def unfolded_gradients(
    a: torch.Tensor, g: torch.Tensor, shape: ConvShape, dtype: torch.dtype
) -> torch.Tensor:
    """All per-example gradients, shape (B, *weight.shape), by few operations.

    Every window of the input is copied, so that an example's gradient is one product of matrices.
    A processor takes longer to copy than to multiply (``form_gradients``).

    Args:
        a: inputs, shape (B, c, *spatial).
        g: gradients of the loss by the output, shape (B, p, *out).
        dtype: of the factors of the products, and of the gradients.
    """
    shape.check(a, g)
    a, shape = shape.padded(a)
    rows, outputs = len(g), tuple(g.shape[2:])
    channels, taps = shape.in_channels // shape.groups, positions(shape.kernel)
    length = positions(outputs)
    found = g.new_empty((rows, *shape.weight_shape), dtype=dtype)
    step = product_size(g, shape.in_channels * taps * length * dtype.itemsize // 4)
    widths = [width for pads in reversed(shape.padding) for width in pads]
    for start in range(0, rows, step):
        some = slice(start, min(rows, start + step))
        x = F.pad(a[some].to(dtype), widths) if any(widths) else a[some].to(dtype).contiguous()
        many = len(x)
        each, by_channel, *steps = x.stride()
        sizes = (many, shape.groups, channels, *shape.kernel, *outputs)
        strides = (
            each,
            channels * by_channel,
            by_channel,
            *[own * apart for own, apart in zip(steps, shape.dilation, strict=True)],
            *[own * apart for own, apart in zip(steps, shape.stride, strict=True)],
        )
        windows = x.as_strided(sizes, strides).reshape(-1, channels * taps, length)
        gradients = g[some].to(dtype).reshape(many * shape.groups, -1, length)
        into = found[some].view(len(windows), -1, channels * taps)
        torch.bmm(gradients, windows.transpose(1, 2), out=into)
    return found
