"""The three recurrences of torch: their states, and the gradients of what their gates add up.

A recurrence adds up a_t = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh, and its state follows from that
without parameters. The gradients of the loss by a_t, taken back from step to step, are all that
parameters' gradients need beside inputs and states; no weight's gradient is formed on the way.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from dptrain.clipping.base.linear_norms import Gram
from dptrain.clipping.base.products import Squashed, add_product, product
from dptrain.clipping.bookkeeping.cache import chunk_size
from dptrain.clipping.bookkeeping.recurrent.steps import Steps, fit
from dptrain.clipping.bookkeeping.uses.arranged import Stacked
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.clipping.bookkeeping.uses.use import Materialized, Use

_sigmoid_slope = torch.ops.aten.sigmoid_backward.grad_input  # d σ (1 - σ) of (d, σ)
_tanh_slope = torch.ops.aten.tanh_backward.grad_input  # d (1 - y²) of (d, y)


class Weights(NamedTuple):
    """Weights of one direction of one layer, with torch's names and shapes.

    Attributes:
        ih, hh: shapes (blocks · hidden, inputs) and (blocks · hidden, outputs).
        bias_ih, bias_hh: shape (blocks · hidden,), if there are any.
        hr: the projection of an LSTM's outputs, shape (outputs, hidden), if there is one.
    """

    ih: torch.Tensor
    hh: torch.Tensor
    bias_ih: torch.Tensor | None = None
    bias_hh: torch.Tensor | None = None
    hr: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Trace:
    """The states that a recurrence went through.

    Attributes:
        hidden: states, the initial ones too, as ``Steps.states`` has them.
        cell: those of an LSTM's cells.
        kept: what ``Cell.back`` needs besides.
        projected: what an LSTM's projection was given, flat.
    """

    hidden: torch.Tensor
    cell: torch.Tensor | None
    kept: tuple[torch.Tensor, ...]
    projected: torch.Tensor | None = None

    def all(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that ``back`` looks at."""
        return self.hidden, self.cell, *self.kept

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> Trace:
        """Build the trace from the tensors that ``all`` lists."""
        return cls(tensors[0], tensors[1], tuple(tensors[2:]))


@dataclasses.dataclass(frozen=True)
class Signals:
    """Gradients of the loss.

    Attributes:
        gates: what ``Cell.uses`` is given, flat.
        hidden, cell: by the initial states.
    """

    gates: torch.Tensor
    hidden: torch.Tensor
    cell: torch.Tensor | None = None


States = tuple[torch.Tensor, torch.Tensor | None]
"""Tensors of a hidden state, and of an LSTM's cells."""


