"""The rules of torch's own layers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from dptrain.clipping.base.rows import UnclearRows, summing_dtype
from dptrain.clipping.bookkeeping.cache import cached
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape
from dptrain.clipping.bookkeeping.rules.attention import AttentionRule
from dptrain.clipping.bookkeeping.rules.experts import experts_rule
from dptrain.clipping.bookkeeping.rules.normalization import (
    ChannelNormRule,
    FrozenNormRule,
    LayerNormRule,
    RMSNormRule,
)
from dptrain.clipping.bookkeeping.rules.recurrent import CellRule, SequenceRule
from dptrain.clipping.bookkeeping.rules.rule import Forward, Inputs, LayerRule, Observe, WeightRule
from dptrain.clipping.bookkeeping.rules.sequence_first import sequence_first_rule
from dptrain.clipping.bookkeeping.rules.table import FINDERS, register_own
from dptrain.clipping.bookkeeping.uses.arranged import Viewed
from dptrain.clipping.bookkeeping.uses.convolved import Convolved
from dptrain.clipping.bookkeeping.uses.gathered import Bagged, Gathered, Picked
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.clipping.bookkeeping.uses.use import Materialized, SideNorms, Use


class EmbeddingBagRule(LayerRule):
    """Sums, means or largest numbers over the rows of a table, one bag an example.

    Bags are the rows of ids of two dimensions, or what ``offsets`` cut ids of one dimension into.
    """

    @override
    def refusal(self, layer: nn.Module) -> str | None:
        return refusal_of_frequencies(layer)

    @override
    def forward(self, layer: nn.Module, forward: Forward, inputs: Inputs, observe: Observe) -> Any:
        assert isinstance(layer, nn.EmbeddingBag)
        ids, offsets, weights = (*inputs, None, None)[:3]
        output = forward(*inputs)
        if ids.dim() == 2:
            lengths = ids.new_full((len(ids),), ids.shape[1])
        else:
            ends = offsets[1:] if layer.include_last_offset else _with_end(offsets[1:], len(ids))
            lengths = ends - offsets[: len(ends)]
            ids = _padded(ids, lengths)
            weights = None if weights is None else _padded(weights.detach(), lengths)
        counted = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        if layer.padding_idx is not None:
            counted &= ids != layer.padding_idx
        if layer.mode == "max":
            picked = _largest(layer, ids, counted)
            return observe(output, (picked, counted.any(1)), self._picked)
        coefficients = counted.to(summing_dtype(output))
        if weights is not None:
            coefficients = coefficients * weights.detach()
        if layer.mode == "mean":
            coefficients = coefficients / coefficients.sum(1, keepdim=True).clamp(min=1)
        return observe(output, (ids, coefficients), self.uses)

    @override
    def uses(self, layer: nn.Module, inputs: Inputs, gradient: torch.Tensor) -> Mapping[str, Use]:
        ids, coefficients = inputs
        return {"weight": Bagged(ids, coefficients, gradient, layer.num_embeddings)}  # type: ignore[arg-type]

    def _picked(
        self, layer: nn.Module, inputs: Inputs, gradient: torch.Tensor
    ) -> Mapping[str, Use]:
        """Of the largest numbers; an empty bag has no gradient."""
        ids, filled = inputs
        gradient = gradient.masked_fill(~filled[:, None], 0.0)
        return {"weight": Picked(ids, gradient, layer.num_embeddings)}  # type: ignore[arg-type]


def refusal_of_frequencies(layer: nn.Module) -> str | None:
    """The reason why a table that divides by counts cannot be handled, or ``None``."""
    if layer.scale_grad_by_freq:
        return "scale_grad_by_freq=True divides gradients by counts over the whole batch"
    return None


def _with_end(offsets: torch.Tensor, end: int) -> torch.Tensor:
    return torch.cat([offsets, offsets.new_tensor([end])])


def _padded(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Values one bag after the other, shape (total,), as (bags, longest), with zeros behind."""
    lengths = lengths.long()
    bags = torch.arange(len(lengths), device=values.device).repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    within = torch.arange(len(bags), device=values.device) - starts[bags]
    longest = int(lengths.max()) if len(lengths) else 0
    found = values.new_zeros(len(lengths), max(1, longest))
    found[bags, within] = values[: len(bags)]
    return found


