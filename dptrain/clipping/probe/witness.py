"""What clipping would be made of in a run: every layer's inputs and output gradients, by rows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from opacus.layers.dp_rnn import RNNLinear
from torch import nn

ROUNDING = 64  # units in the last place of a tensor's largest number: that is no dependence


@dataclasses.dataclass(frozen=True)
class Sighting:
    """One call of a layer that the loss depends on.

    Attributes:
        layer: the layer.
        inputs: the tensors that its per-example gradients are formed from.
        gradient: of the loss by its output, shape (rows, ...).
    """

    layer: nn.Module
    inputs: tuple[torch.Tensor, ...]
    gradient: torch.Tensor


class Witness:
    """Takes the place of what layers report to, and only looks.

    Args:
        rows: that the module is fed.

    Attributes:
        sightings: what was seen, from the last to the first.
        hides: whether a layer ran without gradients, as where a reentrant checkpoint begins.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.sightings: list[Sighting] = []
        self.hides = False

    def rows(self) -> int:
        """Rows that the module is fed."""
        return self._rows

    def idle(self) -> bool:
        """No: there is something to look at."""
        return False

    def at_hand(self) -> Any:
        """The same in the forward and in the backward pass."""
        return self

    def record(
        self, uses: Mapping[nn.Parameter, Any], since: Any, doubt: str | None = None
    ) -> None:
        """Nothing: gradients of a probe are not formed."""

    def discard(self) -> None:
        """Nothing."""

    def hidden(self) -> None:
        """Take note."""
        self.hides = True

    def replays(self, rule: Any) -> None:
        """Nothing."""

    def unseen(self) -> contextlib.AbstractContextManager[Any]:
        """As it is: all that is done is the probe's."""
        return contextlib.nullcontext()

    def doubt(self, layer: nn.Module) -> str | None:
        """None: nothing is taken in."""
        return None

    def saw(self, layer: nn.Module, inputs: Sequence[Any], gradient: torch.Tensor) -> bool:
        """Keep a call of a layer; whether gradients are not to be formed of it."""
        # A single number is what all rows share.
        tensors = tuple(
            x.detach() if x.dim() else x.detach()[None]
            for x in inputs
            if isinstance(x, torch.Tensor)
        )
        self.sightings.append(Sighting(layer, tensors, gradient.detach()))
        return True

    @property
    def finite(self) -> bool:
        """Whether all that was seen is."""
        return all(
            bool(x.isfinite().all()) for s in self.sightings for x in (*s.inputs, s.gradient)
        )


def same_calls(ours: Sequence[Sighting], theirs: Sequence[Sighting]) -> bool:
    """Whether two runs called the same layers, in this order, on tensors of the same shapes."""
    return [_shape(s) for s in ours] == [_shape(s) for s in theirs]


def _shape(s: Sighting) -> tuple[Any, ...]:
    return s.layer, s.gradient.shape, tuple(x.shape for x in s.inputs)


def moved(
    ours: Sequence[Sighting],
    theirs: Sequence[Sighting],
    rows: int,
    changed: range,
    repeated: Sequence[Sighting] | None = None,
) -> Iterator[tuple[Sighting, bool]]:
    """Calls of which something moved that belongs to rows that were not changed.

    Args:
        ours, theirs: what was seen of the same calls in two runs.
        rows: that the module was fed.
        changed: those whose numbers were changed from one run to the other.
        repeated: of the first run, once more: what moves there is rounding.

    Yields:
        The call, and whether an input of it moved, not only its output's gradient.
    """
    others = [k for k in range(rows) if k not in changed]
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        c = a if repeated is None else repeated[number]
        by_input = any(
            _differ(x, y, z, _belonging(a, x, rows, others))
            for x, y, z in zip(a.inputs, b.inputs, c.inputs, strict=True)
        )
        own = _belonging(a, a.gradient, rows, others)
        if by_input or _differ(a.gradient, b.gradient, c.gradient, own):
            yield a, by_input


def _belonging(s: Sighting, x: torch.Tensor, rows: int, others: list[int]) -> list[int]:
    """Rows of a tensor that may not move with the examples that were changed."""
    if isinstance(s.layer, RNNLinear):  # the steps of a packed sequence have the first rows only
        return [k for k in others if k < len(x)]
    return others if len(x) == rows else list(range(len(x)))  # what is not by rows is shared


def _differ(x: torch.Tensor, y: torch.Tensor, again: torch.Tensor, kept: list[int]) -> bool:
    x, y, again = x[kept], y[kept], again[kept]
    if torch.equal(x, y):
        return False
    if not x.is_floating_point() or not len(x):
        return bool(len(x))
    same = (x == y) | (x.isnan() & y.isnan())
    largest = torch.maximum(_finite(x).abs(), _finite(y).abs()).amax()
    # Rows that are not changed come of the same operations on the same numbers, in half precision
    # too; where sums come in another order every time, the repeated run tells by how much.
    eps = min(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps)
    limit = ROUNDING * eps * largest + 8 * _finite(x - again).abs().amax()
    return not bool((same | ((x - y).abs() <= limit)).all())


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
