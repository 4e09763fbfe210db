"""Whether what belongs to some rows stays where others are left out of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dptrain.clipping.base.rows import HALF
from dptrain.clipping.probe.witness import Sighting

_MEASURED = 32  # rounding errors that were measured may be so many times as large elsewhere
_AT_ONCE = 2**20  # numbers that are compared at a time


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
    calls = zip(whole, rest, again, strict=True)
    return next((a for a, b, c in calls if _differ(a, b, c, kept, rows, unit)), None)


def _differ(
    a: Sighting,
    b: Sighting,
    c: Sighting,
    kept: Sequence[int],
    rows: int,
    unit: float,
) -> bool:
    """Whether an input of a call is another, or the gradient by its output."""
    inputs = zip(a.inputs, b.inputs, c.inputs, strict=False)
    return any(_off(x, y, z, kept, rows, unit) for x, y, z in inputs) or _off(
        a.gradient, b.gradient, c.gradient, kept, rows, unit
    )


def _off(
    x: torch.Tensor,
    y: torch.Tensor,
    z: torch.Tensor,
    kept: Sequence[int],
    rows: int,
    unit: float,
) -> bool:
    """Whether those rows of x are others than y's."""
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
    return x.double().nan_to_num(0.0, 0.0, 0.0)


def _unit(seen: Sequence[Sighting]) -> float:
    """One unit in the last place of what is computed with; in float64 it may be float32 within."""
    kinds = {x.dtype for s in seen for x in (*s.inputs, s.gradient)}
    half = next((kind for kind in kinds if kind in HALF), None)
    return float(torch.finfo(half or torch.float32).eps)
