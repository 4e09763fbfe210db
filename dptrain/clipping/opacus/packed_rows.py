"""Packed sequences whose rows are in another order than the examples of the batch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from opacus.layers.dp_rnn import DPRNNBase
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle


def refuse_reordered_rows(module: nn.Module) -> list[RemovableHandle]:
    """Make recurrent layers refuse packed sequences that were sorted by length on the way in.

    ``pack_padded_sequence(..., enforce_sorted=False)`` sorts the rows for the recurrent layer only.
    Its per-example gradients are then in that order and those of all other layers in the batch's,
    so that "row i" is made of two examples: clipped to R, removing one example moves the sum by up
    to 2R (measured: 1.4R), and an individual filter charges the wrong one.
    """

    def check(name: str, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        packed = inputs[0] if inputs else named.get("input")
        if not (layer.training and torch.is_grad_enabled() and isinstance(packed, PackedSequence)):
            return
        order = packed.sorted_indices
        if order is None or torch.equal(order.cpu(), torch.arange(len(order))):
            return
        raise RuntimeError(
            f"layer {name!r} got a packed sequence with enforce_sorted=False, which puts the rows "
            "in another order than the other layers see, so that per-example gradients would mix "
            "examples: feed it padded tensors, or, without an individual filter, let collate_fn "
            "sort the rows by length and pack them with enforce_sorted=True"
        )

    return [
        layer.register_forward_pre_hook(functools.partial(check, name), with_kwargs=True)
        for name, layer in module.named_modules()
        if isinstance(layer, DPRNNBase)
    ]
