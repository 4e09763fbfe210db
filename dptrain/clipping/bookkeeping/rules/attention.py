"""The rule of ``nn.MultiheadAttention``, whose projections are no layers of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import override

from dptrain.clipping.base.rows import UnclearRows
from dptrain.clipping.bookkeeping.rules.rule import Forward, Inputs, LayerRule, Observe
from dptrain.clipping.bookkeeping.rules.sequence_first import check_square
from dptrain.clipping.bookkeeping.uses.arranged import Stacked
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.clipping.bookkeeping.uses.use import Materialized, Use

IN_PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class AttentionRule(LayerRule):
    """``nn.MultiheadAttention.forward``, with every projection observed.

    With ``batch_first=False`` rows are the *second* dimension of what the layer is given. That is
    right between two transpositions, in a model whose other layers have the rows first.
    """

    recurses = True

    def keeps_inputs(self, layer: nn.Module) -> bool:
        """True if a weight is trained: biases need no inputs."""
        return any(p.requires_grad for n, p in layer.named_parameters() if n.endswith("weight"))

    def uses(self, layer: nn.Module, inputs: Inputs, gradient: torch.Tensor) -> Mapping[str, Use]:
        """Uses of the output projection: inputs and gradient are (rows, positions, width)."""
        found: dict[str, Use] = {}
        if inputs:
            found["out_proj.weight"] = OuterProducts(gradient, inputs[0])
        found["out_proj.bias"] = Materialized(gradient.sum(1))
        return found

    @override
    def forward(self, layer: nn.Module, forward: Forward, inputs: Inputs, observe: Observe) -> Any:
        assert isinstance(layer, nn.MultiheadAttention)
        return self._attend(layer, observe, *inputs)

    def _attend(
        self,
        layer: nn.MultiheadAttention,
        observe: Observe,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _check_shapes(layer, query, key, value)
        if not layer.batch_first:
            check_square(layer, "a query", tuple(query.shape), observe.rows(), "positions")
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True requires attn_mask, which is None: pass both")
        packed = query is key and key is value and layer.in_proj_weight is not None
        if not layer.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if packed:
            q, k, v = _packed(layer, query, observe)
        else:
            q, k, v = _separate(layer, (query, key, value), observe)
        # As torch does: SDPA is told "causal" where nothing else has to be hidden.
        hint = is_causal and key_padding_mask is None and not need_weights
        hidden = _mask(layer, q, k, key_padding_mask, None if hint else attn_mask)
        if layer.bias_k is not None and layer.bias_v is not None:
            k = torch.cat([k, observe.each("bias_k", len(k)).squeeze(1)], dim=1)
            v = torch.cat([v, observe.each("bias_v", len(v)).squeeze(1)], dim=1)
        if layer.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        q, k, v = (x.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        dropout = layer.dropout if layer.training else 0.0
        weights: torch.Tensor | None = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
            weights = (scores if hidden is None else scores + hidden).softmax(-1)
            weights = F.dropout(weights, dropout)
            h = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            h = F.scaled_dot_product_attention(q, k, v, hidden, dropout, hint)
        h = h.transpose(1, 2).flatten(2)
        out = F.linear(h, layer.out_proj.weight, layer.out_proj.bias)
        out = observe(out, (h,), self.uses)
        return (out if layer.batch_first else out.transpose(0, 1)), weights


def _check_shapes(
    layer: nn.MultiheadAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    shapes = [tuple(x.shape) for x in (query, key, value)]
    rows = 0 if layer.batch_first else 1
    if any(len(shape) != 3 for shape in shapes) or len({shape[rows] for shape in shapes}) > 1:
        raise UnclearRows(
            f"nn.MultiheadAttention is called with query, key and value of shapes {shapes}: each "
            "must have three dimensions and one row per example"
        )


def _packed(
    layer: nn.MultiheadAttention, x: torch.Tensor, observe: Observe
) -> tuple[torch.Tensor, ...]:
    """Query, key and value of self-attention by one product."""

    def uses(_: nn.Module, inputs: tuple[Any, ...], gradient: torch.Tensor) -> Mapping[str, Use]:
        found: dict[str, Use] = {"in_proj_bias": Materialized(gradient.sum(1))}
        if inputs:
            found["in_proj_weight"] = OuterProducts(gradient, inputs[0])
        return found

    projected = F.linear(x, layer.in_proj_weight, layer.in_proj_bias)
    return observe(projected, (x,), uses).chunk(3, dim=-1)


def _separate(
    layer: nn.MultiheadAttention, inputs: tuple[torch.Tensor, ...], observe: Observe
) -> tuple[torch.Tensor, ...]:
    """Query, key and value from inputs of their own, observed together: one bias is for all."""
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    if layer.in_proj_weight is None:
        weights = tuple(getattr(layer, name) for name in IN_PROJECTIONS)
    else:
        weights = layer.in_proj_weight.chunk(3)
    sides = [F.linear(*each) for each in zip(inputs, weights, biases, strict=True)]
    shapes = [side.shape[1:] for side in sides]
    sizes = [shape.numel() for shape in shapes]

    def uses(_: nn.Module, inputs: tuple[Any, ...], gradient: torch.Tensor) -> Mapping[str, Use]:
        parts = gradient.split(sizes, dim=1)
        lefts = [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]
        bias = torch.cat([left.sum(1) for left in lefts], dim=1)
        found: dict[str, Use] = {"in_proj_bias": Materialized(bias)}
        if inputs:
            products = [OuterProducts(*pair) for pair in zip(lefts, inputs, strict=True)]
            if layer.in_proj_weight is None:
                found.update(zip(IN_PROJECTIONS, products, strict=True))
            else:
                found["in_proj_weight"] = Stacked(products)
        return found

    joint = observe(torch.cat([side.flatten(1) for side in sides], dim=1), inputs, uses)
    return tuple(
        part.unflatten(1, shape)
        for part, shape in zip(joint.split(sizes, dim=1), shapes, strict=True)
    )


def _mask(
    layer: nn.MultiheadAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
) -> torch.Tensor | None:
    """The sum added to the scores; broadcasts to (rows, heads, queries, keys and the appended)."""
    rows, queries, keys = len(q), q.shape[1], k.shape[1]
    total: torch.Tensor | None = None
    for name, mask, shapes in (
        ("attn_mask", attn_mask, [(queries, keys), (rows * layer.num_heads, queries, keys)]),
        ("key_padding_mask", key_padding_mask, [(rows, keys)]),
    ):
        if mask is None:
            continue
        if tuple(mask.shape) not in shapes:
            raise UnclearRows(f"{name} has shape {tuple(mask.shape)}, expected one of {shapes}")
        if not mask.is_floating_point():
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -math.inf)
        if name == "key_padding_mask":
            mask = mask[:, None, None]
        elif mask.dim() == 3:
            mask = mask.unflatten(0, (rows, -1))
        total = mask if total is None else total + mask
    appended = int(layer.bias_k is not None) + int(layer.add_zero_attn)
    return total if total is None or not appended else F.pad(total, (0, appended))
