"""The uses of parameters that a layer's rule reports in one backward pass, without a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from dptrain.clipping.base import Book
from dptrain.clipping.bookkeeping import LayerRule, LayerTap
from dptrain.clipping.bookkeeping.rules import owned
from dptrain.clipping.bookkeeping.uses import Use


def reported_uses(
    layer: nn.Module, rule: LayerRule, values: list[Any], directions: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, list[Use]]]:
    """The layer's outputs, and the uses of its trainable parameters by their names.

    Args:
        layer: the layer.
        rule: its rule.
        values: what it is called with; gradients of those that need some are left in ``.grad``.
        directions: the gradient of each output.
    """
    book = _Book(len(directions[0]))
    tap = LayerTap(layer, rule, book, torch.zeros((), requires_grad=True))
    try:
        outputs = tensors_of(layer(*values))
        # By backward(), as in training: a use is reported where the parameters' gradients are.
        torch.autograd.backward(outputs, directions)
    finally:
        tap.remove()
    return outputs, {name: book.uses.get(p, []) for name, p in owned(layer, rule).items()}


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors of an output."""
    parts = output if isinstance(output, tuple | list) else [output]
    return [part for part in parts if isinstance(part, torch.Tensor) and part.requires_grad]


class _Book(Book):
    """Keeps what a tap reports."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.uses: dict[nn.Parameter, list[Use]] = {}

    @override
    def rows(self) -> int:
        return self._rows

    @override
    def record(
        self, uses: Mapping[nn.Parameter, Use], since: Any, doubt: str | None = None
    ) -> None:
        for p, use in uses.items():
            self.uses.setdefault(p, []).append(use)
