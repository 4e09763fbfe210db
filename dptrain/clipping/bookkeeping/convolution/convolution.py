"""Costs of clipping a convolution's weight gradients, and their weighted sum."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch

from dptrain.clipping.base.rows import summing_dtype
from dptrain.clipping.bookkeeping.convolution.grouped import (
    channels_alone,
    cost_in_groups,
    product_rate,
)
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape, positions
from dptrain.core import on_processor

# Multiplications that take as long as reading or writing a number, measured on two cores: in a
# workspace that stays in the cache, and through all per-example gradients (write, norm, sum).
_TOUCH = 10
_KEEP = 50
_HALF = 0.4  # of a product in bfloat16, by units for it: a third to two fifths


class Costs(NamedTuple):
    """Time of an example's norm and of its part of the clipped sum, in multiplications.

    Attributes:
        products: of keeping gradients that ``form_gradients`` forms.
        groups: of keeping those of ``gradients_in_groups``; infinite where products are as fast and
            channels are not convolved alone.
        gram: of norms by ``squared_norms`` and a sum by ``weighted_sum``.
    """

    products: float
    groups: float
    gram: float

    @property
    def cheaper(self) -> str:
        """``"products"``, ``"groups"`` or ``"gram"``."""
        return min(self._fields, key=self.__getattribute__)


def costs(shape: ConvShape, spatial: tuple[int, ...], *, half: bool = False) -> Costs:
    """The costs of three ways: keep gradients, formed in one of two ways, or take ghost norms.

    With products or groups the gradients are formed, and passed through for the norm and again for
    the sum. Gram passes through products between positions, and then forms the sum by
    ``weighted_sum``.

    Args:
        half: whether gradients that are kept are products in bfloat16, by units for it.
    """
    outputs, rate = shape.output_sizes(spatial), product_rate()
    pixels, length = positions(spatial), positions(outputs)
    weights = shape.out_channels * shape.in_channels // shape.groups * positions(shape.kernel)
    copied = shape.in_channels * positions(shape.kernel[1:]) * length * shape.stride[0]
    # A product with a single vector takes as long as reading the matrix.
    kept = _HALF if half else rate
    each = kept if shape.out_channels > shape.groups else _TOUCH
    formed = each * length * weights + _TOUCH * copied + _KEEP * weights
    pairs = pixels**2 * shape.in_channels + length**2 * shape.out_channels
    stages = [pixels**2, *[length**2 * (taps + 1) for taps in shape.kernel], 4 * length**2]
    gram = length * weights + rate * pairs + _TOUCH * shape.groups * sum(stages)
    # Where products are as fast, nothing was measured that speaks for groups of many channels.
    pays = (rate > 1 and not half) or channels_alone(shape, spatial)
    groups = cost_in_groups(shape, spatial) if pays else math.inf
    return Costs(formed, groups, gram)


def weighted_sum(
    a: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    shape: ConvShape,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Σ_i f_i g_i of the weight's per-example gradients g_i: an ordinary backward pass.

    Args:
        a: inputs, shape (B, c, *spatial).
        g: gradients of the loss by the output, shape (B, p, *out).
        factors: shape (B,). An example of factor 0 may be anything, NaN too, but on a device, which
            would be waited for to know: no row may be there.
        scratch: memory of the shape of ``g``, which then holds f_i · g; may be ``g`` itself where
            nobody reads that any more. Where ``None``, the smaller of ``a`` and ``g`` is scaled.

    Returns:
        Shape weight.shape; float32 for half precision.
    """
    shape.check(a, g)
    a, shape = shape.symmetric(a)
    dtype = summing_dtype(g)
    a, g, factors = a.to(dtype), g.to(dtype), factors.to(dtype)
    kept = factors != 0
    if on_processor(g) and not bool(kept.all()):  # 0 · NaN is NaN
        a, g, factors, scratch = a[kept], g[kept], factors[kept], None
    if not len(g):
        return g.new_zeros(shape.weight_shape)
    by_row = factors.view(-1, *[1] * (g.dim() - 1))
    if scratch is not None:
        g = torch.mul(g, by_row, out=scratch)
    elif g.numel() <= a.numel():
        g = g * by_row
    else:
        a = a * by_row
    zeros = [0] * len(shape.kernel)
    weight = g.new_empty(()).expand(shape.weight_shape)  # only its shape is looked at
    with _full_float32(g):
        _, total, _ = torch.ops.aten.convolution_backward(
            g,
            a,
            weight,
            None,
            list(shape.stride),
            [before for before, _ in shape.padding],
            list(shape.dilation),
            False,
            zeros,
            shape.groups,
            [False, True, False],
        )
    return total


def _full_float32(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """cuDNN without TensorFloat32, its default: sums would differ from their norms by 5e-4."""
    if not tensor.is_cuda:
        return contextlib.nullcontext()
    cudnn: Any = torch.backends.cudnn
    return cudnn.flags(
        enabled=cudnn.enabled,
        benchmark=cudnn.benchmark,
        deterministic=cudnn.deterministic,
        allow_tf32=False,
    )
