"""Checks that a user's ``compute_loss`` keeps the examples of a batch apart."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dptrain.core import global_state, named_error, restore_global_state, same_global_state
from dptrain.integrations.transformers.head_loss import LossCheck

logger = logging.getLogger(__name__)


class OwnLossCheck:
    """Calls a ``compute_loss`` again on some rows of the inputs and of what the model returned.

    The model is not run for that: what stands for it gives out rows of its outputs. So nothing can
    be told of a loss that runs parts of the model, draws random numbers, or comes out of the model
    as one number, which the probe of the model looks at.

    Args:
        reduction: ``"mean"`` or ``"sum"`` over the rows.
        owner: name of the trainer's class.

    Attributes:
        busy: True while it is being called again, and not for a step.
    """

    def __init__(self, compute: Callable[..., Any], reduction: str, owner: str) -> None:
        self.compute, self._owner = compute, owner
        self._check = LossCheck(self._again, reduction, f"{owner}.compute_loss()")
        self._call: tuple[nn.Module, type, tuple[Any, ...], dict[str, Any]]
        self._told = self.busy = False

    def __call__(self, rows: int, model: nn.Module, inputs: Any, *args: Any, **more: Any) -> Any:
        """The result of ``compute_loss`` for a batch, which is looked at on its first rows.

        Args:
            rows: how many rows of the batch are examples.
            model, inputs, args, more: as of ``compute_loss``.
        """
        kept = dict(inputs)
        with _outputs_of(model) as outputs:
            found = self.compute(model, inputs, *args, **more)
        self._call = (model, type(inputs), args, more)
        self.busy = True
        try:
            if not _by_rows(outputs, next(_sizes(kept), 0)):
                raise _Unclear("the model returns something that has no row for each example")
            self._check.look_at(outputs, kept, rows)
        except _Unclear as unclear:
            self._warn(str(unclear))
        finally:
            self.busy = False
        return found

    def _again(self, outputs: list[Any], inputs: dict[str, Any], **_: Any) -> torch.Tensor:
        model, kind, args, more = self._call
        before = global_state()
        try:
            with _never_run(model):
                found = self.compute(_stand_in(model, outputs), kind(inputs), *args, **more)
        except Exception as error:  # of the user's code, on rows that it may not have met
            raise _Unclear(named_error(error)) from error
        finally:
            drawn = not same_global_state(before, global_state())
            if drawn:
                restore_global_state(before)
        if drawn:
            raise _Unclear("it draws random numbers")
        loss: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return loss

    def _warn(self, why: str) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "%s.compute_loss() could not be tested on a few rows of a batch (%s), so only its "
                "gradients are checked for mixing examples. Make sure that it returns a mean of "
                "one loss per row, as dptrain.losses.reduce_examples computes it",
                self._owner,
                why,
            )


class _Unclear(Exception):
    """Raised where nothing can be told."""


def _stand_in(model: nn.Module, outputs: list[Any]) -> nn.Module:
    """A copy of the model in looks, which returns these outputs, one a call."""
    left = iter(outputs)

    def call(*_: Any, **__: Any) -> Any:
        return next(left)

    kind = type(model)
    stand_in = copy.copy(model)
    named = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    stand_in.__class__ = type(kind.__name__, (kind,), named)
    return stand_in


@contextlib.contextmanager
def _outputs_of(model: nn.Module) -> Iterator[list[Any]]:
    """A list to which each call of the model meanwhile adds what it returns.

    Before a call returns, a probe may have run the module without its hooks before the call.
    """
    found: list[Any] = []

    def begin(*_: Any) -> None:
        found.append(None)

    def end(_module: nn.Module, _inputs: Any, output: Any) -> None:
        found[-1] = output

    with model.register_forward_pre_hook(begin, prepend=True), model.register_forward_hook(end):
        yield found


@contextlib.contextmanager
def _never_run(model: nn.Module) -> Iterator[None]:
    """Refuse to run a part of the model meanwhile: it would count for the batch."""
    parts = set(model.modules())

    def refuse(module: nn.Module, _: Any) -> None:
        if module in parts:
            raise RuntimeError("a part of the model is called on its own")

    with nn.modules.module.register_module_forward_pre_hook(refuse):
        yield


def _by_rows(outputs: Any, rows: int) -> bool:
    sizes = list(_sizes(outputs))
    return bool(sizes) and all(size == rows for size in sizes)


def _sizes(value: Any) -> Iterator[int]:
    """The first dimensions of all tensors; 0 for a number."""
    if isinstance(value, torch.Tensor):
        yield len(value) if value.dim() else 0
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _sizes(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _sizes(part)
