"""The rule of a layer: runs the layer's calls, and says what its parameters' gradients are of."""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from dptrain.clipping.base.book import Book
from dptrain.clipping.base.products import multiplies_bfloat16
from dptrain.clipping.base.rows import UnclearRows, check_dense, is_dense, summing_dtype
from dptrain.clipping.bookkeeping.reporting import Report, Reported, ReportedRows
from dptrain.clipping.bookkeeping.rules.exchanged import Exchanged
from dptrain.clipping.bookkeeping.shared.row_plan import RowPlan
from dptrain.clipping.bookkeeping.shared.tracked import Tracked
from dptrain.clipping.bookkeeping.uses.use import Materialized, Use

Inputs = tuple[Any, ...]
Forward = Callable[..., Any]
Uses = Callable[[nn.Module, Inputs, torch.Tensor], Mapping[Any, Use]]
"""Function like ``LayerRule.uses``, by names, or by the parameters themselves."""

PerExampleGradients = Callable[[nn.Module, Inputs, torch.Tensor], Mapping[str, torch.Tensor]]


class LayerRule(abc.ABC):
    """Rule by which a layer type's gradients follow from its inputs and its output's gradient.

    Attributes:
        recurses: whether the rule also covers the parameters of the layer's children.
        arranges: whether it is there for what is called within, and covers no parameters.
        half: whether ``uses`` takes half precision as it is, and sums it in float32 itself.
        as_made: whether ``uses`` is given everything in the precision of the call.
        follows: whether operations are followed, in calls of other layers' within too.
        others: layers within, by their names, whose parameters this one uses past their own
            forward; ``None``: the rule knows of none such.
        plan: of the sizes that it meets, where it has one of its own.
    """

    recurses = False
    arranges = False
    half = False
    as_made = False
    follows = False
    others: dict[str, nn.Module] | None = None
    plan: RowPlan | None = None

    def holders(self, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Modules whose own parameters the rule covers, by their names in the layer."""
        if self.recurses:
            yield from layer.named_modules(remove_duplicate=False)
        else:
            yield "", layer

    def refusal(self, layer: nn.Module) -> str | None:
        """The reason that this very layer cannot be handled, or ``None``."""
        return None

    def keeps_inputs(self, layer: nn.Module) -> bool:
        """Tell whether ``uses`` looks at the inputs; they are not kept alive otherwise."""
        return True

    def again(self) -> LayerRule:
        """The rule to go on with where this one reported less than there is."""
        return self

    def run(self, observe: Observe, forward: Forward, args: Inputs, kwargs: dict[str, Any]) -> Any:
        """The layer's output for a call of it, with rows first wherever they are not shared.

        Args:
            observe: of the layer.
            forward: its own.
            args, kwargs: of the call.
        """
        if kwargs:
            bound = observe.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args, forward = bound.args, functools.partial(forward, **bound.kwargs)
        if observe.are_shared(args):
            return observe.shared.observed(observe, forward, args)
        if observe.has_rows_second(args):
            y = self.observed(observe, forward, (args[0].transpose(0, 1),)).transpose(0, 1)
            return y.contiguous()  # as the layer's own: some take a view of it
        return self.observed(observe, forward, one_row_each(args, self.second(observe.layer)))

    def observed(self, observe: Observe, forward: Forward, args: Inputs) -> Any:
        """``forward`` on what has its rows first, without the layer's own parameters."""
        for a in args:
            if isinstance(a, torch.Tensor) and not is_dense(a):
                check_dense(observe.called, *args)
        with observe.detached():
            try:
                return self.forward(observe.layer, forward, args, observe)
            except UnclearRows:
                if not observe.plan.tentative:  # these passes are to show what is shared
                    raise
                return forward(*args)

    def forward(self, layer: nn.Module, forward: Forward, inputs: Inputs, observe: Observe) -> Any:
        """The layer's output, observed; the covered parameters are detached during the call.

        Args:
            layer: the layer.
            forward: its own forward.
            inputs: all arguments of the call, in the order of the signature.
            observe: to be called with every output of what the parameters are used for. Each is
                observed with the uses of the parameters that made it, the trainable ones.
        """
        output = forward(*inputs)
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"{type(layer).__name__} returned a {type(output).__name__}: its rule supports "
                "only layers that return one tensor, unless the rule has its own forward()"
            )
        return observe(output, inputs, self._all_uses)

    def second(self, layer: nn.Module) -> Collection[int]:
        """Places of the arguments that have the rows in their second dimension."""
        return ()

    def alike(self, layer: nn.Module, dims: int) -> int:
        """Number of first dimensions of its only input that are nothing but positions to a layer.

        The layer computes the same for these in any order. So where the examples are in the second
        of several, it is run with them in the first.

        Args:
            layer: the layer.
            dims: of the input.
        """
        return 1

    def _all_uses(
        self, layer: nn.Module, inputs: Inputs, gradient: torch.Tensor
    ) -> Mapping[str, Use]:
        """The uses, which have to be there: a parameter that is left out would not be trained."""
        found = self.uses(layer, inputs, gradient)
        for name, p in layer._parameters.items():
            if p is not None and p.requires_grad and name not in found:
                raise RuntimeError(
                    f"the rule of {type(layer).__name__} returned no gradients of {name!r}"
                )
        return found

    @abc.abstractmethod
    def uses(self, layer: nn.Module, inputs: Inputs, gradient: torch.Tensor) -> Mapping[str, Use]:
        """The use of each trainable parameter that the layer owns, by its name.

        Args:
            layer: the layer; its parameters may be read.
            inputs: positional arguments of the call, detached; empty where none are kept. One row
                per example in the first dimension of each tensor.
            gradient: of the reduced loss by the layer's output, one row per example.
        """


