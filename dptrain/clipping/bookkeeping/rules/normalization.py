"""Rules of normalization layers: y = x̂ ⊙ w + b, with x̂ normalized within an example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import override

from dptrain.clipping.base.rows import HALF
from dptrain.clipping.bookkeeping.cache import cached
from dptrain.clipping.bookkeeping.rules.rule import CallRule, Forward, Inputs, Observe, WeightRule
from dptrain.clipping.bookkeeping.uses.use import Materialized, Use
from dptrain.core import on_processor

# Numbers of an example from which on a kernel call for each costs less than passes over all.
_LONG = 2**16
_TOUCHED = 3  # arrays of the gradient's size that the passes go over


class RMSNormRule(WeightRule):
    """w belongs to the last dimensions; x̂ is computed again, a few examples at a time."""

    @override
    def uses(self, layer: nn.Module, inputs: Inputs, gradient: torch.Tensor) -> Mapping[str, Use]:
        bias = getattr(layer, "bias", None)
        weights, biases = [], []
        for start, stop in cached(gradient, _TOUCHED * gradient[:1].numel()):
            part = gradient[start:stop]
            if bias is not None and bias.requires_grad:
                biases.append(self.summed(layer, part))
            if inputs:
                scaled = self.normalized(layer, *(value[start:stop] for value in inputs))
                weights.append(self.summed(layer, scaled.mul_(part)))
        found = {"weight": weights, "bias": biases}
        return {name: Materialized(torch.cat(parts)) for name, parts in found.items() if parts}

    @override
    def alike(self, layer: nn.Module, dims: int) -> int:
        return dims - len(layer.normalized_shape)  # type: ignore[arg-type]

    def summed(self, layer: nn.Module, values: torch.Tensor) -> torch.Tensor:
        """Sums over all but the rows and the dimensions of w."""
        return over_positions(layer, values)

    def normalized(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """x̂, in memory of its own."""
        return F.rms_norm(x, layer.normalized_shape, eps=layer.eps)  # type: ignore[arg-type]


class LayerNormRule(RMSNormRule):
    """The same with the mean taken away; for long examples torch's own kernel, row by row.

    That reads x and the gradient once, where x̂, its product and the sum are four passes.
    """

    @override
    def forward(self, layer: nn.Module, forward: Forward, inputs: Inputs, observe: Observe) -> Any:
        assert isinstance(layer, nn.LayerNorm)
        (x,) = inputs
        shape = list(layer.normalized_shape)
        # In half precision so are the mean and the deviation that the kernel returns.
        if torch.is_autocast_enabled(x.device.type) or x.dtype in HALF:
            return super().forward(layer, forward, inputs, observe)
        kept = torch.native_layer_norm(x, shape, layer.weight, layer.bias, layer.eps)
        long = on_processor(x) and x.dim() > len(shape) + 1 and x[:1].numel() >= _LONG
        uses = self._row_by_row if long else self._all_uses
        return observe(kept[0], (x, *kept[1:]), uses)

    def _row_by_row(
        self, layer: nn.Module, inputs: Inputs, gradient: torch.Tensor
    ) -> Mapping[str, Use]:
        """The uses, by a kernel call for each example."""
        if not inputs:  # only the bias is trained
            return self.uses(layer, inputs, gradient)
        weight, bias = layer.weight, layer.bias
        has_bias = bias is not None and bias.requires_grad
        wanted = [False, True, bool(has_bias)]
        kernel = torch.ops.aten.native_layer_norm_backward
        shape = list(layer.normalized_shape)  # type: ignore[arg-type]
        rows = [
            kernel(g.contiguous(), x, shape, mean, deviation, weight, bias, wanted)
            for g, x, mean, deviation in zip(gradient, *inputs, strict=True)
        ]
        found: dict[str, Use] = {"weight": Materialized(torch.stack([row[1] for row in rows]))}
        if has_bias:
            found["bias"] = Materialized(torch.stack([row[2] for row in rows]))
        return found

    def normalized(self, layer: nn.Module, x: torch.Tensor, *kept: torch.Tensor) -> torch.Tensor:
        """x̂, from the mean and the inverse deviation where they are kept."""
        if not kept:
            return F.layer_norm(x, layer.normalized_shape, eps=layer.eps)  # type: ignore[arg-type]
        mean, inverse = kept
        return (x - mean).mul_(inverse)


class FrozenNormRule(RMSNormRule):
    """Batch norms, and instance norms that track statistics, in eval mode.

    With fixed statistics x̂ = (x - mean)/√(var + ε) is a map of each entry by itself, and w belongs
    to dimension 1.
    """

    @override
    def alike(self, layer: nn.Module, dims: int) -> int:
        return 1

    @override
    def normalized(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        mean, variance = (
            layer.get_buffer(name).to(x.dtype).view(shape)
            for name in ("running_mean", "running_var")
        )
        return (x - mean).mul_((variance + layer.eps).rsqrt())  # type: ignore[operator]

    @override
    def summed(self, layer: nn.Module, values: torch.Tensor) -> torch.Tensor:
        return values.flatten(2).sum(2) if values.dim() > 2 else values


_FROZEN = FrozenNormRule()


class ChannelNormRule(CallRule):
    """Group and instance norms, whose w belongs to dimension 1.

    All examples' channels are made channels of one example, each with weights of its own. torch's
    backward pass then has every example's gradient, for what it costs to have their sum.
    """

    @override
    def refusal(self, layer: nn.Module) -> str | None:
        if getattr(layer, "track_running_stats", False) and layer.training:
            return "track_running_stats=True keeps statistics of the data without noise"
        return None

    @override
    def forward(self, layer: nn.Module, forward: Forward, inputs: Inputs, observe: Observe) -> Any:
        if getattr(layer, "track_running_stats", False):
            return _FROZEN.forward(layer, forward, inputs, observe)
        (x,) = inputs
        instance = isinstance(layer, nn.modules.instancenorm._InstanceNorm)
        groups = x.shape[1] if instance else layer.num_groups
        channels = x.reshape(1, -1, *x.shape[2:])
        weight, bias = (
            None if getattr(layer, name) is None else observe.each(name, len(x)).flatten()
            for name in ("weight", "bias")
        )
        y = torch.group_norm(channels, len(x) * groups, weight, bias, layer.eps)  # type: ignore[arg-type, operator]
        return y.view_as(x)


def over_positions(layer: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """Sums over all but the rows and the dimensions of the weight."""
    kept = len(layer.normalized_shape)  # type: ignore[arg-type]
    between = range(1, values.dim() - kept)
    return values.sum(tuple(between)) if between else values
