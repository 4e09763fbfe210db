"""A recurrence as one operation of autograd, whose signal has the gradients of the gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dptrain.clipping.base.precision import without_autocast
from dptrain.clipping.base.rows import summing_dtype
from dptrain.clipping.bookkeeping.recurrent.cells import Cell, Trace, Weights
from dptrain.clipping.bookkeeping.recurrent.steps import Steps

_WEIGHTS = len(Weights._fields)


def recurrence(
    cell: Cell,
    x: torch.Tensor,
    weights: Weights,
    initial: Sequence[torch.Tensor],
    steps: Steps,
    observe: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The states after each step, flat, and the last ones, of one direction of one layer.

    What is observed is not the output: it is a tensor of zeros, the signal, whose gradient is said
    to be that of the gates. With it come the inputs and the states that steps start from, which are
    known once the recurrence has run.

    Half precision is computed with in float32.

    Args:
        x: flat.
        weights: detached.
        initial: hidden states, shape (rows, outputs), and those of cells, (rows, hidden); none: 0.
        observe: what the signal goes through, with x, the states before each step and what is
            projected, if anything is; all by rows. Its gradient is what ``Cell.uses`` is given.

    Returns:
        Shape (numbers of steps, outputs); (rows, outputs); and (rows, hidden) of an LSTM's cells.
    """
    dtype = torch.promote_types(summing_dtype(x), summing_dtype(weights.ih))
    weights = Weights._make(None if w is None else w.to(dtype) for w in weights)
    with torch.no_grad(), without_autocast(x.device.type):
        flat = x.detach().to(dtype)
        if not initial:
            initial = [flat.new_zeros(steps.rows, width) for width in cell.states(weights)]
        initial = [state.to(dtype) for state in initial]
        first = [state.detach() for state in initial]
        trace = cell.run(flat, weights, (first[0], first[1] if first[1:] else None), steps)
        before = [flat, steps.before(trace.hidden), trace.projected]
        inputs = [steps.by_rows(t) for t in before if t is not None]
    numbers = cell.numbers(weights)
    zeros = flat.new_zeros(()).expand(steps.rows, steps.longest, numbers)
    signal = observe(zeros, inputs)
    hidden, cells = initial[0], initial[1] if initial[1:] else None
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] = _Recurrence.apply(
        signal, x, hidden, cells, cell, steps, *weights, *trace.all()
    )
    return found


class _Recurrence(torch.autograd.Function):
    """Returns what a recurrence went through; its backward pass goes back through that."""

    @staticmethod
    def forward(
        ctx: Any,
        signal: torch.Tensor,
        x: torch.Tensor,
        hidden: torch.Tensor,
        cells: torch.Tensor | None,
        cell: Cell,
        steps: Steps,
        *tensors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        ctx.cell, ctx.steps = cell, steps
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        trace = Trace.of(tensors[_WEIGHTS:])
        states = steps.after(trace.hidden)
        last = None if trace.cell is None else steps.last(steps.after(trace.cell)).detach()
        return states.detach(), steps.last(states).detach(), last

    @staticmethod
    def backward(ctx: Any, by_states: Any, by_last: Any, by_cells: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: the backward pass of a recurrent layer of a private module "
                "cannot be differentiated again. Remove the gradient penalty, or estimate it by "
                "the difference of two forward passes"
            )
        saved = ctx.saved_tensors
        weights, trace = Weights(*saved[:_WEIGHTS]), Trace.of(saved[_WEIGHTS:])
        steps: Steps = ctx.steps
        with without_autocast(trace.hidden.device.type):
            if by_states is None:
                gradient = trace.hidden.new_zeros(steps.total, trace.hidden.shape[1])
            else:
                gradient = by_states.clone(memory_format=torch.contiguous_format)
            if by_last is not None:
                steps.add_to_last(gradient, by_last)
            if trace.cell is None:
                cells = None
            elif by_cells is None:
                cells = torch.zeros_like(trace.cell[: steps.rows])
            else:
                cells = by_cells.clone(memory_format=torch.contiguous_format)
            found = ctx.cell.back((gradient, cells), weights, trace, steps)
            x = ctx.cell.by_inputs(found.gates, weights) if ctx.needs_input_grad[1] else None
        others = [None] * (2 + len(saved))
        return steps.by_rows(found.gates), x, found.hidden, found.cell, *others
