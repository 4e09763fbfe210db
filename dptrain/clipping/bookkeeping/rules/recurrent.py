"""The rule of torch's recurrent layers and cells."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from dptrain.clipping.base.rows import UnclearRows
from dptrain.clipping.bookkeeping.recurrent.cells import GRU, LSTM, RNN, Cell, Weights
from dptrain.clipping.bookkeeping.recurrent.recurrence import recurrence
from dptrain.clipping.bookkeeping.recurrent.steps import Steps
from dptrain.clipping.bookkeeping.rules.rule import CallRule, Forward, Inputs, Observe
from dptrain.clipping.bookkeeping.rules.sequence_first import check_square
from dptrain.clipping.bookkeeping.uses.use import Use

_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


class RecurrentRule(CallRule):
    """Recurrent layers and cells, with the gates of every direction observed.

    From δ_t, the gradient by what the gates add up at step t, an example's gradients are Σ_t δ_t
    x_tᵀ, Σ_t δ_t h_{t-1}ᵀ and Σ_t δ_t (Werbos 1990; docs/theory/clipping.md#thm-recurrent;
    ``test_every_recurrent_layer``).

    With ``batch_first=False`` rows are the *second* dimension of what the layer is given, and of
    initial states they always are. That is right between two transpositions, in a model whose other
    layers have the rows first.
    """

    @override
    def refusal(self, layer: nn.Module) -> str | None:
        names: dict[nn.Parameter, str] = {}
        for name, p in layer.named_parameters(recurse=False, remove_duplicate=False):
            if p in names:
                return f"{names[p]!r} and {name!r} are the same parameter: give each its own"
            names[p] = name
        return None

    def keeps_inputs(self, layer: nn.Module) -> bool:
        """True if a weight is trained: biases need no inputs."""
        return any(p.requires_grad for n, p in layer.named_parameters() if n.startswith("weight"))


class SequenceRule(RecurrentRule):
    """Layers over sequences, padded or packed."""

    @override
    def second(self, layer: nn.Module) -> Collection[int]:
        """Initial states, and the input of a layer with ``batch_first=False``."""
        return (1,) if layer.batch_first else (0, 1)

    @override
    def forward(self, layer: nn.Module, forward: Forward, inputs: Inputs, observe: Observe) -> Any:
        assert isinstance(layer, nn.RNNBase)
        given, hx = (*inputs, None)[:2]
        if isinstance(given, PackedSequence):
            _check_arguments(layer, given.data, hx, given.batch_sizes)
            output, last = self._run(layer, given.data, hx, Steps.of(given), observe)
            result: Any = given._replace(data=output)
        else:
            self._check_shape(layer, given, observe)
            _check_arguments(layer, given, hx, None)
            x = given.transpose(0, 1) if layer.batch_first else given
            steps = Steps([x.shape[1]] * len(x))
            output, last = self._run(layer, x.flatten(0, 1), hx, steps, observe)
            result = output.unflatten(0, (steps.longest, steps.rows))
            result = result.transpose(0, 1) if layer.batch_first else result
        return result, (last if isinstance(layer, nn.LSTM) else last[0])

    def _run(
        self, layer: nn.RNNBase, x: torch.Tensor, hx: Any, steps: Steps, observe: Observe
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The last layer's states, flat, and the final states of all layers and directions."""
        dtype, order = _returned(layer, x), steps.order
        states = [] if hx is None else [*hx] if isinstance(layer, nn.LSTM) else [hx]
        if order is not None:
            states = [state.index_select(1, order) for state in states]
        ways = {"": steps, "_reverse": steps.reversed()} if layer.bidirectional else {"": steps}
        found: list[list[torch.Tensor]] = []
        for number in range(layer.num_layers):
            sides = []
            for suffix, way in ways.items():
                initial = [state[len(found)] for state in states]
                h, last = _direction(layer, f"_l{number}{suffix}", x, initial, way, observe)
                sides.append(h)
                found.append(last)
            x = sides[0] if len(sides) == 1 else torch.cat(sides, dim=1)
            if number < layer.num_layers - 1:
                x = F.dropout(x, layer.dropout, layer.training)
        final = [torch.stack(each).to(dtype) for each in zip(*found, strict=True)]
        if order is not None:
            final = [state.index_select(1, order.argsort()) for state in final]
        # A copy of what the backward pass needs: the user may write into it.
        x = x.clone() if len(ways) == 1 else x
        return x.to(dtype), tuple(final)

    def _check_shape(self, layer: nn.RNNBase, x: torch.Tensor, observe: Observe) -> None:
        kind, shape = type(layer).__name__, tuple(x.shape)
        if len(shape) != 3 or 0 in shape[:2]:
            raise UnclearRows(
                f"nn.{kind} is called on an input of shape {shape}: it must have three "
                "dimensions, one row per example and at least one time step"
            )
        if not layer.batch_first:
            check_square(layer, "an input", shape, observe.rows(), "steps")


