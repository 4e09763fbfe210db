"""What a layer's rule reports in one backward pass, without a run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

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


class _Book:
    """Keeps what a tap reports."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.uses: dict[nn.Parameter, list[Use]] = {}

    def rows(self) -> int:
        return self._rows

    def idle(self) -> bool:
        return False

    def at_hand(self) -> None:
        return None

    def discard(self) -> None:
        self.uses.clear()

    def hidden(self) -> None:
        """Nothing."""

    def replays(self, rule: Any) -> None:
        pass

    def unseen(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def doubt(self, layer: nn.Module) -> str | None:
        return None

    def saw(self, layer: nn.Module, inputs: Sequence[Any], gradient: torch.Tensor) -> bool:
        return False

    def record(
        self, uses: Mapping[nn.Parameter, Use], since: Any = None, doubt: str | None = None
    ) -> None:
        for p, use in uses.items():
            self.uses.setdefault(p, []).append(use)
