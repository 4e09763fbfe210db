"""Every layer's inputs and output gradients, by rows, and whether they moved from run to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from opacus.layers.dp_rnn import RNNLinear
from torch import nn
from typing_extensions import override

from dptrain.clipping.base.book import Book
from dptrain.clipping.base.rows import HALF
from dptrain.core import in_float64

_ROUNDING = 64  # units in the last place of a tensor's largest number: that is no dependence

_MEASURED = 32  # rounding errors that were measured may be so many times as large elsewhere
_AT_ONCE = 2**20  # numbers that are compared at a time


@dataclasses.dataclass(frozen=True)
class Sighting:
    """One call of a layer that the loss depends on.

    Attributes:
        inputs: the tensors that its per-example gradients are formed from.
        gradient: of the loss by its output, shape (rows, ...).
    """

    layer: nn.Module
    inputs: tuple[torch.Tensor, ...]
    gradient: torch.Tensor


class Witness(Book):
    """Takes the place of what layers report to, and only looks: no gradients are formed.

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

    @override
    def rows(self) -> int:
        return self._rows

    @override
    def at_hand(self) -> Any:
        return self  # the same in the forward and in the backward pass

    @override
    def hidden(self) -> None:
        self.hides = True

    def saw(self, layer: nn.Module, inputs: Sequence[Any], gradient: torch.Tensor) -> bool:
        """Keep a call of a layer, of which no gradients are formed."""
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
        """True if all that was seen is finite."""
        return all(
            bool(x.isfinite().all()) for s in self.sightings for x in (*s.inputs, s.gradient)
        )


def same_calls(ours: Sequence[Sighting], theirs: Sequence[Sighting]) -> bool:
    """True if two runs called the same layers, in this order, on tensors of the same shapes."""
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
    limit = _ROUNDING * eps * largest + 8 * _finite(x - again).abs().amax()
    return not bool((same | ((x - y).abs() <= limit)).all())


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def moved_without(
    whole: Sequence[Sighting],
    rest: Sequence[Sighting],
    kept: Sequence[int],
    rows: int,
    *,
    shaken: Sequence[Sighting] | None = None,
) -> Sighting | None:
    """A call of which something moved when rows were left out; ``None``: there is none.

    Batches of other sizes are added up in other orders, so half of the digits count. Where calls
    are not the same, nothing can be told.

    Args:
        whole: what was seen of a run on all rows.
        rest: of a run on some of them.
        kept: which these are.
        rows: that the module was fed in the first.
        shaken: of a run on all rows, with inputs and parameters off by some roundings; what moves
            there by much has nothing but rounding errors in it.
    """
    if [s.layer for s in whole] != [s.layer for s in rest]:
        return None
    again = whole if shaken is None else shaken
    if [s.layer for s in again] != [s.layer for s in whole]:
        return None
    unit = _unit([*whole, *rest])
    for calls in zip(whole, rest, again, strict=True):
        inputs = zip(*(s.inputs for s in calls), strict=False)
        for x, y, z in (*inputs, tuple(s.gradient for s in calls)):
            if _off(x, y, z, kept, rows, unit):
                return calls[0]
    return None


def _off(
    x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, kept: Sequence[int], rows: int, unit: float
) -> bool:
    """True if those rows of x are others than y's."""
    if x.shape[1:] != y.shape[1:] or x.shape != z.shape or x.numel() <= 1:
        return False  # another length of what is padded; or a number, which may count the rows
    if len(x) == rows and len(y) == len(kept):
        triples = [(x[k], other, z[k]) for k, other in zip(kept, y, strict=True)]
    elif len(x) == len(y):
        triples = [(x, y, z)]
    else:
        return False
    # Some numbers at a time: those of a decoder's output take hundreds of MB in float64.
    largest = moved = rounding = 0.0
    for triple in triples:
        parts = (t.reshape(-1).split(_AT_ONCE) for t in triple)
        for own, theirs, again in zip(*parts, strict=True):
            p, q, r = _numbers(own), _numbers(theirs), _numbers(again)
            largest = max(largest, float(p.abs().amax()), float(q.abs().amax()))
            moved = max(moved, float((p - q).abs().amax()))
            rounding = max(rounding, float((p - r).abs().amax()))
    # Where nothing but rounding errors is left, none is like another: the largest counts.
    return moved > unit**0.5 * largest + _MEASURED * rounding


def _numbers(x: torch.Tensor) -> torch.Tensor:
    return in_float64(x).nan_to_num(0.0, 0.0, 0.0)


def _unit(seen: Sequence[Sighting]) -> float:
    """One unit in the last place of what is computed with; in float64 it may be float32 within."""
    kinds = {x.dtype for s in seen for x in (*s.inputs, s.gradient)}
    half = next((kind for kind in kinds if kind in HALF), None)
    return float(torch.finfo(half or torch.float32).eps)
