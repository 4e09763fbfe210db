"""One call of a layer whose parameters are followed from operation to operation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dptrain.clipping.bookkeeping.operations.direct import (
    COPIES,
    DIRECT,
    SAME_ROWS,
    looked_up,
    only_looked_at,
    others_only_looked_at,
    replayed,
)
from dptrain.clipping.bookkeeping.operations.operation import Operation, Unhandled
from dptrain.clipping.bookkeeping.rules.rule import Observe
from dptrain.clipping.bookkeeping.shared.row_plan import NEITHER, RowPlan
from dptrain.clipping.bookkeeping.shared.tracked import Root, Tracked, track
from dptrain.clipping.bookkeeping.uses.use import Materialized, Use

Found = dict[nn.Parameter, Use]


class LayerSession:
    """One call of a layer with tracked parameters, and all that is done with what it returns.

    Args:
        rows: that the model is fed.
        users: which layers' parameters it uses past their own forward, for messages.

    Attributes:
        without_rows: whether no tensor at hand has rows of the batch.
        written: what was written into tracked tensors, of roots and of constants: all that are
            views of the same memory have it.
    """

    without_rows = False

    def __init__(self, observe: Observe, plan: RowPlan, rows: int, users: str = "") -> None:
        self.observe, self.plan, self.rows, self.users = observe, plan, rows, users
        self.written: tuple[list[Root], list[torch.Tensor]] = [], []

    def parameter(self, p: nn.Parameter) -> torch.Tensor:
        """A parameter of the layer as its forward is to see it."""
        if not p.requires_grad:
            return p.detach()
        view = p.view_as(p)
        return track(view, self, [Root.of(view, p)], whole=True)

    def operate(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The operation's result, with whatever gradients it leads to observed."""
        leaves, spec = tree_flatten((args, kwargs))
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tracked)]
        by_others = places[0] > 0 and others_only_looked_at(func)
        if not torch.is_grad_enabled() or only_looked_at(func) or by_others:
            for k in places:
                leaves[k] = leaves[k].detach()
            args, kwargs = tree_unflatten(leaves, spec)
            return func(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise self.refusal(func, "is called within torch.func (vmap, grad, jvp or similar)")
        factors: dict[int, int] = {}
        name = getattr(func, "__name__", "")
        looked_at = places[0] == 0 and others_only_looked_at(func)
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and k not in places and not looked_at:
                factors[k] = self._factor((name, k), leaf)
        if any(isinstance(leaf, torch.Tensor) and leaf.is_complex() for leaf in leaves):
            raise self.refusal(func, "is made of complex numbers")
        op = Operation(self, func, leaves, spec, places, factors)
        if not any(factors.values()):
            return self._without_rows(op, name)
        if NEITHER in factors.values():
            refusal = self.refusal(
                func, "uses a tensor that has no row for each example in its first dimension"
            )
            refusal.of_rows = True
            raise refusal
        handler = DIRECT.get(func)
        found = NotImplemented if handler is None else handler(op)
        if found is NotImplemented:
            found = replayed(op)
        return found

    def _factor(self, place: tuple[Any, ...], leaf: torch.Tensor) -> int:
        """Rows of a tensor that each row of the batch has; 0 for a constant."""
        if not leaf.dim():
            return NEITHER if leaf.requires_grad else 0
        if self.without_rows:
            return NEITHER if leaf.requires_grad else 0
        factor = self.plan.factor((*place, leaf.dim()), leaf.shape, self.rows)
        if factor is None:
            factor = int(len(leaf) == self.rows)
            if self.plan.watching and leaf.requires_grad and not len(leaf) % self.rows:
                factor = len(leaf) // self.rows
        # A value computed from the batch that has no rows mixes the examples.
        return NEITHER if not factor and leaf.requires_grad else factor

    def _without_rows(self, op: Operation, name: str) -> Any:
        """Result of tracked tensors and constants, tracked unless it has a row for each example."""
        used = [op.leaves[k] for k in op.places if op.leaves[k].used]
        versions = [op.leaves[k]._version for k in op.places]
        roots, constants, table = op.roots, op.constants, looked_up(op)
        with _kept():  # a gradient by this is taken in the backward pass, see pulled()
            if table is None:
                result = op.func(*op.args, **op.kwargs)
            else:  # of a view of its own, see Root
                place, ids, padding = table
                (p,) = (root.parameter for root in roots)
                result = op.run({place: p.view_as(p)})
                roots = [Root.looked_up(result, p, ids, padding)]
        after = [op.leaves[k]._version for k in op.places]
        changed = (k for k, a, b in zip(op.places, versions, after, strict=True) if a != b)
        written = [op.leaves[k] for k in changed]
        if any(tracked is one for tracked in written for one in used):
            raise self.refusal(
                op.func, "modifies in place what was already combined with the batch"
            )
        for tracked in written:
            for into, more in zip(tracked.session.written, (roots, constants), strict=True):
                into += more
        found, spec = tree_flatten(result)
        for k, value in enumerate(found):
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                continue
            if isinstance(value, Tracked):  # the very argument
                continue
            tracked = track(value, self, roots, constants=constants)
            if op.func in SAME_ROWS:
                tracked.repeats = op.repeats_second(value)
            elif op.func in COPIES:
                tracked.repeats = op.leaves[op.places[0]].still_repeats
            factor: int | None = 0
            if value.dim() and not self.without_rows:
                factor = self.plan.factor((name, "result", k, value.dim()), value.shape, self.rows)
            if factor is None:
                factor = int(op.func in SAME_ROWS and len(value) == self.rows)
            tracked.second = factor == NEITHER and tracked.repeats and value.shape[1] == self.rows
            if not factor or tracked.second:
                found[k] = tracked
            elif factor > 0 and op.func in SAME_ROWS and op.repeats_one_row(value):
                first = track(value[:1], self, roots, constants=constants)
                copies = self.each_row(first, factor, value.dim())
                # Copies that torch has written out may be viewed in ways that one row cannot.
                found[k] = copies.contiguous() if value.is_contiguous() else copies
            elif factor > 1 and op.tiles(value, factor):
                first = track(value[:factor][None], self, roots, constants=constants)
                found[k] = self.each_row(first, 1, value.dim() + 1).flatten(0, 1)
            else:
                raise self.refusal(op.func, "makes a row for each example from a parameter")
        return tree_unflatten(found, spec)

    def each_row(self, tracked: Tracked, factor: int, dims: int) -> torch.Tensor:
        """A tracked tensor with a copy for every row, to meet tensors of so many dimensions."""
        shape = tuple(tracked.shape)
        first_is_free = len(shape) < dims or (len(shape) == dims and shape[0] == 1)
        if not first_is_free or (tracked.second and self.rows > 1):
            raise self.refusal(torch.Tensor.expand, f"gives shape {shape} to every example")
        tracked.used = True
        inner = shape[1:] if len(shape) == dims else (1,) * (dims - 1 - len(shape)) + shape
        rows = factor * self.rows

        def uses(_: nn.Module, __: tuple[Any, ...], gradient: torch.Tensor) -> Found:
            return self.pulled(tracked, gradient.reshape(rows, *shape))

        copies = tracked.detach().reshape(1, *inner).expand(rows, *inner)
        shared = [*tracked.constants, *tracked.session.written[1]]
        return self.observe(copies, (), uses, factor=factor, shared=shared)

    def each_second(self, tracked: Tracked) -> torch.Tensor:
        """A tracked tensor whose second dimension is to have the rows, with a copy for each."""
        shape = tuple(tracked.shape)
        if not tracked.still_repeats or shape[1] != self.rows:
            raise self.refusal(
                torch.Tensor.expand, f"gives shape {shape} to examples in the second dimension"
            )
        with torch._C.DisableTorchFunctionSubclass():
            first = tracked.select(1, 0)
        own = track(first, self, tracked.roots, constants=tracked.constants)
        return self.each_row(own, 1, len(shape)).transpose(0, 1)

    def pulled(self, tracked: Tracked, gradients: torch.Tensor) -> Found:
        """Gradients of a tracked tensor's parameters, from its own, which are one a row."""
        if tracked.whole:
            (root,) = tracked.roots
            return {root.parameter: root.use(gradients)}
        roots = list(dict.fromkeys([*tracked.roots, *tracked.session.written[0]]))
        with torch._C.DisableTorchFunctionSubclass():
            pulled = torch.autograd.grad(
                tracked,
                [root.edge for root in roots],
                gradients.to(tracked.dtype),
                is_grads_batched=True,
                retain_graph=True,
                allow_unused=True,
            )
        found: Found = {}
        for root, g in zip(roots, pulled, strict=True):
            if g is not None:
                _add(found, root.parameter, root.use(g))
        return found

    def observed(
        self, op: Operation, output: torch.Tensor, kept: Sequence[torch.Tensor], uses: Any
    ) -> torch.Tensor:
        """The output of an operation on rows, with the uses of its tracked tensors.

        Args:
            output: with rows first.
            kept: tensors that ``uses`` is given, by rows.
            uses: from (kept, gradient) to a use for each tracked tensor, by its place.
        """

        sources = {k: op.leaves[k] for k in op.places}
        for tracked in sources.values():
            tracked.used = True

        def by_root(_: nn.Module, saved: tuple[Any, ...], gradient: torch.Tensor) -> Found:
            found: Found = {}
            for place, use in uses(saved, gradient).items():
                tracked = sources[place]
                parts: Found = {tracked.roots[0].parameter: use}
                if not tracked.whole:
                    parts = self.pulled(tracked, use.per_example(0, use.rows))
                for p, part in parts.items():
                    _add(found, p, part)
            return found

        written = [c for k in op.places for c in op.leaves[k].session.written[1]]
        factor, shared = op.factor, [*op.constants, *written]
        op.forget_rows()
        if len(output) != factor * self.rows:
            raise self.refusal(op.func, "returns no row for each example in the first dimension")
        return self.observe(output, kept, by_root, factor=factor, shared=shared)

    def refusal(self, func: Callable[..., Any], what: str) -> Unhandled:
        """The error that says why an operation cannot be followed."""
        operation = getattr(func, "__name__", repr(func))
        found = Unhandled(
            f"{self.observe.called}{self.users}: its operation {operation!r} {what}, so "
            "per-example gradients of its parameters cannot be computed. Register a rule for "
            "the layer with dptrain.register_layer(), or freeze its parameters with "
            "requires_grad_(False)"
        )
        found.layer = self.observe.layer
        return found


def _kept() -> contextlib.AbstractContextManager[Any]:
    """Make autograd itself keep the tensors that it saves, within a checkpoint too.

    A checkpoint would run its function again for it, within the backward pass of what that
    function's first run had reported.
    """
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _add(found: Found, p: nn.Parameter, use: Use) -> None:
    """Add one more use of a parameter to those that are there."""
    if p in found:
        one = found[p]
        merged = one.merged(use) or use.merged(one)
        use = merged or Materialized(one.per_example(0, one.rows) + use.per_example(0, use.rows))
    found[p] = use
