"""Gradient norms of rows that are not trained on, for accounting and analysis."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dptrain.clipping.bookkeeping import BookkeepingClipper, taps_of
from dptrain.core import checks


def per_example_norms(
    module: nn.Module, loss: torch.Tensor | Callable[[], torch.Tensor], *, rows: int
) -> torch.Tensor:
    """‖g_i‖₂ of every row's own loss at the module's current parameters, before clipping.

    For rows of any origin, between the steps of a run in mode bookkeeping, whose gradients and
    batches stay as they are:

    >>> norms = per_example_norms(private.module, loss_fn(private.module(x), y), rows=len(x))

    A layer that is called on one row for the whole batch (positions, say) has to know how many rows
    there are in the forward pass already, if these are not as many as the batch at hand has:

    >>> norms = per_example_norms(
    ...     private.module, lambda: loss_fn(private.module(x), y), rows=len(x))

    Norms of training data are private, and looking at them is free only while nothing that is
    released depends on them.

    Args:
        module: the run's.
        loss: of the rows, reduced over them as the run's, neither added to another nor scaled; or
            a function that returns it.
        rows: how many there are.

    Returns:
        Shape (rows,), detached.

    Raises:
        TypeError: for another loss, or a module that no run in mode bookkeeping is attached to.
        RuntimeError: if the norms do not cover all that the loss does with the parameters, as in
            training.
    """
    taps = taps_of(module)
    if taps is None:
        raise TypeError(
            f"module is a {type(module).__name__} to which no run in mode bookkeeping is "
            "attached: pass private.module of a run with Gradients(mode='bookkeeping'), before "
            "private.detach()"
        )
    parameters = [p for p in module.parameters() if p.requires_grad]
    book = _OtherRows(parameters, loss_reduction=taps.book.loss_reduction, rows=rows)
    with _gradients_kept(module), taps.reporting_to(book):
        reduced = loss() if callable(loss) and not isinstance(loss, torch.Tensor) else loss
        if not isinstance(reduced, torch.Tensor) or reduced.dim():
            raise TypeError(f"{checks.named('loss', reduced)}: must be a tensor with one number")
        reduced.backward()
        if book.batch is None:
            raise RuntimeError(
                "no layer of the module took part in the loss: compute it from the output of the "
                "private module, with gradients enabled"
            )
        return book.unclipped_norms(rows).detach()


class _OtherRows(BookkeepingClipper):
    """Book that takes in the gradients of rows that are no batch of the run's."""

    def __init__(self, parameters: list[nn.Parameter], *, loss_reduction: str, rows: int) -> None:
        batch: Any = types.SimpleNamespace(rows=rows, indices=range(rows), sizes=None)
        super().__init__(parameters, at_hand=lambda: batch, loss_reduction=loss_reduction)

    def record(
        self, uses: Mapping[nn.Parameter, Any], since: Any, doubt: str | None = None
    ) -> None:
        """Take in uses, even if the forward pass was made before this was asked for."""
        super().record(uses, self.at_hand())


@contextlib.contextmanager
def _gradients_kept(module: nn.Module) -> Iterator[None]:
    """Context that leaves ``p.grad`` as before, whatever a backward pass adds meanwhile."""
    kept = [(p, p.grad) for p in module.parameters()]
    for p, _ in kept:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in kept:
            p.grad = grad
