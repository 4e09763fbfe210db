"""The rule of ``nn.EmbeddingBag``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from dptrain.clipping.base.rows import summing_dtype
from dptrain.clipping.bookkeeping.rules.rules import LayerRule, Observe
from dptrain.clipping.bookkeeping.uses.bagged import Bagged, Picked
from dptrain.clipping.bookkeeping.uses.uses import Use


class EmbeddingBagRule(LayerRule):
    """Sums, means or largest numbers over the rows of a table, one bag an example.

    Bags are the rows of ids of two dimensions, or what ``offsets`` cut ids of one dimension into.
    """

    @override
    def refusal(self, layer: nn.Module) -> str | None:
        return refusal_of_frequencies(layer)

    @override
    def forward(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        inputs: tuple[Any, ...],
        observe: Observe,
    ) -> Any:
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
    def uses(
        self, layer: nn.Module, inputs: tuple[Any, ...], gradient: torch.Tensor
    ) -> Mapping[str, Use]:
        ids, coefficients = inputs
        return {"weight": Bagged(ids, coefficients, gradient, layer.num_embeddings)}  # type: ignore[arg-type]

    def _picked(
        self, layer: nn.Module, inputs: tuple[Any, ...], gradient: torch.Tensor
    ) -> Mapping[str, Use]:
        """Of the largest numbers; an empty bag has no gradient."""
        ids, filled = inputs
        gradient = gradient.masked_fill(~filled[:, None], 0.0)
        return {"weight": Picked(ids, gradient, layer.num_embeddings)}  # type: ignore[arg-type]


def refusal_of_frequencies(layer: nn.Module) -> str | None:
    """Why a table that divides by counts cannot be handled, or ``None``."""
    if layer.scale_grad_by_freq:
        return "scale_grad_by_freq=True divides by counts over the whole batch"
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
