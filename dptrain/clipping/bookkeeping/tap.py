"""The place where output gradients are read: a layer's forward without its own parameters."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from dptrain.clipping.base.precision import without_autocast
from dptrain.clipping.base.products import multiplies_bfloat16
from dptrain.clipping.base.rows import UnclearRows, check_dense, is_dense, summing_dtype
from dptrain.clipping.base.stand_in import StandIn
from dptrain.clipping.base.untapped import is_untapped
from dptrain.clipping.bookkeeping.operations import OperationsRule, RowPlan, Tracked, Unhandled
from dptrain.clipping.bookkeeping.replay_costs import Replays
from dptrain.clipping.bookkeeping.rules.generic import GenericRule
from dptrain.clipping.bookkeeping.rules.rules import (
    Exchanged,
    LayerRule,
    Uses,
    detached,
    owned,
    rule_of,
)
from dptrain.clipping.bookkeeping.rules.shared_ids import are_shared
from dptrain.clipping.bookkeeping.uses.uses import Materialized, Use


class Book(Protocol):
    """What taps report to."""

    def rows(self) -> int | None:
        """Rows that the model sees of the batch at hand; ``None`` without a batch."""

    def idle(self) -> bool:
        """Whether the batch at hand has no examples, so that nothing is to be made of its rows."""

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

    def hidden(self) -> None:
        """Know that a layer ran without gradients: a backward pass may run it again with them."""

    def replays(self, rule: Replays) -> None:
        """Know that this rule, of one layer, ran its layer again."""

    def unseen(self) -> contextlib.AbstractContextManager[Any]:
        """A context for what is done in a backward pass, and is no part of the user's program."""

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
        name: of the layer in the module, for messages.
    """

    def __init__(
        self,
        layer: nn.Module,
        rule: LayerRule,
        book: Book,
        anchor: torch.Tensor,
        name: str = "",
    ) -> None:
        self.layer, self.rule, self.book, self.anchor = layer, rule, book, anchor
        self.name = name
        self.muted = 0  # calls under way of layers that see to this one's
        self._within: list[LayerTap] = []  # of layers whose parameters this one uses past them
        self.parameters = owned(layer, rule)
        self._holders = list(rule.holders(layer))
        self.keeps_inputs = rule.keeps_inputs(layer)
        self._embeds = isinstance(layer, nn.Embedding) and rule_of(layer) is rule
        self._plan = RowPlan()
        self._shared = OperationsRule(layer, name, shared=rule)  # calls on what examples share
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

    @property
    def called(self) -> str:
        """The layer by its name and type, for messages."""
        return f"layer {self.name or '(the module itself)'!r}, a {type(self.layer).__name__}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output, as its rule forms it where gradients are wanted."""
        if not torch.is_grad_enabled() or is_untapped():
            self.book.hidden()
            return self.own(*args, **kwargs)
        if self.muted:  # the rule of what this is within finds what the call comes to
            return self.own(*args, **kwargs)
        if not self.book.idle():
            return self._followed(args, kwargs)
        if self.book.at_hand() is not None:
            return self._idly(args, kwargs)
        try:  # between batches, for per_example_norms()
            return self._followed(args, kwargs)
        except RuntimeError:  # no rule fits; an error of the layer itself comes again
            return self._idly(args, kwargs)

    def _followed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's output, of which what a rule finds is reported on the way back."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                f"{self.called}, is called within torch.func (vmap, grad, jvp or the like), where "
                "a layer cannot be seen to have a row for each example: call it on the whole "
                "batch, or use its parameters there without it "
                "(torch.vmap(lambda row: row @ self.weight)(x))"
            )
        forward, rule = self.own, self.rule
        if isinstance(rule, OperationsRule):
            try:
                return self._run_by(rule, functools.partial(forward, **kwargs), args)
            except Unhandled as error:
                if error.layer is not self.layer or (error.of_rows and rule.plan.settled):
                    raise
            if rule.plan.tentative:
                with detached(self._holders):
                    return forward(*args, **kwargs)
            self.run_again()
            rule = self.rule
        if isinstance(rule, GenericRule):
            with detached(self._holders), self._alone():
                args = _one_row_each(args)
                return rule.call(self.layer, forward, args, kwargs, self._observer)
        if kwargs:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
            if bound.kwargs:
                forward = functools.partial(forward, **bound.kwargs)
        try:
            if self._is_shared(args):
                return self._run_by(self._shared, forward, args)
        except UnclearRows as error:
            raise RuntimeError(f"{self.called}: {error}") from error
        if self._has_rows_second(rule, args):
            y = self._run_by(rule, forward, (args[0].transpose(0, 1),)).transpose(0, 1)
            return y.contiguous()  # as the layer's own: some take a view of it
        return self._run_by(rule, forward, _one_row_each(args, rule.second(self.layer)))

    def _idly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's output for rows of which nothing is made, so that no rule has to fit."""

        since = self.book.at_hand()

        def report(_: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> None:
            with self.book.unseen():
                if not self.book.saw(self.layer, (), gradient):
                    self.book.record({}, since)  # refuses it, as another batch is there now

        def observed(y: torch.Tensor) -> torch.Tensor:
            return _Tap.apply(y, self.anchor, report) if y.is_floating_point() else y

        with detached(self._holders):
            return tree_map_only(torch.Tensor, observed, self.own(*args, **kwargs))

    def _run_by(self, rule: LayerRule, forward: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if not all(is_dense(a) for a in args if isinstance(a, torch.Tensor)):
            check_dense(self.called, *args)
        try:
            with detached(self._holders):
                try:
                    return rule.forward(self.layer, forward, args, self._observer)
                except UnclearRows:
                    if not self._plan.tentative:  # these passes are to show what is shared
                        raise
                    return forward(*args)
        except UnclearRows as error:
            raise RuntimeError(f"{self.called}: {error}") from error

    def run_again(self) -> None:
        """Have the layer run again for each example: its operations cannot be followed."""
        others = self.rule.others if isinstance(self.rule, OperationsRule) else {}
        self.rule = GenericRule(self.rule.name or "(the module itself)", others)
        self._changed()

    def _changed(self) -> None:
        """The rule is another, or covers other parameters."""
        self.parameters = owned(self.layer, self.rule)
        self._holders = list(self.rule.holders(self.layer))
        self.keeps_inputs = self.rule.keeps_inputs(self.layer)

    def follow(self, name: str, holder: nn.Module, tap: LayerTap | None) -> None:
        """Find also the uses of the parameters of another layer within, past its own forward.

        Args:
            name: of that layer within this one.
            holder: that layer.
            tap: its own, where it has one.
        """
        rule = self.rule
        assert isinstance(rule, OperationsRule | GenericRule)
        rule.others[name] = holder
        if tap is not None and tap is not self:
            self._within.append(tap)
        self._changed()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Without the reports of layers of which a replay has all that is made of them."""
        for tap in self._within:
            tap.muted += 1
        try:
            yield
        finally:
            for tap in self._within:
                tap.muted -= 1

    def watch(self, *, anew: bool) -> None:
        """From now on, in passes over few rows, note what follows them; see ``RowPlan.watch``."""
        for plan in self._plans():
            plan.watch(anew=anew)

    def settle(self) -> None:
        """Tell from what was noted how the layer is used."""
        for plan in self._plans():
            plan.settle()

    def known(self) -> tuple[Any, ...]:
        """What such passes have shown so far."""
        return type(self.rule), *(plan.state() for plan in self._plans())

    def _plans(self) -> list[RowPlan]:
        own = [self.rule.plan] if isinstance(self.rule, OperationsRule) else []
        return [self._plan, self._shared.plan, *own]

    def _is_shared(self, args: tuple[Any, ...]) -> bool:
        """Whether all examples share what the layer is called on, as passes over few rows showed.

        Without such, ids of an embedding may show it.
        """
        rows = self.book.rows()
        if rows is None:
            return False
        inputs = list(_inputs(args))
        factors = [self._input_factor(*each, rows) for each in inputs]
        if self._embeds and factors == [None] and not self._plan.watching:
            ((place, ids, shape),) = inputs
            return are_shared(ids, rows, stayed=self._plan.stayed_once(place, shape, rows))
        if not inputs or any(factor != 0 for factor in factors):
            return False
        return not any(a.requires_grad and not isinstance(a, Tracked) for _, a, _ in inputs)

    def _input_factor(
        self, place: Hashable, a: torch.Tensor, shape: tuple[int, ...], rows: int
    ) -> int | None:
        """Rows of an input for each of the batch's, as ``RowPlan.factor`` has it."""
        if isinstance(a, Tracked) or not shape:
            return 0
        factor = self._plan.factor(place, shape, rows)
        # What was computed with parameters, and is not tracked, is the examples'. Of a single row
        # both would be that one's.
        if rows > 1 and self._plan.ambiguous(place, shape, rows) and not a.requires_grad:
            raise RuntimeError(
                f"{self.called}, is called on a tensor of shape {shape} in a batch of {rows} rows, "
                "and was called on rows of the batch as well as on what all examples share before: "
                "this may be either. Give what they share a row for each of them "
                "(x.expand(rows, ...)), or have the batch another size"
            )
        return factor

    def _has_rows_second(self, rule: LayerRule, args: tuple[Any, ...]) -> bool:
        """Whether the examples are in the second dimension of a layer's only input, and may be."""
        (x, *others) = args or (None,)
        if others or not isinstance(x, torch.Tensor) or isinstance(x, Tracked) or x.dim() < 2:
            return False
        return rule.alike(self.layer, x.dim()) > 1 and self._plan.second(("input", 0, x.dim()))

    def _factor(self, place: str, shape: tuple[int, ...], factor: int | None) -> int:
        """Rows of an output for each of the batch's."""
        rows = self.book.rows()
        if rows is None or not shape:
            return 1
        if factor is None:
            factor = self._plan.factor(place, shape, rows)
            unseen = not self._plan.watching and self._plan.unseen(place, shape, rows)
            if unseen and shape[0] == rows > 1:  # other numbers are refused as they are
                raise RuntimeError(
                    f"{self.called}: it has a result of {shape[0]} rows in a batch of {rows}, and "
                    "had another number of rows for each example before, so that nothing says "
                    "whose these are (tokens that were picked by a mask, say): call it on all "
                    "positions of every example, and mask what does not count afterwards"
                )
        return factor if factor is not None and factor > 1 and factor * rows == shape[0] else 1

    def observe(
        self,
        output: torch.Tensor,
        inputs: Sequence[Any],
        uses: Uses,
        *,
        factor: int | None = None,
        shared: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """What a rule calls as ``Observe``: the output, with its gradient read on the way back."""
        if factor is None:  # a rule, not the operations of a shared call
            inputs = inputs if self.keeps_inputs else ()
        places = [k for k, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        rest = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        tensors = [inputs[k].detach() for k in places]
        since, doubt = self.book.at_hand(), self.book.doubt(self.layer)
        several = self._factor("output", output.shape, factor)

        def report(saved: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> None:
            with self.book.unseen():
                seen = _apart((gradient, *saved), several)
                # Of these no row is any example's.
                whole = [constant[None] for constant in shared]
                if self.book.saw(self.layer, (*seen[1:], *whole), seen[0]):
                    return
                try:
                    self._report(uses, rest, places, saved, gradient, since, doubt, several)
                except UnclearRows as error:
                    raise RuntimeError(f"{self.called}: {error}") from error

        return _Tap.apply(output, self.anchor, report, *tensors)

    def guarded(self, why: str) -> Exchanged:
        """What a rule calls as ``Observe.guarded``."""

        def refuse(*_: Any) -> None:
            raise RuntimeError(why)

        def guard(name: str, p: nn.Parameter) -> torch.Tensor:
            value = p.detach()
            return _Tap.apply(value, self.anchor, refuse) if name in self.parameters else value

        return Exchanged(self._holders, guard)

    def each(self, name: str, rows: int) -> torch.Tensor:
        """What a rule calls as ``Observe.each``: the parameter, once for every row."""
        parameter = getattr(self.layer, name).detach()
        if name not in self.parameters:
            return parameter.expand(rows, *parameter.shape)
        since, p = self.book.at_hand(), self.parameters[name]
        doubt = self.book.doubt(self.layer)
        several = self._factor(name, (rows, *parameter.shape), None)

        def report(_: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> None:
            with self.book.unseen():
                if self.book.saw(self.layer, (), *_apart((gradient,), several)):
                    return
                if p.requires_grad:  # it may have been frozen since
                    use: Use = Materialized(gradient.to(summing_dtype(gradient)))
                    use = use.folded(several) if several > 1 else use
                    self.book.record({p: use}, since, doubt)

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
        several: int,
    ) -> None:
        inputs = list(rest)
        found: dict[Any, Use]
        if isinstance(self.rule, GenericRule):  # which needs the call as it was made
            for k, value in zip(places, saved, strict=True):
                inputs[k] = value
            found = dict(uses(self.layer, tuple(inputs), gradient))
            self.book.replays(self.rule)
            self.book.record({self.parameters[n]: use for n, use in found.items()}, since, doubt)
            return
        if not (self.rule.half and multiplies_bfloat16(gradient)):
            # Half precision would round norms and sums past R; see summing_dtype.
            gradient = gradient.to(summing_dtype(gradient))
        for k, value in zip(places, saved, strict=True):
            inputs[k] = value.to(gradient.dtype) if value.is_floating_point() else value
        with without_autocast(gradient.device.type):
            found = dict(uses(self.layer, tuple(inputs), gradient))
            # A rule that observes several outputs has uses of some of the parameters in each, and
            # what has been frozen since the run was made takes no part.
            trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
            here = {p: found[name] for name, p in trained.items() if name in found}
            here |= {p: use for p, use in found.items() if isinstance(p, nn.Parameter)}
            for p, use in here.items():
                if several > 1 and use.rows == len(gradient):
                    here[p] = use.folded(several)
            self.book.record(here, since, doubt)


class _Observer:
    """What a tap lets a rule do."""

    def __init__(self, tap: LayerTap) -> None:
        self._tap = tap

    def __call__(
        self,
        output: torch.Tensor,
        inputs: Sequence[Any],
        uses: Uses,
        *,
        factor: int | None = None,
        shared: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        return self._tap.observe(output, inputs, uses, factor=factor, shared=shared)

    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._tap.parameters

    def rows(self) -> int | None:
        return self._tap.book.rows()

    def each(self, name: str, rows: int) -> torch.Tensor:
        return self._tap.each(name, rows)

    def guarded(self, why: str) -> Exchanged:
        return self._tap.guarded(why)


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


def _inputs(
    args: Sequence[Any], within: tuple[Hashable, ...] = ("input",)
) -> Iterator[tuple[Hashable, torch.Tensor, tuple[int, ...]]]:
    """The tensors of a call, with their places and shapes; of packed sequences by number first."""
    for k, a in enumerate(args):
        if isinstance(a, PackedSequence):
            shape = int(a.batch_sizes[0]), *a.data.shape
            yield (*within, k, len(shape)), a.data, shape
        elif isinstance(a, torch.Tensor):
            yield (*within, k, a.dim()), a, tuple(a.shape)
        elif isinstance(a, tuple | list):
            yield from _inputs(a, (*within, k))


def _one_row_each(args: tuple[Any, ...], second: Container[int] = ()) -> tuple[Any, ...]:
    """Arguments in which what all examples share has a row for each of them.

    Args:
        args: of a call.
        second: places of those that have the rows in their second dimension.
    """

    def each(value: Any, place: int) -> Any:
        if isinstance(value, Tracked):
            if place in second:
                return value.session.each_second(value)
            return value.session.each_row(value, 1, value.dim())
        if isinstance(value, tuple | list) and any(isinstance(v, Tracked) for v in value):
            return type(value)(each(v, place) for v in value)
        return value

    return tuple(each(a, k) for k, a in enumerate(args))


def _apart(tensors: Sequence[torch.Tensor], several: int) -> tuple[torch.Tensor, ...]:
    """Tensors with the rows of an example in a dimension of their own."""
    if several == 1:
        return tuple(tensors)
    rows = len(tensors[0])
    return tuple(
        t.unflatten(0, (rows // several, several)) if t.dim() and len(t) == rows else t
        for t in tensors
    )