class WeightRule(LayerRule):
    """A rule of which only the weight's gradient needs the inputs; a bias needs none."""

    def keeps_inputs(self, layer: nn.Module) -> bool:
        """Tell whether the weight is trained."""
        return bool(layer.weight.requires_grad)


class CallRule(LayerRule):
    """A rule that observes each output with uses of its own."""

    def uses(self, layer: nn.Module, inputs: Inputs, gradient: torch.Tensor) -> Mapping[str, Use]:
        """Not called: each use is known only by the output that it is observed with."""
        raise NotImplementedError


class GradientRule(LayerRule):
    """A rule that forms the per-example gradients of a layer.

    Args:
        per_example: from (layer, inputs, gradient), as in ``LayerRule.uses``, to gradients of
            shape (rows, *p.shape) by the parameters' names; frozen ones may be left out.
    """

    def __init__(self, per_example: PerExampleGradients) -> None:
        self.per_example = per_example

    @override
    def uses(self, layer: nn.Module, inputs: Inputs, gradient: torch.Tensor) -> Mapping[str, Use]:
        found = dict(self.per_example(layer, inputs, gradient))
        uses: dict[str, Use] = {}
        for name, p in layer.named_parameters(recurse=False):
            if not p.requires_grad:
                continue
            if name not in found:
                raise RuntimeError(
                    f"the rule of {type(layer).__name__} returned no per-example gradients of "
                    f"{name!r}"
                )
            expected = (len(gradient), *p.shape)
            if found[name].shape != expected:
                raise RuntimeError(
                    f"the rule of {type(layer).__name__} returned per-example gradients of "
                    f"{name!r} of shape {tuple(found[name].shape)}, expected {expected}"
                )
            uses[name] = Materialized(found[name].detach().to(gradient.dtype))
        return uses


