"""A layer's forward during a run: by the layer's rule, without the layer's own parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from typing_extensions import override

from dptrain.clipping.base.book import Book
from dptrain.clipping.base.rows import UnclearRows
from dptrain.clipping.base.stand_in import StandIn, is_untapped
from dptrain.clipping.bookkeeping.operations import OperationsRule
from dptrain.clipping.bookkeeping.rules.rule import LayerRule, Observe
from dptrain.clipping.bookkeeping.shared.row_plan import RowPlan


class LayerTap(StandIn):
    """Stands in for ``layer.forward`` and has the layer's rule run it where gradients are wanted.

    Copies of the layer have its own forward again and report nothing (``StandIn``).

    Args:
        layer: has a rule.
        rule: its rule.
        book: where gradients are reported to.
        anchor: as of ``Observe``.
        name: of the layer in the module, for messages.

    Attributes:
        layer: as given.
        observe: what the rule runs calls with.
    """

    def __init__(
        self, layer: nn.Module, rule: LayerRule, book: Book, anchor: torch.Tensor, name: str = ""
    ) -> None:
        self.layer = layer
        shared = OperationsRule(name, shared=rule)
        self.observe = Observe(layer, rule, shared, book, anchor, name)
        super().__init__(layer, "forward")
        # A compiled graph would run the bookkeeping once, when it is traced.
        self._run = torch.compiler.disable(self.forward)

    @override
    def run(self, *args: Any, **kwargs: Any) -> Any:
        # Leaving a trace takes 50 µs also where there is none.
        run = self._run if torch.compiler.is_compiling() else self.forward
        return run(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output, as its rule forms it where gradients are wanted."""
        observe, book = self.observe, self.observe.book
        if not torch.is_grad_enabled() or is_untapped():
            book.hidden()
            return self.own(*args, **kwargs)
        if observe.muted:  # the rule of what this is within finds what the call comes to
            return self.own(*args, **kwargs)
        if not book.idle():
            return self._followed(args, kwargs)
        if book.at_hand() is None:  # between batches, for rows that are none of the run's
            try:
                return self._followed(args, kwargs)
            except RuntimeError:  # no rule fits; an error of the layer itself comes again
                pass
        return observe.idly(self.own, args, kwargs)

    def _followed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's output, of which what the rule finds is reported on the way back."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                f"{self.observe.called}, is called within torch.func (vmap, grad, jvp or "
                "similar), where dptrain cannot check that its input has one row per example. "
                "Call the layer on the whole batch, or use its parameters directly inside "
                "torch.func (torch.vmap(lambda row: row @ self.weight)(x))"
            )
        observe = self.observe
        try:
            return observe.rule.run(observe, self.own, args, kwargs)
        except UnclearRows as error:
            raise observe.naming(error) from error

    def plans(self) -> list[RowPlan]:
        """Notes of which sizes follow the rows of the batch, in the layer's calls."""
        observe = self.observe
        every = (observe.plan, observe.shared.plan, observe.rule.plan)
        return [plan for plan in every if plan is not None]
