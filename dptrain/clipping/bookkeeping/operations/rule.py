"""The rule of layers that have none: their parameters are followed through their operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from dptrain.clipping.bookkeeping.operations.plan import RowPlan
from dptrain.clipping.bookkeeping.operations.session import LayerSession
from dptrain.clipping.bookkeeping.rules.rules import (
    Exchanged,
    LayerRule,
    Observe,
    not_called,
    past_their_own,
    uncached,
)
from dptrain.clipping.bookkeeping.uses.uses import Use


class OperationsRule(LayerRule):
    """Any layer: what its parameters do is seen operation by operation (``Tracked``).

    docs/theory/clipping.md#thm-followed; ``test_equals_the_loop``.

    The layer's forward runs once, as it is. A broadcast sum or product, a matrix product, a
    convolution, a look-up or a normalization has its gradients for the price that the layers of
    that name pay; the vector-Jacobian product of any other operation is run again for each example.
    Also for bare parameters of modules that hold other layers, which keep their own rules.

    Args:
        layer: the one that it is for.
        name: of it in the user's module.
        shared: the layer's own rule, if this is for calls on what all examples share, so that no
            tensor there has rows of the batch, whatever its size.

    Attributes:
        others: layers within, by their names, whose parameters are used past their own forward.
    """

    def __init__(
        self, layer: nn.Module, name: str = "", *, shared: LayerRule | None = None
    ) -> None:
        self.layer, self.name, self.shared = layer, name, shared
        self.plan = RowPlan()
        self.others: dict[str, nn.Module] = {}

    @override
    def holders(self, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The layer, and what holds parameters for it without being called."""
        if self.shared is None:
            yield from not_called("", layer)
        else:
            yield from self.shared.holders(layer)
        yield from self.others.items()

    @override
    def forward(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        inputs: tuple[Any, ...],
        observe: Observe,
    ) -> Any:
        rows = observe.rows()
        if rows is None:  # no batch is at hand: the backward pass will be refused
            return forward(*inputs)
        users = past_their_own(self.others)
        session = LayerSession(layer, observe, self.plan, rows, self.name, users)
        own = observe.parameters()

        def tracked(name: str, p: nn.Parameter) -> torch.Tensor:
            return session.parameter(own[name]) if name in own else p

        session.without_rows = self.shared is not None
        try:
            with Exchanged(self.holders(layer), tracked), uncached():
                return forward(*inputs)
        finally:
            session.without_rows = False

    @override
    def uses(
        self, layer: nn.Module, inputs: tuple[Any, ...], gradient: torch.Tensor
    ) -> Mapping[str, Use]:
        """Every operation has uses of its own."""
        raise NotImplementedError
