"""Layers with ``batch_first=False``; within torch's Transformer they see the examples first."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from dptrain.clipping.base.rows import UnclearRows
from dptrain.clipping.bookkeeping.rules.inherited import differs
from dptrain.clipping.bookkeeping.rules.rule import CallRule, Forward, Inputs, LayerRule, Observe

# Number of the first arguments that are sequences.
_SEQUENCES: dict[type[nn.Module], int] = {
    nn.TransformerEncoderLayer: 1,
    nn.TransformerEncoder: 1,
    nn.TransformerDecoderLayer: 2,
    nn.TransformerDecoder: 2,
    nn.Transformer: 2,
}


class SequenceFirstRule(CallRule):
    """Runs the module on transposed sequences, as if it had been made with ``batch_first=True``.

    It computes the same, and every layer within finds a row for each example in the first
    dimension. Has no parameters to cover: those belong to the layers within.
    """

    arranges = True

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences
        self._within = False  # another module's, which has transposed

    @override
    def holders(self, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield from ()

    @override
    def forward(self, layer: nn.Module, forward: Forward, inputs: Inputs, observe: Observe) -> Any:
        second = _with_batch_second(layer)
        if not second:
            self._within = True
            return forward(*inputs)
        with _examples_first(second):
            # In a backward pass: a checkpoint runs this alone, without what it is within.
            if self._within and torch._C._current_graph_task_id() != -1:
                return forward(*inputs)
            sequences = [x.transpose(0, 1) for x in inputs[: self.sequences]]
            return forward(*sequences, *inputs[self.sequences :]).transpose(0, 1)


def sequence_first_rule(layer: nn.Module) -> LayerRule | None:
    """The rule, for what has the examples in the second dimension."""
    kind = next((kind for kind in type(layer).__mro__ if kind in _SEQUENCES), None)
    if kind is None or differs(layer, kind) or not _with_batch_second(layer):
        return None
    if not any(p.requires_grad for p in layer.parameters()):
        return None
    return SequenceFirstRule(_SEQUENCES[kind])


def _with_batch_second(layer: nn.Module) -> list[nn.Module]:
    kinds = nn.MultiheadAttention | nn.Transformer
    return [m for m in layer.modules() if isinstance(m, kinds) and not m.batch_first]


@contextlib.contextmanager
def _examples_first(modules: list[Any]) -> Iterator[None]:
    for module in modules:
        module.batch_first = True
    try:
        yield
    finally:
        for module in modules:
            module.batch_first = False


def check_square(
    layer: nn.Module, given: str, shape: tuple[int, ...], rows: int | None, first: str
) -> None:
    """Refuse a square, of which nobody can say which side the examples are.

    If they are the first, they are taken for positions of one sequence. What the layer was used for
    before tells, as a probe of other numbers of examples does.

    Args:
        layer: has batch_first=False.
        given: what it is given, in words.
        first: what the first dimension should be, in words.
    """
    if shape[0] != shape[1]:
        if shape[1] == rows:
            _SECOND.add(layer)
    elif shape[0] > 1 and layer not in _SECOND:
        raise UnclearRows(
            f"nn.{type(layer).__name__}(batch_first=False) is called on {given} of shape "
            f"{shape}, where the first dimension may be {first}, as it should be, or examples. "
            "Use batch_first=True, with the rows in the first dimension"
        )


# Layers that were given the rows in the second dimension of what was no square.
_SECOND: weakref.WeakSet[nn.Module] = weakref.WeakSet()
