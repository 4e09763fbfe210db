"""The rule of layers without one: their own forward, run again for each example."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from dptrain.clipping.base.rows import HALF, summing_dtype
from dptrain.clipping.base.stand_in import untapped
from dptrain.clipping.bookkeeping.copies import Copies
from dptrain.clipping.bookkeeping.replay_costs import Replays
from dptrain.clipping.bookkeeping.rules.exchanged import Exchanged, not_called, uncached
from dptrain.clipping.bookkeeping.rules.rule import (
    CallRule,
    Forward,
    Inputs,
    Observe,
    one_row_each,
    owned,
)
from dptrain.clipping.bookkeeping.uses.replayed import Parts, Replay
from dptrain.clipping.bookkeeping.uses.use import Materialized, Use
from dptrain.clipping.probe import attributes, eagerly, untouched
from dptrain.core import (
    global_state,
    named_error,
    restore_global_state,
    same_global_state,
    wait_for,
)

_MEMORY = {"cpu": 2**26}  # bytes that the rows of one replay may take
_DEVICE_MEMORY = 2**28
_DEPTH = 4  # of objects within what a layer returns
_KEPT = 2**24  # numbers of a call's per-example gradients that are kept; more are found twice

# Distance allowed between outputs of a replay and of the forward pass, relative to their length.
# Other kernels, and other orders of addition, stay far below; other random numbers do not.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
_TOLERANCE_HALF = 0.1
_TOLERANCE_RANDOM = 1e-4  # to believe that vmap drew the very numbers of the forward pass

_REMEDY = (
    "Register a rule for it with dptrain.register_layer(), or freeze it with requires_grad_(False)"
)


class UnknownRule(CallRule):
    """A rule of one layer that has none, for whatever it does."""

    def __init__(self, name: str = "", others: Mapping[str, nn.Module] | None = None) -> None:
        self.name = name
        self.others: dict[str, nn.Module] = dict(others or {})

    @override
    def holders(self, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield from not_called("", layer)  # the layer, and what holds parameters for it
        yield from self.others.items()

    def past_their_own(self) -> str:
        """Words that name the inner layers whose parameters this layer uses; empty if none."""
        if not self.others:
            return ""
        some = " and ".join(repr(name) for name in list(self.others)[:3])
        more = f" and of {len(self.others) - 3} more layers" if len(self.others) > 3 else ""
        return f" that uses parameters of {some}{more} within it without calling them"


class GenericRule(UnknownRule):
    """Any layer: its forward is run again on each example (docs/theory/clipping.md#thm-replay).

    In the backward pass the vector-Jacobian product of the layer with the gradients of its outputs
    is formed row by row: for many rows at once by ``torch.func.vmap``, where vmap refuses in a
    loop. The layers within are run along, as constants; their own rules had their uses already.

    In the forward pass the layer runs twice. Of the first call come the tensors that it returns
    with a row for each example, in tuples, dictionaries or attributes of objects, without a way
    back to its parameters. The second leaves everything else, attributes for instance, with a way
    back on which a gradient is refused: none is lost.

    Args that have as many entries in the first dimension as the batch has rows are taken for the
    examples'; all others are given to each replay whole. A replay has to come to the outputs that
    the forward pass had: a layer that mixes its rows, keeps a state of its own, or draws random
    numbers that torch's, numpy's and Python's global generators do not know of, is refused. Where
    random numbers were drawn for the batch as a whole, the batch as a whole is run again, and one
    backward pass is made for each row.

    All that is made of the ``others`` within it is then this rule's to find.
    """

    as_made = True

    def __init__(self, name: str = "", others: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__(name, others)
        self.costs = Replays(name)
        self._plans: dict[Any, _Plan] = {}
        self._writes: bool | None = None
        self._signs: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    @override
    def refusal(self, layer: nn.Module) -> str | None:
        if isinstance(layer, nn.RNNBase):  # its kernels take weights from a list of its own
            kind = type(layer).__name__
            return f"{kind} has no rule (in hooks mode, opacus.layers.DP{kind} computes the same)"
        return None

    # -- the forward pass --------------------------------------------------------------------------

    @override
    def run(self, observe: Observe, forward: Forward, args: Inputs, kwargs: dict[str, Any]) -> Any:
        with observe.detached(), observe.alone():
            return self._call(observe, forward, one_row_each(args), kwargs)

    def _call(
        self, observe: Observe, forward: Forward, args: Inputs, kwargs: dict[str, Any]
    ) -> Any:
        """The layer's output, every tensor in it observed."""
        layer = observe.layer
        self.costs.kind = type(layer).__name__
        inputs = _tensors_of((args, kwargs), self._refuse_opaque)
        versions = [x._version for x in inputs]
        kept = [x.detach() if self._writes is False else x.detach().clone() for x in inputs]
        state = global_state()
        alone = args, kwargs
        if self._writes is not False:
            alone = _mapped(alone, torch.Tensor, torch.clone)
        with untouched(layer):  # a call that leaves nothing but what it returns
            found = _tensors_of(forward(*alone[0], **alone[1]), objects=_DEPTH)
        random = not same_global_state(state, global_state())
        if random:
            restore_global_state(state)
        with observe.guarded(self._escaped(layer)):
            returned = forward(*args, **kwargs)
        self._note_writes([x._version for x in inputs] != versions)
        _tensors_of((args, kwargs), self._refuse_opaque)  # a cache may have been empty before
        passed = [] if self._writes else inputs
        left = _tensors_of(returned, objects=_DEPTH)
        if [y.shape for y in left] != [y.shape for y in found]:
            raise RuntimeError(
                f"{self._called(layer)} returned other tensors when it was called a second time "
                "under the same conditions, so its per-example gradients cannot be computed. "
                f"Let it keep no state outside itself. {_REMEDY}"
            )
        places = [
            k
            for k, y in enumerate(left)
            if y.is_floating_point() and not any(y is x for x in passed)
        ]
        rows = observe.rows()
        if rows is None:
            rows = next((len(found[k]) for k in places if found[k].dim()), 0)
        by_rows = [x.dim() > 0 and len(x) == rows for x in inputs]
        places = [k for k in places if found[k].dim() and len(found[k]) == rows]
        if places:
            call = _Call(
                rule=self,
                layer=layer,
                forward=forward,
                rebuild=functools.partial(_rebuilt, _structure((args, kwargs))),
                outputs=functools.partial(_chosen, places=places),
                by_rows=by_rows,
                state=state if random else None,
                autocast=_autocast(found[places[0]].device.type),
                marks=[self._mark(found[k].detach()) for k in places],
                writes=bool(self._writes),
            )
            observed = self._observed(call, [found[k] for k in places], kept, observe)
            for k, y in zip(places, observed, strict=True):
                left[k] = y
        given = iter(left)
        return _mapped(returned, torch.Tensor, lambda _: next(given), objects=_DEPTH)

    def _observed(
        self, call: _Call, outputs: list[torch.Tensor], inputs: list[torch.Tensor], observe: Observe
    ) -> list[torch.Tensor]:
        """The outputs with their gradients read, all of one call together."""
        shapes = [y.shape[1:] for y in outputs]
        types = [y.dtype for y in outputs]
        sizes = [shape.numel() for shape in shapes]

        def uses(_: nn.Module, inputs: Inputs, gradient: torch.Tensor) -> Mapping[str, Use]:
            parts = [gradient]
            if len(shapes) > 1:
                parts = [
                    part.unflatten(1, shape) if len(shape) else part[:, 0]
                    for part, shape in zip(gradient.split(sizes, dim=1), shapes, strict=True)
                ]
            given = [part.to(kind) for part, kind in zip(parts, types, strict=True)]
            found = self._replayed(dataclasses.replace(call, inputs=list(inputs), gradients=given))
            observe.book.replays(self.costs)
            return found

        if len(outputs) == 1:
            return [observe(outputs[0], inputs, uses)]
        wide = functools.reduce(torch.promote_types, types)
        joint = torch.cat([y.reshape(len(y), -1).to(wide) for y in outputs], dim=1)
        split = observe(joint, inputs, uses).split(sizes, dim=1)
        return [
            y.reshape(-1, *shape).to(t) for y, shape, t in zip(split, shapes, types, strict=True)
        ]

    def _escaped(self, layer: nn.Module) -> str:
        """The message for a gradient that arrives otherwise than through the outputs' rows."""
        return (
            f"a gradient reached the parameters of {self._called(layer)} by a path other than "
            "its returned tensors with one row per example: through an output of another shape, "
            "an attribute, or an object that hides its tensors. Return every output from "
            "forward() with the examples in the first dimension (x.expand(rows, ...) for one "
            "that all share), as a tensor or in a tuple, a dictionary or an attribute of an "
            f"object. {_REMEDY}"
        )

    def _note_writes(self, wrote: bool) -> None:
        if wrote and self._writes is False:
            self._writes = True
            raise RuntimeError(
                f"layer {self.name!r} writes into its arguments in some calls and did not in its "
                f"first: let it write into a copy. {_REMEDY}"
            )
        self._writes = self._writes or wrote

    def _refuse_opaque(self, value: Any) -> None:
        if _holds_tensors(value):
            raise RuntimeError(
                f"layer {self.name!r} has no rule for per-example gradients and is called with a "
                f"{type(value).__name__}, whose tensors cannot be assigned to examples. Pass "
                f"tensors instead (for a key-value cache: use_cache=False). {_REMEDY}"
            )

    def _mark(self, y: torch.Tensor) -> torch.Tensor:
        """A few numbers of each row, shape (rows, 2): ⟨y, random signs⟩ and ‖y‖."""
        y = y.reshape(len(y), -1)
        y = y.to(summing_dtype(y))
        key = y.shape[1], y.dtype, y.device
        if key not in self._signs:
            generator = torch.Generator().manual_seed(0)
            signs = torch.randint(0, 2, (y.shape[1],), generator=generator) * 2 - 1
            self._signs[key] = signs.to(y)
        return torch.stack([y @ self._signs[key], y.norm(dim=1)], dim=1)

    def _called(self, layer: nn.Module) -> str:
        uses = self.past_their_own()
        return f"layer {self.name!r}, a {type(layer).__name__} without a rule{uses},"

    # -- the backward pass -------------------------------------------------------------------------

    def _replayed(self, run: _Call) -> Mapping[str, Use]:
        """The uses of a call, by the parameters' names."""
        self.costs.before = self.costs.seconds
        shapes = {name: p.shape for name, p in run.parameters.items()}
        rows = run.rows
        plan = self._plan(run) if rows else _Plan(1, "loop")
        parts = functools.partial(self._timed, run, plan)
        found: dict[str, Use]
        if rows * sum(shape.numel() for shape in shapes.values()) > _KEPT:
            run.keep()  # for the second time
            found = Replay(parts, shapes, rows).uses()
        else:
            whole = {
                name: p.new_empty(rows, *p.shape, dtype=summing_dtype(p))
                for name, p in run.parameters.items()
            }
            for first, last, part in parts(0, rows):
                for name, g in part.items():
                    whole[name][first:last] = g
            found = {name: Materialized(g, own=True) for name, g in whole.items()}
        return found

    def _timed(self, run: _Call, plan: _Plan, first: int, last: int) -> Parts:
        """The parts of a run, adding to the costs."""
        start = self._now(run.gradients[0])
        yield from run.parts(plan, first, last)
        self.costs.seconds += self._now(run.gradients[0]) - start

    def _plan(self, run: _Call) -> _Plan:
        key = (
            *[(x.shape[by:], x.dtype) for x, by in run.pairs()],
            run.rows if run.random else 0,  # which numbers are whose
            run.random,
            run.autocast,
            run.layer.training,
        )
        if key not in self._plans:
            self._plans[key] = run.plan()
        return self._plans[key]

    def _now(self, tensor: torch.Tensor) -> float:
        """The time, when all that was asked of the device is done, as long as times are wanted."""
        if self.costs.timed:
            wait_for(tensor.device)
        return time.perf_counter()


@dataclasses.dataclass
class _Plan:
    """The way in which calls on tensors of certain shapes are replayed.

    Attributes:
        rows: at a time.
        way: ``"vmap"``, ``"loop"``, or ``"whole"``: the whole batch is run again as it was, and
            each row's gradients are found by a backward pass.
    """

    rows: int
    way: str


@dataclasses.dataclass
class _Call:
    """One call of a layer, to be run again in the backward pass.

    Attributes:
        forward: its own.
        rebuild: positional and keyword arguments, from the tensors in them.
        outputs: from what the layer returned to the tensors that are observed.
        by_rows: which of the tensors have a row for each example.
        state: of all random generators before the call, if it moved one of them.
        autocast: device type, dtype and whether it was on.
        marks: of each output that is observed, what a replay is held against.
        writes: whether the call writes into its arguments.
        inputs: the tensors among the arguments.
        gradients: of the outputs that were observed.
    """

    rule: GenericRule
    layer: nn.Module
    forward: Forward
    rebuild: Callable[[Sequence[torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    outputs: Callable[[Any], list[torch.Tensor]]
    by_rows: list[bool]
    state: dict[str, Any] | None
    autocast: tuple[str, torch.dtype, bool]
    marks: list[torch.Tensor]
    writes: bool
    inputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    gradients: list[torch.Tensor] = dataclasses.field(default_factory=list)

    @property
    def rows(self) -> int:
        """Number of rows of the batch."""
        return len(self.gradients[0])

    @functools.cached_property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The layer's trainable parameters, by their names there."""
        return {n: p.detach() for n, p in owned(self.layer, self.rule).items()}

    @property
    def random(self) -> bool:
        """True if the call drew random numbers."""
        return self.state is not None

    def keep(self) -> None:
        """Hold copies of what others may write into, see ``Use.keep``."""
        copy = Copies()
        self.inputs = [copy(x) for x in self.inputs]
        self.gradients = [copy(g) for g in self.gradients]

    def plan(self) -> _Plan:
        """Number of rows that fit at once, and the way to try first."""
        if self.random:
            return _Plan(self.rows, "vmap")
        counted = _Memory()
        try:
            with self._again(), torch.no_grad(), counted:
                self._outputs(self.parameters, self._row(0))
        except Exception as error:
            raise self._failure(error) from error
        gradients = sum(p.numel() * p.element_size() for p in self.parameters.values())
        memory = _MEMORY.get(self.gradients[0].device.type, _DEVICE_MEMORY)
        return _Plan(max(1, memory // max(1, counted.bytes + 2 * gradients)), "vmap")

    def parts(self, plan: _Plan, first: int, last: int) -> Parts:
        """Per-example gradients, a few rows at a time; ``first`` and ``last`` as in ``Replay``."""
        if plan.way == "vmap":
            start = stop = first - first % plan.rows
            for start in range(stop, last, plan.rows):
                stop = min(self.rows, start + plan.rows)
                found = self._by_vmap(plan, start, stop)
                if found is None:
                    break
                yield start, stop, found
            else:
                return
            first = start
        step = plan.rows if plan.way == "loop" else max(1, self.rows)
        way = self._by_loop if plan.way == "loop" else self._by_whole
        for start in range(first - first % step, last, step):
            stop = min(self.rows, start + step)
            yield start, stop, way(start, stop)

    def _by_vmap(self, plan: _Plan, start: int, stop: int) -> Mapping[str, torch.Tensor] | None:
        """Gradients of the rows; ``None`` where vmap refuses, and the plan says so from then on."""

        def one(
            gradients: list[torch.Tensor], rows: list[torch.Tensor]
        ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
            def outputs(parameters: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
                return tuple(self._outputs(parameters, self._with(rows)))

            pulled: Any = torch.func.vjp(outputs, self.parameters)
            y, back = pulled
            (found,) = back(tuple(g[None] for g in gradients))
            return found, list(y)

        other = "loop"
        try:
            with self._again(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of operations that vmap does one by one
                found, outputs = torch.func.vmap(one, randomness="different")(
                    [g[start:stop] for g in self.gradients],
                    [x[start:stop].clone() for x, by in self.pairs() if by],
                )
            if not self.random or self._off(outputs, start, stop) <= _TOLERANCE_RANDOM:
                self._check([y[:, 0] for y in outputs], start, stop)
                return {n: g.to(summing_dtype(g)) for n, g in found.items()}
        except _Differs:
            raise
        except Exception:
            pass
        plan.way = "whole" if self.random else other
        return None

    def _by_loop(self, start: int, stop: int) -> Mapping[str, torch.Tensor]:
        found: dict[str, list[torch.Tensor]] = {name: [] for name in self.parameters}
        for i in range(start, stop):
            parameters = self._leaves()
            try:
                with self._again(), torch.enable_grad():
                    y = self._outputs(parameters, self._row(i))
                    gradients = _gradients(y, parameters, [g[i : i + 1] for g in self.gradients])
            except Exception as error:
                raise self._failure(error) from error
            self._check(y, i, i + 1)
            for name, g in gradients.items():
                found[name].append(g.to(summing_dtype(g)))
        return {name: torch.stack(rows) for name, rows in found.items()}

    def _by_whole(self, start: int, stop: int) -> Mapping[str, torch.Tensor]:
        """Gradients by one forward pass over the batch, and a backward pass for each row of it."""
        parameters = self._leaves()
        rows: list[dict[str, torch.Tensor]] = []
        try:
            with self._again(), torch.enable_grad():
                y = self._outputs(parameters, list(map(self._fresh, self.inputs)))
                rows += [_gradients(y, parameters, self._only(i)) for i in range(start, stop)]
            for k, found in enumerate(rows):
                if not all(bool(g.isfinite().all()) for g in found.values()):
                    rows[k] = self._in_every_row(start + k)
        except Exception as error:
            raise self._failure(error) from error
        self._check(y, 0, self.rows)
        return {
            name: torch.stack([g[name].to(summing_dtype(g[name])) for g in rows])
            for name in parameters
        }

    def _in_every_row(self, i: int) -> dict[str, torch.Tensor]:
        """Row i's gradients from a batch that holds its inputs in the place of all others'.

        Another row that is not finite has a gradient of zero, and 0 · NaN is NaN: in a sum over all
        rows, one such example would take every other's contribution away.
        """
        parameters = self._leaves()
        inputs = [x[i : i + 1].expand_as(x).clone() if by else x for x, by in self.pairs()]
        with self._again(), torch.enable_grad():
            y = self._outputs(parameters, [self._fresh(x) for x in inputs])
            return _gradients(y, parameters, self._only(i))

    def _only(self, i: int) -> list[torch.Tensor]:
        """The gradients of the outputs, those of all rows but one set to zero."""
        only = [torch.zeros_like(g) for g in self.gradients]
        for g, whole in zip(only, self.gradients, strict=True):
            g[i] = whole[i]
        return only

    # -- running the layer -------------------------------------------------------------------------

    def pairs(self) -> Iterator[tuple[torch.Tensor, bool]]:
        """The tensors of the call, and whether they have a row for each example."""
        return zip(self.inputs, self.by_rows, strict=True)

    def _row(self, i: int) -> list[torch.Tensor]:
        """The inputs of example i alone, in a batch of one."""
        return [self._fresh(x[i : i + 1] if by else x) for x, by in self.pairs()]

    def _fresh(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone() if self.writes else x

    def _with(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs of one example within vmap."""
        given = iter(rows)
        return [next(given)[None] if by else self._fresh(x) for x, by in self.pairs()]

    def _leaves(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().requires_grad_() for n, p in self.parameters.items()}

    def _outputs(
        self, parameters: Mapping[str, torch.Tensor], inputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        args, kwargs = self.rebuild(inputs)
        with Exchanged(self.layer.named_modules(), lambda n, p: parameters.get(n, p.detach())):
            return self.outputs(self.forward(*args, **kwargs))

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        """Context with generators and autocast as in the forward pass; as now after it."""
        device, dtype, on = self.autocast
        state = None if self.state is None else global_state()
        try:
            if self.state is not None:
                restore_global_state(self.state)
            with (
                uncached(),
                untapped(),
                untouched(self.layer),
                eagerly(list(self.layer.modules())),
                torch.autocast(device, dtype=dtype, enabled=on, cache_enabled=False),
            ):
                yield
        finally:
            if state is not None:
                restore_global_state(state)

    # -- whether it is the same --------------------------------------------------------------------

    def _off(self, outputs: Sequence[torch.Tensor], start: int, stop: int) -> float:
        """Distance of outputs from the forward pass's, relative to their length; the worst row."""
        worst = 0.0
        for y, mark in zip(outputs, self.marks, strict=True):
            here = mark[start:stop]
            again = self.rule._mark(y.detach().reshape(stop - start, -1))
            length = torch.maximum(here[:, 1], again[:, 1])
            off = (again - here).abs().amax(1) / length.clamp(min=1e-30)
            broken = here.isnan().any(1) | here.isinf().any(1)
            same = again.isfinite().all(1) == ~broken
            off = torch.where(broken, torch.zeros_like(off), off)
            off = torch.where(same, off, torch.full_like(off, torch.inf))
            worst = max(worst, float(off.amax())) if len(off) else worst
        return worst

    def _check(self, outputs: Sequence[torch.Tensor], start: int, stop: int) -> None:
        """Refuse a replay that does not come to what the forward pass did."""
        for y, g in zip(outputs, self.gradients, strict=True):
            if y.shape[1:] != g.shape[1:] or len(y) != stop - start:
                raise _Differs(
                    f"{self.rule._called(self.layer)} returns a tensor of shape {tuple(y.shape)} "
                    f"for {stop - start} rows and {tuple(g.shape)} for {self.rows}: give every "
                    f"output one row per example in its first dimension. {_REMEDY}"
                )
        half = self.autocast[2] or any(g.dtype in HALF for g in self.gradients)
        limit = _TOLERANCE_HALF if half else _TOLERANCE[summing_dtype(self.gradients[0])]
        if self._off(outputs, start, stop) > limit:
            raise _Differs(
                f"{self.rule._called(self.layer)} returned other outputs when it was evaluated "
                "on one example at a time. It mixes the examples, keeps a state that the call "
                "changed, draws random numbers from a generator of its own, or takes an "
                "argument that all examples share and that happens to have as many rows as the "
                f"batch. {_REMEDY}"
            )

    def _failure(self, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"{self.rule._called(self.layer)} cannot be evaluated on one example alone, which "
            f"its per-example gradients require ({named_error(error)}). {_REMEDY}"
        )


class _Differs(RuntimeError):
    """A replay that did not come to what the forward pass did."""


class _Memory(TorchDispatchMode):
    """Counts the bytes of all results of operations: what a backward pass may keep of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.bytes += sum(y.numel() * y.element_size() for y in _tensors_of(found))
        return found


def _gradients(
    outputs: Sequence[torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    gradients: Sequence[torch.Tensor],
) -> dict[str, torch.Tensor]:
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    if not pairs:
        return {n: torch.zeros_like(p) for n, p in parameters.items()}
    found = torch.autograd.grad(
        [y for y, _ in pairs],
        list(parameters.values()),
        [g.view_as(y) for y, g in pairs],
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(parameters, found, strict=True))


def _mapped(
    value: Any,
    kind: type,
    change: Callable[[Any], Any],
    other: Callable[[Any], None] | None = None,
    objects: int = 0,
) -> Any:
    """``change`` applied to what is of a kind in tuples, lists, mappings and dataclasses, in order.

    Nothing that is given is changed; ``other`` is called with whatever else there is. So many
    objects within one another are looked into as well.
    """
    if isinstance(value, kind):
        return change(value)
    again = functools.partial(_mapped, kind=kind, change=change, other=other, objects=objects)
    if isinstance(value, tuple):
        items = [again(item) for item in value]
        if all(item is before for item, before in zip(items, value, strict=True)):
            return value  # a torch.Size, say
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [again(item) for item in value]
    if isinstance(value, MutableMapping):  # also what Hugging Face's models return
        clone = copy.copy(value)
        for key, item in value.items():
            clone[key] = again(item)
        return clone
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        record: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(record, field.name, again(getattr(value, field.name)))
        return record
    if objects and _holds_tensors(value, objects):
        thing = copy.copy(value)
        for name in attributes(value):
            item = _mapped(getattr(value, name), kind, change, other, objects - 1)
            object.__setattr__(thing, name, item)
        return thing
    if other is not None:
        other(value)
    return value


def _tensors_of(
    value: Any, other: Callable[[Any], None] | None = None, objects: int = 0
) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _mapped(value, torch.Tensor, note, other, objects)
    return found


class _Place:
    """Stands for the k-th tensor of a structure."""

    def __init__(self, k: int) -> None:
        self.k = k


def _structure(value: Any) -> Any:
    """The value without its tensors, which are autograd's to keep, or a checkpoint's to drop."""
    count = itertools.count()
    return _mapped(value, torch.Tensor, lambda _: _Place(next(count)))


def _rebuilt(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    return _mapped(structure, _Place, lambda place: tensors[place.k])


def _chosen(returned: Any, places: Sequence[int]) -> list[torch.Tensor]:
    found = _tensors_of(returned, objects=_DEPTH)
    return [found[k] for k in places]


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    """True if an object has tensors in its attributes."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, list | tuple):
        return any(_holds_tensors(item, depth) for item in value)
    if isinstance(value, Mapping):
        return any(_holds_tensors(item, depth) for item in value.values())
    if not depth or isinstance(value, type | nn.Module):
        return False
    return any(_holds_tensors(getattr(value, n), depth - 1) for n in attributes(value))


def _autocast(device: str) -> tuple[str, torch.dtype, bool]:
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
