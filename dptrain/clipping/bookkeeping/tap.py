"""The place where output gradients are read: a layer's forward without its own parameters."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from typing_extensions import override

from dptrain.clipping.base.rows import summing_dtype
from dptrain.clipping.base.stand_in import StandIn
from dptrain.clipping.bookkeeping.replay_costs import Replays
from dptrain.clipping.bookkeeping.rules.generic import GenericRule, replaying
from dptrain.clipping.bookkeeping.rules.rules import LayerRule, Uses, owned
from dptrain.clipping.bookkeeping.rules.shared_rows import SharedRows
from dptrain.clipping.bookkeeping.uses.uses import Materialized, Use


class Book(Protocol):
    """What taps report to."""

    def rows(self) -> int | None:
        """Rows that the model sees of the batch at hand; ``None`` without a batch."""

    def at_hand(self) -> Any:
        """What a backward pass has to find as its forward pass did: the batch, or ``None``."""

    def record(
        self, uses: Mapping[nn.Parameter, Use], since: Any, doubt: str | None = None
    ) -> None:
        """Take in uses of parameters by a layer that ran when ``since`` was at hand.

        With a doubt, refuse them, at the latest for that.
        """

    def discard(self) -> None:
        """Forget what was recorded of the batch at hand."""

    def replays(self, rule: Replays) -> None:
        """Know that this rule, of one layer, ran its layer again."""

    def doubt(self, layer: nn.Module) -> str | None:
        """What speaks against gradients of a call that is being made, for ``record``."""

    def saw(self, layer: nn.Module, inputs: Sequence[Any], gradient: torch.Tensor) -> bool:
        """Look at a call of a layer before uses are made of it; whether none are to be made."""


class LayerTap(StandIn):
    """Stands in for ``layer.forward``: parameters detached, the output's gradient reported.

    Autograd then propagates output gradients only; the weights' gradients are the book's to form.
    State lives in the autograd graph alone: a forward pass that is not followed by a backward pass
    leaves nothing behind, and checkpointing (which drops the graph's tensors) saves what it should.
    Copies of the layer have its own forward again and report nothing (``StandIn``).

    Args:
        layer: has a rule.
        rule: its rule.
        book: where gradients are reported to.
        anchor: a leaf that requires gradients and stands for the parameters in the graph.
    """

    def __init__(self, layer: nn.Module, rule: LayerRule, book: Book, anchor: torch.Tensor) -> None:
        self.layer, self.rule, self.book, self.anchor = layer, rule, book, anchor
        self.parameters = owned(layer, rule)
        self._holders = list(rule.holders(layer))
        self.keeps_inputs = rule.keeps_inputs(layer)
        embeds = isinstance(layer, nn.Embedding) and not isinstance(rule, GenericRule)
        self.sharing = SharedRows() if embeds else None
        self._observer = _Observer(self)
        super().__init__(layer, "forward")
        self._signature = inspect.signature(self.own)
        # A compiled graph would run the bookkeeping once, when it is traced.
        self._run = torch.compiler.disable(self.forward)

    @override
    def run(self, *args: Any, **kwargs: Any) -> Any:
        # Leaving a trace takes 50 µs also where there is none.
        run = self._run if torch.compiler.is_compiling() else self.forward
        return run(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output, as its rule forms it where gradients are wanted."""
        if not torch.is_grad_enabled() or replaying():
            return self.own(*args, **kwargs)
        forward, rule = self.own, self.rule
        if isinstance(rule, GenericRule):
            with Detached(self._holders):
                return rule.call(self.layer, forward, args, kwargs, self._observer)
        if kwargs:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
            if bound.kwargs:
                forward = functools.partial(forward, **bound.kwargs)
        with Detached(self._holders):
            return rule.forward(self.layer, forward, args, self._observer)

    def observe(self, output: torch.Tensor, inputs: Sequence[Any], uses: Uses) -> torch.Tensor:
        """What a rule calls as ``Observe``: the output, with its gradient read on the way back."""
        if self.sharing is not None:
            output = self.sharing.one_row_each(inputs[0], output, self.book.rows())
        inputs = self.rule.kept(inputs) if self.keeps_inputs else ()
        places = [k for k, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        rest = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        tensors = [inputs[k].detach() for k in places]
        since, doubt = self.book.at_hand(), self.book.doubt(self.layer)

        def report(saved: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> None:
            if not self.book.saw(self.layer, saved, gradient):
                self._report(uses, rest, places, saved, gradient, since, doubt)

        return _Tap.apply(output, self.anchor, report, *tensors)

    def each(self, name: str, rows: int) -> torch.Tensor:
        """What a rule calls as ``Observe.each``: the parameter, once for every row."""
        parameter = getattr(self.layer, name).detach()
        if name not in self.parameters:
            return parameter.expand(rows, *parameter.shape)
        since, p = self.book.at_hand(), self.parameters[name]
        doubt = self.book.doubt(self.layer)

        def report(_: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> None:
            if self.book.saw(self.layer, (), gradient):
                return
            if p.requires_grad:  # it may have been frozen since
                rows = gradient.to(summing_dtype(gradient))
                self.book.record({p: Materialized(rows)}, since, doubt)

        return _Each.apply(parameter, self.anchor, report, rows)

    def _report(
        self,
        uses: Uses,
        rest: list[Any],
        places: list[int],
        saved: tuple[torch.Tensor, ...],
        gradient: torch.Tensor,
        since: Any,
        doubt: str | None,
    ) -> None:
        inputs = list(rest)
        if isinstance(self.rule, GenericRule):  # which needs the call as it was made
            for k, value in zip(places, saved, strict=True):
                inputs[k] = value
            found = uses(self.layer, tuple(inputs), gradient)
            self.book.replays(self.rule)
            self.book.record({self.parameters[n]: use for n, use in found.items()}, since, doubt)
            return
        # Half precision would round norms and sums past R; see summing_dtype.
        gradient = gradient.to(summing_dtype(gradient))
        for k, value in zip(places, saved, strict=True):
            kept = value.to(gradient.dtype) if value.is_floating_point() else value
            if len(kept) == 1 != len(gradient):  # one row for all, see SharedRows
                kept = kept.expand(len(gradient), *kept.shape[1:])
            inputs[k] = kept
        with _full_precision(gradient.device.type):
            found = uses(self.layer, tuple(inputs), gradient)
            # A rule that observes several outputs has uses of some of the parameters in each, and
            # what has been frozen since the run was made takes no part.
            trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
            here = {p: found[name] for name, p in trained.items() if name in found}
            self.book.record(here, since, doubt)


def _full_precision(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Outside ``torch.autocast``, also where backward() is called within it."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


class _Observer:
    """What a tap lets a rule do."""

    def __init__(self, tap: LayerTap) -> None:
        self._tap = tap

    def __call__(self, output: torch.Tensor, inputs: Sequence[Any], uses: Uses) -> torch.Tensor:
        return self._tap.observe(output, inputs, uses)

    def rows(self) -> int | None:
        return self._tap.book.rows()

    def each(self, name: str, rows: int) -> torch.Tensor:
        return self._tap.each(name, rows)


class _Tap(torch.autograd.Function):
    """The identity; its backward pass reports the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        anchor: torch.Tensor,
        report: Callable[[tuple[torch.Tensor, ...], torch.Tensor], None],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.report = report
        ctx.save_for_backward(*tensors)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        _report(ctx, saved, gradient)
        passed = gradient if ctx.needs_input_grad[0] else None
        return (passed, None, None, *[None] * len(saved))


class _Each(torch.autograd.Function):
    """A parameter with a row for each example; the backward pass reports the rows' gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        parameter: torch.Tensor,
        anchor: torch.Tensor,
        report: Callable[[tuple[torch.Tensor, ...], torch.Tensor], None],
        rows: int,
    ) -> torch.Tensor:
        ctx.report = report
        return parameter.expand(rows, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        _report(ctx, (), gradient)
        return None, None, None, None


def _report(ctx: Any, saved: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: Gradients(mode='bookkeeping') does not see what a gradient "
            "penalty, or another derivative of a gradient, does with the parameters; leave it "
            "out, or estimate it by a difference of two forward passes"
        )
    # torch.autograd.grad by an input (for adversarial examples, say) is not about parameters: the
    # leaf that stands for them is not asked for then.
    if torch._C._will_engine_execute_node(ctx.next_functions[1][0]):
        ctx.report(saved, gradient)


class Detached:
    """Modules with their own parameters detached, within the context."""

    def __init__(self, holders: Iterable[tuple[str, nn.Module]]) -> None:
        # The attributes themselves: nn.Module looks at each that is set, for longer than all of
        # this takes.
        self._kept = [(own, own["_parameters"]) for own in (vars(m) for _, m in holders)]

    def __enter__(self) -> None:
        for attributes, parameters in self._kept:
            attributes["_parameters"] = {
                name: None if p is None else p.detach() for name, p in parameters.items()
            }

    def __exit__(self, *_: object) -> None:
        for attributes, parameters in self._kept:
            attributes["_parameters"] = parameters
