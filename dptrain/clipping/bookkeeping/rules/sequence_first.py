"""torch's Transformer with ``batch_first=False``: what is within it sees the examples first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from dptrain.clipping.bookkeeping.rules.inherited import differs
from dptrain.clipping.bookkeeping.rules.rules import LayerRule, Observe
from dptrain.clipping.bookkeeping.uses.uses import Use

# How many of the first arguments are sequences.
_SEQUENCES: dict[type[nn.Module], int] = {
    nn.TransformerEncoderLayer: 1,
    nn.TransformerEncoder: 1,
    nn.TransformerDecoderLayer: 2,
    nn.TransformerDecoder: 2,
    nn.Transformer: 2,
}


class SequenceFirstRule(LayerRule):
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
    def forward(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        inputs: tuple[Any, ...],
        observe: Observe,
    ) -> Any:
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

    def uses(
        self, layer: nn.Module, inputs: tuple[Any, ...], gradient: torch.Tensor
    ) -> Mapping[str, Use]:
        """Nothing is observed."""
        raise NotImplementedError


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