def _check_arguments(
    layer: nn.RNNBase, x: torch.Tensor, hx: Any, sizes: torch.Tensor | None
) -> None:
    """As the layer does."""
    if hx is None:
        layer.check_input(x, sizes)
    else:
        layer.check_forward_args(x, hx, sizes)


class CellRule(RecurrentRule):
    """A single step, of examples in the first dimension."""

    @override
    def forward(self, layer: nn.Module, forward: Forward, inputs: Inputs, observe: Observe) -> Any:
        assert isinstance(layer, nn.RNNCellBase)
        x, hx = (*inputs, None)[:2]
        two = isinstance(layer, nn.LSTMCell)
        states = [] if hx is None else [*hx] if two else [hx]
        shapes = [tuple(t.shape) for t in (x, *states)]
        if len(shapes[0]) != 2 or any(s != (len(x), layer.hidden_size) for s in shapes[1:]):
            raise UnclearRows(
                f"nn.{type(layer).__name__} is called with an input and states of shapes "
                f"{shapes}: they must be (rows, {layer.input_size}) and (rows, "
                f"{layer.hidden_size}), with one row per example"
            )
        h, last = _direction(layer, "", x, states, Steps([len(x)]), observe)
        dtype, h = _returned(layer, x), h.clone()  # which may be written into
        return (h.to(dtype), last[1].to(dtype)) if two else h.to(dtype)


def _direction(
    layer: nn.Module,
    suffix: str,
    x: torch.Tensor,
    initial: Sequence[torch.Tensor],
    steps: Steps,
    observe: Observe,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One direction of one layer: its states, flat, and its final ones."""
    weights = Weights._make(getattr(layer, name + suffix, None) for name in _NAMES)
    cell = _cell(layer)
    # The projection of the states gets a gradient too, behind those of the gates.
    gates = None if weights.hr is None else len(weights.ih)
    uses = functools.partial(_uses, cell, suffix, weights.bias_ih is not None, gates)
    states, *last = recurrence(
        cell, x, weights, initial, steps, lambda signal, inputs: observe(signal, inputs, uses)
    )
    return states, [state for state in last if state is not None]


def _uses(
    cell: Cell,
    suffix: str,
    bias: bool,
    gates: int | None,
    layer: nn.Module,
    inputs: tuple[Any, ...],
    gradient: torch.Tensor,
) -> Mapping[str, Use]:
    if gates is not None and not inputs:  # only biases are trained
        gradient = gradient[..., :gates]
    found = cell.uses(inputs, gradient, bias=bias)
    return {name + suffix: use for name, use in found.items()}


def _cell(layer: nn.Module) -> Cell:
    if isinstance(layer, nn.LSTM | nn.LSTMCell):
        return LSTM()
    if isinstance(layer, nn.GRU | nn.GRUCell):
        return GRU()
    kind = layer.mode if isinstance(layer, nn.RNN) else layer.nonlinearity
    return RNN(relu=str(kind).lower().endswith("relu"))


def _returned(layer: nn.Module, x: torch.Tensor) -> torch.dtype:
    """The dtype of what the layer returns; on a CPU autocast does not change all layers'."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x.dtype
    if device == "cpu" and not isinstance(layer, nn.LSTM | nn.RNN | nn.RNNCell):
        return x.dtype
    return torch.get_autocast_dtype(device)