def _largest(layer: nn.EmbeddingBag, ids: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """The id that each number of the output is from, shape (bags, width), as torch chooses it."""
    lengths = counted.sum(1)
    starts = lengths.cumsum(0) - lengths
    mode, sparse, frequencies = 2, False, False
    *_, found = torch.embedding_bag(
        layer.weight.detach(), ids[counted], starts, frequencies, mode, sparse
    )
    return found.masked_fill(~counted.any(1, keepdim=True), 0)


def positions(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, features) or (rows, ..., features) as (rows, positions, features)."""
    if tensor.dim() < 2:
        raise UnclearRows(
            f"the gradient with respect to its output, of shape {tuple(tensor.shape)}, has no "
            "dimension for the examples: give its input one row per example in the first dimension"
        )
    return tensor[:, None] if tensor.dim() == 2 else tensor.flatten(1, -2)


class LinearRule(WeightRule):
    """y = x Wᵀ + b, or y = x W + b for a weight that is stored the other way round.

    Args:
        transposed: whether the weight has shape (in, out), as in Hugging Face's ``Conv1D``.
    """

    def __init__(self, *, transposed: bool = False) -> None:
        self.transposed = transposed

    @override
    def alike(self, layer: nn.Module, dims: int) -> int:
        return dims - 1

    @override
    def uses(self, layer: nn.Module, inputs: Inputs, gradient: torch.Tensor) -> Mapping[str, Use]:
        left = positions(gradient)
        single = left.shape[1] == 1
        norms = SideNorms(left[:, 0]) if single else None  # of the bias, and half of the weight's
        found: dict[str, Use] = {}
        if inputs:
            right = positions(inputs[0])
            found["weight"] = (
                OuterProducts(right, left, right_norms=norms)
                if self.transposed
                else OuterProducts(left, right, left_norms=norms)
            )
        if layer.bias is not None and layer.bias.requires_grad:
            found["bias"] = Materialized(left[:, 0], norms) if single else Materialized(left.sum(1))
        return found


class BilinearRule(WeightRule):
    """y_o = x1ᵀ A_o x2 + b_o."""

    @override
    def uses(self, layer: nn.Module, inputs: Inputs, gradient: torch.Tensor) -> Mapping[str, Use]:
        outer = positions(gradient)
        found: dict[str, Use] = {}
        if inputs:
            first, second = (positions(x) for x in inputs)
            left = (outer[..., None] * first[..., None, :]).flatten(2)  # (rows, positions, o · i)
            shape = torch.Size((outer.shape[2], first.shape[2], second.shape[2]))
            found["weight"] = Viewed(OuterProducts(left, second), shape)
        if layer.bias is not None and layer.bias.requires_grad:
            found["bias"] = Materialized(outer.sum(1))
        return found


class PReLURule(WeightRule):
    """y = max(x, 0) + w min(x, 0), with one w, or one for each entry of dimension 1."""

    @override
    def uses(self, layer: nn.Module, inputs: Inputs, gradient: torch.Tensor) -> Mapping[str, Use]:
        (x,) = inputs
        channels = len(layer.weight)  # type: ignore[arg-type]
        positions, found = x.shape[1:].numel() // channels, []
        for start, stop in cached(gradient, 3 * channels * positions):
            part = x[start:stop].clamp(max=0).mul_(gradient[start:stop])
            found.append(part.reshape(len(part), channels, positions).sum(2))
        return {"weight": Materialized(torch.cat(found))}


class EmbeddingRule(LayerRule):
    """Rows of a table; the row of ``padding_idx`` gets no gradient."""

    @override
    def refusal(self, layer: nn.Module) -> str | None:
        return refusal_of_frequencies(layer)

    @override
    def alike(self, layer: nn.Module, dims: int) -> int:
        return dims

    @override
    def uses(self, layer: nn.Module, inputs: Inputs, gradient: torch.Tensor) -> Mapping[str, Use]:
        assert isinstance(layer, nn.Embedding)
        ids = inputs[0]
        ids, gradient = ids.reshape(len(gradient), -1), positions(gradient)
        if layer.padding_idx is not None:
            gradient = gradient.masked_fill((ids == layer.padding_idx)[..., None], 0.0)
        return {"weight": Gathered(ids, gradient, layer.num_embeddings)}


class ConvRule(WeightRule):
    """Convolutions of one to three dimensions."""

    half = True

    @override
    def uses(self, layer: nn.Module, inputs: Inputs, gradient: torch.Tensor) -> Mapping[str, Use]:
        found: dict[str, Use] = {}
        if inputs:
            found["weight"] = self.convolved(layer, inputs[0], gradient)
        if layer.bias is not None and layer.bias.requires_grad:  # added at all positions
            total = gradient.flatten(2).sum(2, dtype=summing_dtype(gradient))
            found["bias"] = Materialized(total)
        return found

    def convolved(self, layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Convolved:
        """The use of the weight."""
        return Convolved(x, gradient, ConvShape.of(layer))


class ConvTransposeRule(ConvRule):
    """Transposed convolutions: convolutions with input and output gradient exchanged."""

    @override
    def convolved(self, layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Convolved:
        # The sizes that may have been asked for show in the gradient's.
        shape = ConvShape.adjoint(layer, tuple(x.shape[2:]), tuple(gradient.shape[2:]))
        return Convolved(gradient, x, shape)


FINDERS += [sequence_first_rule, experts_rule]
register_own(nn.Linear, LinearRule())
register_own(nn.modules.linear.NonDynamicallyQuantizableLinear, LinearRule())
register_own(nn.Bilinear, BilinearRule())
register_own(nn.MultiheadAttention, AttentionRule())
register_own(nn.Embedding, EmbeddingRule())
register_own(nn.EmbeddingBag, EmbeddingBagRule())
register_own(nn.PReLU, PReLURule())
for convolution in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_own(convolution, ConvRule())
for transposed in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register_own(transposed, ConvTransposeRule())
register_own(nn.LayerNorm, LayerNormRule())
register_own(nn.RMSNorm, RMSNormRule())
for recurrent in (nn.LSTM, nn.GRU, nn.RNN):
    register_own(recurrent, SequenceRule())
for cell in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
    register_own(cell, CellRule())
for norm in (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d):
    register_own(norm, ChannelNormRule())
for frozen in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
    register_own(frozen, FrozenNormRule())


def register_imported() -> None:
    """Rules of layers of libraries that are in use, and are not imported for this."""
    hugging_face = sys.modules.get("transformers.pytorch_utils")
    if hugging_face is not None:
        register_own(hugging_face.Conv1D, LinearRule(transposed=True))
