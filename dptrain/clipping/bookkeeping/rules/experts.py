"""The rule of the experts in Hugging Face's mixtures: matrices of which each token has a few."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import override

from dptrain.clipping.base.rows import UnclearRows
from dptrain.clipping.bookkeeping.rules.rule import CallRule, Forward, Inputs, LayerRule, Observe
from dptrain.clipping.bookkeeping.uses.gathered import Gathered
from dptrain.clipping.bookkeeping.uses.routed import Routed
from dptrain.clipping.bookkeeping.uses.use import Use

_SWITCHES = ("has_gate", "has_bias", "is_transposed", "num_experts", "down_proj", "_apply_gate")
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")  # all compute the same


class ExpertsRule(CallRule):
    """The experts of each token, with both their projections observed.

    Layers are given the tokens of the batch, one example's after the other's, with the experts and
    weights that a router has found for each token by itself. That the tokens are in this order, and
    that no example changes what another's tokens get, is what the probe looks at.
    """

    @override
    def forward(self, layer: nn.Module, forward: Forward, inputs: Inputs, observe: Observe) -> Any:
        hidden, experts, weights = inputs
        rows = observe.rows() or len(hidden)
        factor, rest = divmod(len(hidden), rows)
        if rest:
            raise UnclearRows(
                f"{type(layer).__name__} is called on {len(hidden)} tokens for a batch of {rows} "
                "rows: every example must have the same number of tokens, so pad the shorter ones"
            )
        first = "gate_up_proj" if layer.has_gate else "up_proj"
        made = _projected(layer, first, hidden, experts)
        made = observe(made, (hidden, experts), self._uses_of(first), factor=factor)
        flat = made.flatten(0, 1)
        flat = layer._apply_gate(flat) if layer.has_gate else layer.act_fn(flat)  # type: ignore[operator]
        inner = flat.unflatten(0, experts.shape)
        made = _projected(layer, "down_proj", inner, experts)
        made = observe(made, (inner, experts), self._uses_of("down_proj"), factor=factor)
        if getattr(layer, "has_post_expert_norm", False):
            made = layer.post_expert_norm(made)  # type: ignore[operator]
        return (made * weights[..., None]).sum(1).to(hidden.dtype)

    def _uses_of(self, name: str) -> Callable[..., Mapping[str, Use]]:
        """Uses of a projection's weights and biases, from inputs, experts and the gradient."""

        def uses(
            layer: nn.Module, inputs: tuple[Any, ...], gradient: torch.Tensor
        ) -> Mapping[str, Use]:
            x, experts = inputs
            count: int = layer.num_experts  # type: ignore[assignment]
            x = x if x.dim() == 3 else x[:, None].expand(-1, experts.shape[1], -1)
            left, right = (x, gradient) if layer.is_transposed else (gradient, x)
            found: dict[str, Use] = {name: Routed(left, right, experts, count)}
            if layer.has_bias:
                found[f"{name}_bias"] = Gathered(experts, gradient, count)
            return found

        return uses


def experts_rule(layer: nn.Module) -> LayerRule | None:
    """The rule, for layers of a class that Hugging Face's ``use_experts_implementation`` made."""
    moe = sys.modules.get("transformers.integrations.moe")
    forward = getattr(type(layer), "forward", None)  # TorchScript has none there
    if moe is None or getattr(forward, "__globals__", None) is not vars(moe):
        return None
    if "forward" in vars(layer) or not all(hasattr(layer, name) for name in _SWITCHES):
        return None
    known = {name + end for name in _WEIGHTS for end in ("", "_bias")}
    other = {name for name, _ in layer.named_parameters(recurse=False)} - known
    implementation = getattr(layer.config, "_experts_implementation", None)
    parallel = getattr(layer, "_is_expert_parallel", False)
    if other or parallel or implementation not in _IMPLEMENTATIONS:
        return None
    return _RULE


_RULE = ExpertsRule()


def _projected(layer: nn.Module, name: str, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Each token by the matrices of its experts, shape (tokens, experts of each, width)."""
    weight: torch.Tensor = getattr(layer, name)
    several, order = experts.shape[1], experts.flatten().argsort(stable=True)
    sorted_x = x[order // several] if x.dim() == 2 else x.flatten(0, 1)[order]
    counts = torch.bincount(experts.flatten(), minlength=len(weight)).tolist()
    parts = [
        F.linear(part, one.T if layer.is_transposed else one)
        for part, one in zip(sorted_x.split(counts), weight, strict=True)
    ]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    made = torch.cat(parts)[back].unflatten(0, experts.shape)
    if layer.has_bias:
        bias: torch.Tensor = getattr(layer, f"{name}_bias")
        made = made + bias[experts].to(made.dtype)
    return made
