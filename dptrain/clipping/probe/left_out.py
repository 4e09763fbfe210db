"""Whether what belongs to some rows stays where others are left out of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dptrain.clipping.base.rows import HALF
from dptrain.clipping.probe.witness import Sighting

_MEASURED = 32  # rounding errors that were measured may be so many times as large elsewhere


def moved_without(
    whole: Sequence[Sighting],
    rest: Sequence[Sighting],
    kept: Sequence[int],
    rows: int,
    *,
    shaken: Sequence[Sighting] | None = None,
    reduced: bool = False,
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
        reduced: whether the module returns a loss, which may be a mean over its rows.
    """
    if [s.layer for s in whole] != [s.layer for s in rest]:
        return None
    again = whole if shaken is None else shaken
    if [s.layer for s in again] != [s.layer for s in whole]:
        return None
    unit = _unit([*whole, *rest])
    found: Sighting | None = None
    for factor in (1.0, len(kept) / rows) if reduced else (1.0,):
        calls = zip(whole, rest, again, strict=True)
        found = next((a for a, b, c in calls if _differ(a, b, c, kept, rows, unit, factor)), None)
        if found is None:
            break
    return found


def _differ(
    a: Sighting,
    b: Sighting,
    c: Sighting,
    kept: Sequence[int],
    rows: int,
    unit: float,
    factor: float,
) -> bool:
    """Whether an input of a call is another, or the gradient by its output, but for a factor."""
    inputs = zip(a.inputs, b.inputs, c.inputs, strict=False)
    return any(_off(x, y, z, kept, rows, unit) for x, y, z in inputs) or _off(
        a.gradient, factor * b.gradient, c.gradient, kept, rows, unit
    )


def _off(
    x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, kept: Sequence[int], rows: int, unit: float
) -> bool:
    """Whether those rows of x are others than y's."""
    if x.shape[1:] != y.shape[1:] or x.shape != z.shape or x.numel() <= 1:
        return False  # another length of what is padded; or a number, which may count the rows
    if len(x) == rows and len(y) == len(kept):
        x, z = x[list(kept)], z[list(kept)]
    elif len(x) != len(y):
        return False
    x, y, z = _numbers(x), _numbers(y), _numbers(z)
    if not x.numel():
        return False
    # Where nothing but rounding errors is left, none is like another: the largest counts.
    largest = torch.maximum(x.abs(), y.abs()).amax()
    limit = unit**0.5 * largest + _MEASURED * (x - z).abs().amax()
    return bool((x - y).abs().amax() > limit)


def _numbers(x: torch.Tensor) -> torch.Tensor:
    return x.double().nan_to_num(0.0, 0.0, 0.0)


def _unit(seen: Sequence[Sighting]) -> float:
    """One unit in the last place of what is computed with; in float64 it may be float32 within."""
    kinds = {x.dtype for s in seen for x in (*s.inputs, s.gradient)}
    half = next((kind for kind in kinds if kind in HALF), None)
    return float(torch.finfo(half or torch.float32).eps)
