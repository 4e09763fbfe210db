"""What a certificate of weighted samples has to say, given what was asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dptrain.accounting.simulation.certificate_cache import (
    attempts_of,
    differing_verdict,
    whole_number,
)
from dptrain.accounting.simulation.weighted.verdicts import Point, Rule

GridRows = list[dict[str, Any]]


class Declared(NamedTuple):
    """What a request determines of its certificate, without a sample.

    Attributes:
        rule: when a direction is accepted; its ``most`` is no part of a certificate.
        step: σ = ceiling/step^point.
        offsets: the grid of an estimate d is every d - offset that is positive.
        most: no point lies deeper.
        covers: whether the deterministic bounds show (ε, δ_v) at a σ.
        terms_at: both directions' terms at a point below a ceiling.
        redraw: the rows of a ceiling, a grid's points and a seed, drawn once more.
    """

    rule: Rule
    step: float
    offsets: Sequence[int]
    most: int
    covers: Callable[[float], bool]
    terms_at: Callable[[float], Point]
    redraw: Callable[[float, Sequence[int], int], GridRows]


def declared_points(depth: int, offsets: Sequence[int]) -> list[int]:
    """The grid around an estimate, from its most private point on."""
    return sorted({depth - offset for offset in offsets if depth - offset > 0})


def chosen_point(rows: GridRows) -> float | None:
    """The last accepted point; ``None`` leaves only what needs no verdict."""
    accepted = [row["point"] for row in rows if row["accepted"] is True]
    return float(accepted[-1]) if accepted else None


def problem_of(
    certificate: dict[str, Any], request: dict[str, Any], declared: Declared
) -> str | None:
    """What a certificate says otherwise than its request determines, or ``None``.

    Computed again are the split of δ, the step and the points of the grid, that the deterministic
    bounds cover the ceiling, and for every accepted point the bound M of its terms, the threshold
    that follows from M and the samples, and how many these may be.
    """
    if certificate["request"] != request:
        return "it answers another request"
    rule, rows, ceiling = declared.rule, certificate["grid"], certificate["ceiling"]
    expected = {
        **{key: request[key] for key in ("method", "law", "package")},
        "violated": rule.violated,
        "failure_probability": rule.failure,
        "delta_proved": rule.violated + attempts_of(request) * rule.failure * (1.0 - rule.violated),
        "step": declared.step,
    }
    for key, value in expected.items():
        if certificate[key] != value:
            return f"its {key} is {certificate[key]!r} where the request makes it {value!r}"
    whole_number(certificate["seed"])
    points = [row["point"] for row in rows]
    if wrong := _other_grid(points, rows, declared):
        return wrong
    if not (isinstance(ceiling, float) and 0.0 < ceiling < math.inf and declared.covers(ceiling)):
        return f"the deterministic bounds do not cover its ceiling, σ = {ceiling}"
    terms_at = declared.terms_at(ceiling)
    if rows and (wrong := _other_add(rows, terms_at, declared)):
        return wrong
    for row in rows:
        if row["accepted"] is not True:
            continue
        wrong = _unsupported(row["remove"], terms_at(row["point"])["remove"].ceiling, rule)
        if wrong:
            return f"the remove direction of its point {row['point']} {wrong}"
    if certificate["noise_multiplier"] != ceiling / declared.step ** (chosen_point(rows) or 0.0):
        return "its verdicts do not support its noise multiplier"
    return None


def _other_grid(points: list[Any], rows: GridRows, declared: Declared) -> str | None:
    """Why these are not the points of a declared grid up to the first rejection, or ``None``."""
    if any(not isinstance(row["accepted"], bool) for row in rows):
        return "a point is neither accepted nor rejected"
    if any(row["accepted"] is not True for row in rows[:-1]):
        return "it goes on after a rejection"
    if any(type(point) is not int or not 0 < point <= declared.most for point in points):
        return "its grid does not descend from its ceiling"
    # It may stop at a rejection, or at the last point where the add direction was accepted.
    stopped = bool(rows) and rows[-1]["accepted"] is not True
    limit = rows[-1]["add"].get("point") if rows and isinstance(rows[-1]["add"], dict) else None
    stopped = stopped or (bool(rows) and limit == points[-1])
    depths = {point + offset for point in points[:1] for offset in declared.offsets} or {0}
    for depth in depths:
        grid = declared_points(depth, declared.offsets)
        if points == grid or (stopped and points == grid[: len(points)]):
            return None
    return f"its points {points} are not those of a declared grid"


def _other_add(rows: GridRows, terms_at: Point, declared: Declared) -> str | None:
    """Why the add direction is not shown at a point of the grid from where on it holds, or None."""
    add, last = rows[0]["add"], rows[-1]["point"]
    # As text: 1 is not true here.
    if (
        not isinstance(add, dict)
        or len({json.dumps(row["add"], sort_keys=True) for row in rows}) > 1
    ):
        return "the add direction has no verdict for all of its points"
    point = add.get("point")
    grids = [
        declared_points(depth, declared.offsets)
        for depth in {rows[0]["point"] + offset for offset in declared.offsets}
    ]
    tested = [len(grid) for grid in grids if point in grid and last in grid]
    if type(point) is not int or point < last or not tested:
        return f"the add direction is shown at {point}, not at a point of its grid from {last} on"
    ceiling = terms_at(point)["add"].ceiling
    wrongs = [
        _unsupported(add, ceiling, declared.rule.shared(count)) for count in sorted(set(tested))
    ]
    return None if None in wrongs else f"the add direction of its point {point} {wrongs[0]}"


def _unsupported(side: dict[str, Any] | None, ceiling: float, rule: Rule) -> str | None:
    """Why an accepted direction should not have been, or ``None``."""
    if not isinstance(side, dict) or side["accepted"] is not True:
        return "has no verdict"
    # Another machine's last digits are as good.
    if not math.isclose(side["ceiling"], ceiling, rel_tol=1e-9):
        return f"has terms of at most {ceiling}, not {side['ceiling']}"
    samples, mean = side["samples"], side["mean"]
    unneeded = ceiling <= rule.violated
    if unneeded and (samples, mean) != (0, None):
        return "has samples where none are drawn"
    if not unneeded and not (type(samples) is int and rule.is_look(ceiling, samples)):
        return f"has {samples} samples, after which no verdict is due"
    threshold = rule.violated if unneeded else rule.threshold(ceiling, samples)
    if not math.isclose(side["threshold"], threshold, rel_tol=1e-6):
        return f"has the threshold {side['threshold']} and should have {threshold}"
    if not unneeded and not 0.0 <= mean <= threshold * (1.0 + 1e-9):
        return "has a mean above what its samples support"
    return None


def redrawn(certificate: dict[str, Any], declared: Declared) -> str | None:
    """What the seed does not give again, or ``None``: at the cost of the first time."""
    rows = certificate["grid"]
    points = [row["point"] for row in rows]
    again = declared.redraw(certificate["ceiling"], points, int(certificate["seed"]))
    return differing_verdict(rows, again, "point")