class Cell(abc.ABC):
    """One kind of recurrence."""

    def states(self, weights: Weights) -> tuple[int, ...]:
        """Numbers of its hidden state, and of its cells where it has some."""
        return (weights.hh.shape[1],)

    @abc.abstractmethod
    def numbers(self, weights: Weights) -> int:
        """Numbers of ``Signals.gates`` for every step."""

    @abc.abstractmethod
    def run(self, x: torch.Tensor, weights: Weights, initial: States, steps: Steps) -> Trace:
        """Run the recurrence, and return all its states.

        Args:
            x: flat.
            initial: the hidden states, shape (rows, outputs), and an LSTM's cells, (rows, hidden).
        """

    @abc.abstractmethod
    def back(self, by: States, weights: Weights, trace: Trace, steps: Steps) -> Signals:
        """Gradients by what the gates add up, from those by the states.

        Args:
            by: the states after each step, as far as it does not come by way of later steps, flat;
                and an LSTM's last cells, shape (rows, hidden). Both are written over.
            weights: as in ``run``; biases are not looked at.
        """

    def sides(self, gates: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Gradients by W_ih x + b_ih and by W_hh h + b_hh, cut into blocks, from the first on."""
        side = [gates]
        return side, side

    def by_inputs(self, gates: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The gradient by x, flat."""
        blocks, _ = self.sides(gates)
        heights = [block.shape[1] for block in blocks]
        total: torch.Tensor | None = None
        for block, weight in zip(blocks, weights.ih.split(heights), strict=True):
            weight = weight.t()
            total = product(block, weight) if total is None else add_product(total, block, weight)
        assert total is not None
        return total

    def uses(
        self, inputs: tuple[torch.Tensor, ...], gates: torch.Tensor, *, bias: bool
    ) -> Mapping[str, Use]:
        """Uses of the parameters, by their names.

        Args:
            inputs: by rows: x, the states that steps start from, and what is projected, if
                anything is; none where only biases are trained.
            gates: the gradient, by rows, shape (rows, steps, numbers).
        """
        found: dict[str, Use] = {}
        ih, hh = self.sides(gates)
        if bias:
            found["bias_ih"] = _total(ih)
            found["bias_hh"] = found["bias_ih"] if hh is ih else _total(hh)
        shared = Gram(ih[0])  # the first block is the same on both sides
        for name, side, right in zip(("weight_ih", "weight_hh"), (ih, hh), inputs, strict=False):
            own = Gram(right) if len(side) > 1 else None
            parts: list[Use] = [
                OuterProducts(left, right, grams=(shared if left is ih[0] else None, own))
                for left in side
            ]
            found[name] = parts[0] if len(parts) == 1 else Stacked(parts)
        return found


def _total(side: list[torch.Tensor]) -> Use:
    return Materialized(torch.cat([block.sum(1) for block in side], dim=1))


class LSTM(Cell):
    """i, f, o = σ(a), g = tanh(a); c_t = f c_{t-1} + i g; h_t = o tanh(c_t), or W_hr times that."""

    @override
    def states(self, weights: Weights) -> tuple[int, ...]:
        return weights.hh.shape[1], weights.hh.shape[0] // 4

    @override
    def numbers(self, weights: Weights) -> int:
        return len(weights.hh) + (0 if weights.hr is None else len(weights.hr))

    @override
    def run(self, x: torch.Tensor, weights: Weights, initial: States, steps: Steps) -> Trace:
        hidden, cell = initial
        assert cell is not None
        size = cell.shape[1]
        gates, add_up = _gates(x, weights, hidden, steps)
        all_hidden, states = steps.states(hidden)
        all_cells, cells = steps.states(cell)
        squashed = gates.new_empty(steps.total, size)
        out = states if weights.hr is None else torch.empty_like(squashed)
        h, c = hidden, cell
        # All views at once: each that is made on the way costs as much as a small operation.
        split = [steps.split(part) for part in (x, gates, *gates.chunk(4, 1))]
        later = [steps.split(part) for part in (states, cells, squashed, out)]
        for given, a, i, f, g, o, h_next, c_next, tanh, m in zip(*split, *later, strict=True):
            h, c = fit(h, hidden, len(a)), fit(c, cell, len(a))
            add_up(given, h, a)
            torch.mul(f, c, out=c_next).addcmul_(i, g)
            torch.tanh(c_next, out=tanh)
            torch.mul(o, tanh, out=m)
            if weights.hr is not None:
                h_next.copy_(product(m, weights.hr))
            h, c = h_next, c_next
        projected = None if weights.hr is None else out
        return Trace(all_hidden, all_cells, (gates, squashed), projected)

    @override
    def back(self, by: States, weights: Weights, trace: Trace, steps: Steps) -> Signals:
        gradient, cell = by
        assert cell is not None
        assert trace.cell is not None
        gates, squashed = trace.kept
        size = cell.shape[1]
        before = steps.before(trace.cell)
        found, into_cell = torch.empty_like(gates), torch.empty_like(squashed)
        initial = gradient.new_zeros(steps.rows, gradient.shape[1])
        for run, spans in steps.backwards(chunk_size(gates, 12 * size)):
            i, f, g, o = gates[run].chunk(4, 1)
            by_i, by_f, by_g, by_o = found[run].chunk(4, 1)
            _sigmoid_slope(g, i, grad_input=by_i)
            _sigmoid_slope(before[run], f, grad_input=by_f)
            _tanh_slope(i, g, grad_input=by_g)
            _sigmoid_slope(squashed[run], o, grad_input=by_o)
            _tanh_slope(o, squashed[run], grad_input=into_cell[run])
            for span, following in spans:
                d = gradient[span]
                d = d if weights.hr is None else product(d, weights.hr.t())
                own, here = cell[: len(d)], found[span].unflatten(1, (4, size))
                own.addcmul_(d, into_cell[span])
                here[:, :3].mul_(own[:, None])
                here[:, 3].mul_(d)
                own.mul_(gates[span, size : 2 * size])
                _pass_on(product(found[span], weights.hh.t()), following, gradient, initial)
        if weights.hr is not None:
            found = torch.cat([found, gradient], dim=1)
        return Signals(found, initial, cell)

    @override
    def by_inputs(self, gates: torch.Tensor, weights: Weights) -> torch.Tensor:
        return super().by_inputs(gates[:, : len(weights.ih)], weights)

    @override
    def uses(
        self, inputs: tuple[torch.Tensor, ...], gates: torch.Tensor, *, bias: bool
    ) -> Mapping[str, Use]:
        if len(inputs) < 3:
            return super().uses(inputs, gates, bias=bias)
        *rest, projected = inputs
        numbers = 4 * projected.shape[2]
        found = super().uses(tuple(rest), gates[..., :numbers], bias=bias)
        return {**found, "weight_hr": OuterProducts(gates[..., numbers:], projected)}


class GRU(Cell):
    """r, z = σ(a); n = tanh(a_i + r a_h), where a = a_i + a_h; h_t = n + z (h_{t-1} - n).

    Gradients are by a_i of n, by a of r and of z, and by a_h of n, in this order.
    """

    @override
    def numbers(self, weights: Weights) -> int:
        return 4 * weights.hh.shape[1]

    @override
    def run(self, x: torch.Tensor, weights: Weights, initial: States, steps: Steps) -> Trace:
        hidden, _ = initial
        size = hidden.shape[1]
        gates = product(x, weights.ih, weights.bias_ih)
        all_hidden, states = steps.states(hidden)
        recurrent = torch.empty_like(states)
        h = hidden
        parts = (gates, states, recurrent)
        for a, h_next, kept in zip(*map(steps.split, parts), strict=True):
            h = fit(h, hidden, len(a))
            own = product(h, weights.hh, weights.bias_hh)
            kept.copy_(own[:, 2 * size :])
            a[:, : 2 * size].add_(own[:, : 2 * size]).sigmoid_()
            r, z, n = a.chunk(3, 1)
            n.addcmul_(r, kept).tanh_()
            torch.lerp(n, h, z, out=h_next)
            h = h_next
        return Trace(all_hidden, None, (gates, recurrent))

    @override
    def back(self, by: States, weights: Weights, trace: Trace, steps: Steps) -> Signals:
        (gradient, _), (gates, recurrent) = by, trace.kept
        size = recurrent.shape[1]
        before = steps.before(trace.hidden)
        found = gates.new_empty(steps.total, 4 * size)
        initial = torch.zeros_like(trace.hidden[: steps.rows])
        for run, spans in steps.backwards(chunk_size(gates, 10 * size)):
            r, z, n = gates[run].chunk(3, 1)
            by_n, by_r, by_z, by_own = found[run].chunk(4, 1)
            _tanh_slope(1 - z, n, grad_input=by_n)
            _sigmoid_slope(by_n * recurrent[run], r, grad_input=by_r)
            _sigmoid_slope(before[run] - n, z, grad_input=by_z)
            torch.mul(by_n, r, out=by_own)
            for span, following in spans:
                d = gradient[span]
                found[span].unflatten(1, (4, size)).mul_(d[:, None])
                passed = d * gates[span, size : 2 * size]
                passed = add_product(passed, found[span, size:], weights.hh.t())
                _pass_on(passed, following, gradient, initial)
        return Signals(found, initial)

    @override
    def sides(self, gates: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        size = gates.shape[-1] // 4
        n, both, own = gates.split([size, 2 * size, size], -1)
        return [both, n], [both, own]


class RNN(Cell):
    """h_t = tanh(a), or relu(a)."""

    def __init__(self, *, relu: bool) -> None:
        self.relu = relu

    @override
    def numbers(self, weights: Weights) -> int:
        return weights.hh.shape[1]

    @override
    def run(self, x: torch.Tensor, weights: Weights, initial: States, steps: Steps) -> Trace:
        hidden, _ = initial
        gates = product(x, weights.ih, _both(weights))
        all_hidden, states = steps.states(hidden)
        squash = _relu if self.relu else torch.tanh
        h = hidden
        for a, h_next in zip(steps.split(gates), steps.split(states), strict=True):
            h = squash(add_product(a, fit(h, hidden, len(a)), weights.hh), out=h_next)
        return Trace(all_hidden, None, ())

    @override
    def back(self, by: States, weights: Weights, trace: Trace, steps: Steps) -> Signals:
        (gradient, _), states = by, steps.after(trace.hidden)
        initial = torch.zeros_like(trace.hidden[: steps.rows])
        for _, spans in steps.backwards(0):
            for span, following in spans:
                d = gradient[span]
                if self.relu:
                    torch.ops.aten.threshold_backward.grad_input(d, states[span], 0, grad_input=d)
                else:
                    _tanh_slope(d, states[span], grad_input=d)
                _pass_on(product(d, weights.hh.t()), following, gradient, initial)
        return Signals(gradient, initial)


def _gates(
    x: torch.Tensor, weights: Weights, hidden: torch.Tensor, steps: Steps
) -> tuple[torch.Tensor, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]]:
    """Memory for an LSTM's gates, flat, and what writes those of a step there.

    The latter is given x at the step, the states that it starts from, and where to write.
    """
    both, size = _both(weights), weights.hh.shape[0] // 4
    if not Squashed.pays(hidden, weights.hh):

        def squash(_: torch.Tensor, h: torch.Tensor, gates: torch.Tensor) -> None:
            parts = add_product(gates, h, weights.hh).chunk(4, 1), gates.chunk(4, 1)
            for k, (a, into) in enumerate(zip(*parts, strict=True)):
                (torch.tanh if k == 2 else torch.sigmoid)(a, out=into)

        return product(x, weights.ih, both), squash

    # One product for inputs and states: an operation for σ of it, and one for tanh.
    whole = torch.cat([weights.ih, weights.hh], 1)
    whole = whole if both is None else torch.cat([whole, both[:, None]], 1)
    i, f, g, o = whole.split(size)

    def by(weight: torch.Tensor, how: str) -> Squashed:
        bias = None if both is None else weight[:, -1].contiguous()
        return Squashed(weight if both is None else weight[:, :-1], bias, how, len(hidden))

    sigmoid, tanh = by(torch.cat([i, f, o]), "sigmoid"), by(g, "tanh")

    def fused(given: torch.Tensor, h: torch.Tensor, gates: torch.Tensor) -> None:
        given = torch.cat([given, h], 1)
        first, last = sigmoid(given).split([2 * size, size], 1)
        torch.cat([first, tanh(given), last], 1, out=gates)

    return x.new_empty(steps.total, 4 * size), fused


def _relu(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.clamp(x, min=0, out=out)


def _both(weights: Weights) -> torch.Tensor | None:
    if weights.bias_ih is None or weights.bias_hh is None:
        return None
    return weights.bias_ih + weights.bias_hh


def _pass_on(
    passed: torch.Tensor, following: slice | None, gradient: torch.Tensor, initial: torch.Tensor
) -> None:
    """Give a gradient to the states that a step started from: later states, or initial ones."""
    rows = 0
    if following is not None:
        rows = min(len(passed), following.stop - following.start)
        gradient[following.start : following.start + rows].add_(passed[:rows])
    if rows < len(passed):
        initial[rows : len(passed)] = passed[rows:]