class Observe:
    """Makes the gradient of an output known: the rule of one layer calls it with each.

    Autograd then propagates output gradients only; the weights' gradients are the book's to form.
    State lives in the autograd graph alone: a forward pass that is not followed by a backward pass
    leaves nothing behind, and checkpointing (which drops the graph's tensors) saves what it should.

    Args:
        shared: the rule of its calls on what all examples share.
        book: where gradients are reported to.
        anchor: a leaf that requires gradients and stands for the parameters in the graph.
        name: of the layer in the module, for messages.

    Attributes:
        layer, rule, shared, book: as given, or as exchanged since.
        called: the layer by its name and type, for messages.
        signature: of the layer's forward.
        plan: of the sizes that the layer meets.
        muted: calls under way of layers that see to this one's.
    """

    def __init__(
        self,
        layer: nn.Module,
        rule: LayerRule,
        shared: LayerRule,
        book: Book,
        anchor: torch.Tensor,
        name: str,
    ) -> None:
        self.layer, self.shared, self.book, self._anchor = layer, shared, book, anchor
        self.called = f"layer {name or '(the module itself)'!r}, a {type(layer).__name__}"
        self.signature = inspect.signature(layer.forward)
        self.plan, self.muted = RowPlan(), 0
        self.within: list[Observe] = []  # of layers whose parameters this one uses past them
        self.use(rule)

    def use(self, rule: LayerRule) -> None:
        """Go on with a rule, which may cover other parameters than it did before."""
        self.rule, self._holders = rule, list(rule.holders(self.layer))
        self._parameters = owned(self.layer, rule)
        self._keeps_inputs = rule.keeps_inputs(self.layer)

    def naming(self, error: UnclearRows) -> RuntimeError:
        """The error that says whose call it is of which rows are not clear."""
        return RuntimeError(f"{self.called}: {error}")

    def rows(self) -> int | None:
        """Rows that the model is fed; ``None`` without a batch."""
        return self.book.rows()

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trainable parameters that the rule is responsible for, by their names."""
        return self._parameters

    def detached(self) -> Exchanged:
        """A context in which the layer's parameters have no way back."""
        return Exchanged(self._holders)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Context without reports of the layers within whose uses this layer's rule finds."""
        for other in self.within:
            other.muted += 1
        try:
            yield
        finally:
            for other in self.within:
                other.muted -= 1

    def follow(self, name: str, holder: nn.Module, other: Observe | None) -> None:
        """Find also the uses of the parameters of another layer within, past its own forward."""
        others = self.rule.others
        assert others is not None
        others[name] = holder
        if other is not None and other is not self:
            self.within.append(other)
        self.use(self.rule)

    def guarded(self, why: str) -> Exchanged:
        """A context in which the layer's parameters have a way back that refuses every gradient."""

        def refuse(*_: Any) -> None:
            raise RuntimeError(why)

        def guard(name: str, p: nn.Parameter) -> torch.Tensor:
            value = p.detach()
            return (
                Reported.apply(value, self._anchor, refuse) if name in self._parameters else value
            )

        return Exchanged(self._holders, guard)

    def each(self, name: str, rows: int) -> torch.Tensor:
        """The layer's parameter with a row for each example, a view of shape (rows, *p.shape).

        What autograd finds for the rows of a trainable one are its per-example gradients, which are
        taken in as they are. For operations that cost the same with parameters an example.
        """
        parameter = getattr(self.layer, name).detach()
        if name not in self._parameters:
            return parameter.expand(rows, *parameter.shape)

        def taken(_: Any, gradient: torch.Tensor) -> dict[Any, Use]:
            return {name: Materialized(gradient.to(summing_dtype(gradient)))}

        several = self._factor(name, (rows, *parameter.shape), None)
        return ReportedRows.apply(parameter, self._anchor, self._reporting(taken, several), rows)

    def __call__(
        self,
        output: torch.Tensor,
        inputs: Sequence[Any],
        uses: Uses,
        *,
        factor: int | None = None,
        shared: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """The output to go on with, of which the gradient is taken.

        Args:
            output: one row per example, or a fixed number of them one after the other.
            inputs: what ``uses`` is given, if the rule keeps inputs.
            uses: as ``LayerRule.uses``, called in the backward pass.
            factor: rows of the output an example, where the rule knows.
            shared: tensors that the gradients depend on and that no example may move.
        """
        if factor is None and not self._keeps_inputs:  # a rule, not operations of a shared call
            inputs = ()
        rule, rest = self.rule, list(inputs)
        places: list[int] = []
        for k, x in enumerate(rest):
            if isinstance(x, torch.Tensor):
                places.append(k)
                rest[k] = None
        tensors = [inputs[k].detach() for k in places]

        def taken(saved: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> dict[Any, Use]:
            given = list(rest)
            if not (rule.as_made or (rule.half and multiplies_bfloat16(gradient))):
                # Half precision would round norms and sums past R; see summing_dtype.
                gradient = gradient.to(summing_dtype(gradient))
            for k, x in zip(places, saved, strict=True):
                as_it_is = rule.as_made or not x.is_floating_point()
                given[k] = x if as_it_is else x.to(gradient.dtype)
            return dict(uses(self.layer, tuple(given), gradient))

        several = self._factor("output", output.shape, factor)
        report = self._reporting(taken, several, shared)
        return Reported.apply(output, self._anchor, report, *tensors)

    def _reporting(
        self,
        taken: Callable[[tuple[torch.Tensor, ...], torch.Tensor], dict[Any, Use]],
        several: int,
        shared: Sequence[torch.Tensor] = (),
    ) -> Report:
        """The report of a call that is being made, in its backward pass.

        Args:
            taken: from what was kept and the gradient to uses, by names or parameters.
            several: rows of the gradient an example.
        """
        since, doubt = self.book.at_hand(), self.book.doubt(self.layer)

        def recorded(saved: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> None:
            found = taken(saved, gradient)
            # A rule that observes several outputs has uses of some of the parameters in
            # each, and what has been frozen since the run was made takes no part.
            here: dict[nn.Parameter, Use] = {}
            for name, use in found.items():
                p = self._parameters.get(name) if type(name) is str else name
                if p is not None and (p is name or p.requires_grad):
                    fold = several > 1 and use.rows == gradient.shape[0]
                    here[p] = use.folded(several) if fold else use
            self.book.record(here, since, doubt)

        def report(saved: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> None:
            seen, whole = (gradient, *saved), shared
            if several > 1:
                seen = _apart(seen, several)
            if shared:  # no row is any example's
                whole = [constant[None] for constant in shared]
            if self.book.saw(self.layer, (*seen[1:], *whole), seen[0]):
                return
            try:
                if torch.is_autocast_enabled(gradient.device.type):
                    with torch.autocast(gradient.device.type, enabled=False):
                        recorded(saved, gradient)
                else:
                    recorded(saved, gradient)
            except UnclearRows as error:
                raise self.naming(error) from error

        return self._unseen(report)

    def _unseen(self, report: Report) -> Report:
        """The report, without the trace that follows the step, where one does."""

        def unseen(saved: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> None:
            aside = self.book.unseen()
            if aside is None:
                report(saved, gradient)
            else:
                with aside:
                    report(saved, gradient)

        return unseen

    def idly(self, forward: Forward, args: Inputs, kwargs: dict[str, Any]) -> Any:
        """The layer's output for rows of which nothing is made, so that no rule has to fit."""
        since = self.book.at_hand()

        def seen(_: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> None:
            if not self.book.saw(self.layer, (), gradient):
                self.book.record({}, since)  # refuses it, as another batch is there now

        report = self._unseen(seen)

        def observed(y: torch.Tensor) -> torch.Tensor:
            return Reported.apply(y, self._anchor, report) if y.is_floating_point() else y

        with self.detached():
            return tree_map_only(torch.Tensor, observed, forward(*args, **kwargs))

    def are_shared(self, args: Inputs) -> bool:
        """Tell whether all examples share all arguments, as passes over few rows showed.

        Without such, ids of an embedding may show it.
        """
        rows = self.book.rows()
        if rows is None:
            return False
        inputs: list[tuple[Hashable, torch.Tensor, tuple[int, ...]]]
        if len(args) == 1 and type(args[0]) is torch.Tensor:  # as most calls are
            inputs = [(("input", 0, args[0].dim()), args[0], tuple(args[0].shape))]
        else:
            inputs = list(_inputs(args))
        factors = [self._input_factor(*each, rows) for each in inputs]
        if isinstance(self.layer, nn.Embedding) and factors == [None] and not self.plan.watching:
            ((place, ids, shape),) = inputs
            return are_shared(ids, rows, stayed=self.plan.stayed_once(place, shape, rows))
        if not inputs or any(factor != 0 for factor in factors):
            return False
        return not any(a.requires_grad and not isinstance(a, Tracked) for _, a, _ in inputs)

    def _input_factor(
        self, place: Hashable, a: torch.Tensor, shape: tuple[int, ...], rows: int
    ) -> int | None:
        """Rows of an input for each of the batch's, as ``RowPlan.factor`` has it."""
        if isinstance(a, Tracked) or not shape:
            return 0
        factor = self.plan.factor(place, shape, rows)
        # A value computed with parameters that is not tracked is the examples'. Of a single row
        # both would be that one's.
        if rows > 1 and self.plan.ambiguous(place, shape, rows) and not a.requires_grad:
            raise RuntimeError(
                f"{self.called}, is called on a tensor of shape {shape} in a batch of {rows} "
                "rows. Earlier calls of this layer were on rows of the batch and also on a "
                "tensor that all examples share, so this call may be either. Give the shared "
                "tensor one row per example (x.expand(rows, ...)), or choose another batch size"
            )
        return factor

    def has_rows_second(self, args: Inputs) -> bool:
        """Tell whether the layer's only input has the examples second, where they may be."""
        (x, *others) = args or (None,)
        if others or not isinstance(x, torch.Tensor) or isinstance(x, Tracked) or x.dim() < 2:
            return False
        dims = x.dim()
        return self.plan.second(("input", 0, dims)) and self.rule.alike(self.layer, dims) > 1

    def _factor(self, place: str, shape: tuple[int, ...], factor: int | None) -> int:
        """Rows of an output for each of the batch's."""
        rows = self.book.rows()
        if rows is None or not shape:
            return 1
        if factor is None:
            factor = self.plan.factor(place, shape, rows)
            unseen = not self.plan.watching and self.plan.unseen(place, shape, rows)
            if unseen and shape[0] == rows > 1:  # other numbers are refused as they are
                raise RuntimeError(
                    f"{self.called}: it returns {shape[0]} rows in a batch of {rows}, and returned "
                    "another number of rows per example before, so its rows cannot be assigned to "
                    "examples (a mask may have selected tokens, for instance). Call it on all "
                    "positions of every example, and mask the unwanted results afterwards"
                )
        return factor if factor is not None and factor > 1 and factor * rows == shape[0] else 1


def owned(layer: nn.Module, rule: LayerRule | None) -> dict[str, nn.Parameter]:
    """Trainable parameters that a layer's rule is responsible for, by their names in the layer."""
    holders = [("", layer)] if rule is None else list(rule.holders(layer))
    return {
        f"{prefix}.{name}" if prefix else name: p
        for prefix, holder in holders
        for name, p in holder._parameters.items()
        if p is not None and p.requires_grad
    }


def one_row_each(args: Inputs, second: Container[int] = ()) -> Inputs:
    """Arguments in which what all examples share has a row for each of them.

    Args:
        second: places of those that have the rows in their second dimension.
    """

    for value in args:
        if isinstance(value, Tracked | tuple | list):
            break
    else:
        return args

    def each(value: Any, place: int) -> Any:
        if isinstance(value, Tracked):
            if place in second:
                return value.session.each_second(value)
            return value.session.each_row(value, 1, value.dim())
        if isinstance(value, tuple | list) and any(isinstance(v, Tracked) for v in value):
            return type(value)(each(v, place) for v in value)
        return value

    return tuple(each(a, k) for k, a in enumerate(args))


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


def _apart(tensors: Sequence[torch.Tensor], several: int) -> tuple[torch.Tensor, ...]:
    """Tensors with the rows of an example in a dimension of their own."""
    if several == 1:
        return tuple(tensors)
    rows = len(tensors[0])
    return tuple(
        t.unflatten(0, (rows // several, several)) if t.dim() and len(t) == rows else t
        for t in tensors
    )


def are_shared(ids: torch.Tensor, rows: int, *, stayed: bool = False) -> bool:
    """True if all examples share these ids, where no passes over few rows have shown it.

    Args:
        stayed: whether there were as many for another number of rows.
    """
    if ids.dim() and len(ids) == rows:
        if rows == 1 or not (stayed or ids.dim() == 1):
            return False
        raise UnclearRows(
            f"it looks up ids of shape {tuple(ids.shape)} in a batch of {rows} rows, which may "
            "be positions that all examples share or one id per example. Give shared positions "
            "the shape (1, positions), and ids of the examples the shape (rows, 1)"
        )
    if _like_positions(ids):
        return True
    raise UnclearRows(
        f"it looks up ids of shape {tuple(ids.shape)} in a batch of {rows} rows. They are "
        "neither consecutive, as positions are, nor all equal, so they may belong to the "
        "examples. Put the examples in the first dimension, and repeat shared ids for each row "
        "(ids.expand(rows, ...))"
    )


def _like_positions(ids: torch.Tensor) -> bool:
    """True if ids follow one another, either way, or are all the same."""
    steps = ids.flatten().diff()
    return bool(((steps == steps[:1]) & (steps.abs() <= 1)).all())
