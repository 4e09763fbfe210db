"""A profile as it is published beside a guarantee: consistent with it, and no zero that is none."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dptrain.accounting import Profile
from dptrain.accounting.base import SMALLEST_DELTA, convex_envelope
from dptrain.core import Array, Guarantee, Kind

_BY_TRUST = (Kind.EXACT, Kind.UPPER_BOUND, Kind.VERIFIED, Kind.CONFIDENCE, Kind.ESTIMATE)
_DRAWN = 1000  # points of a curve: two or three to a pixel's column at most


def as_shown(profile: Profile, guarantee: Guarantee) -> Profile:
    """The profile of the guarantee's mechanism, with what the guarantee says itself.

    Where all values are bounds at once, the guarantee's ε and δ are one more of them: its ε joins
    the grid, and the values become those of the least chords in e^ε
    (docs/theory/certification.md#thm-confidence-curve). Of a curve that needed a guarantee which a
    simulation showed, the kind is CONFIDENCE and the chance of failure the sum of both.

    An exact curve, an estimate, and bounds that hold one by one keep their values: beyond the
    guarantee's ε they are at most its δ. What was computed less tightly is replaced by that; it is
    then shown as the weaker of the two was. If the guarantee is an estimate, so is the profile: it
    is about the same noise. A bound that vanished in double precision is ``SMALLEST_DELTA``.
    """
    beyond = profile.epsilon >= guarantee.epsilon
    lowered = any(
        (values[beyond] > guarantee.delta).any() for values in (profile.remove, profile.add)
    )
    exact = profile.kind is Kind.EXACT and (not lowered or guarantee.kind is Kind.EXACT)
    chance = _failure_probability(guarantee)
    if exact or not profile.holds_at_once or chance is None:
        shown = _capped(profile, guarantee, lowered=lowered)
    else:
        shown = _with_point(profile, guarantee, chance)
    if shown.kind is Kind.ESTIMATE:
        return shown
    remove, add = (np.maximum(values, SMALLEST_DELTA) for values in (shown.remove, shown.add))
    return dataclasses.replace(shown, remove=remove, add=add)


def _failure_probability(guarantee: Guarantee) -> float | None:
    """Chance over a simulation's draws that the mechanism is not (ε, δ)-DP; ``None`` if untold."""
    if guarantee.kind in (Kind.EXACT, Kind.UPPER_BOUND):
        return 0.0
    told = (guarantee.certificate or {}).get("failure_probability")
    if guarantee.kind is Kind.ESTIMATE or not isinstance(told, int | float):
        return None
    return float(told)


def _capped(profile: Profile, guarantee: Guarantee, *, lowered: bool) -> Profile:
    """The values of the points, beyond the guarantee's ε at most its δ."""
    together = profile.kind is not Kind.CONFIDENCE or profile.holds_at_once
    if profile.kind is Kind.CONFIDENCE:
        profile = _including(profile, guarantee.epsilon)
    beyond = profile.epsilon >= guarantee.epsilon
    found = [
        np.where(beyond, np.minimum(values, guarantee.delta), values)
        for values in (profile.remove, profile.add)
    ]
    if together:
        found = [np.minimum.accumulate(values) for values in found]
    kind, chance = profile.kind, profile.failure_probability
    if lowered or guarantee.kind is Kind.ESTIMATE:
        kind, chance = max(kind, guarantee.kind, key=_BY_TRUST.index), None
    return dataclasses.replace(
        profile, remove=found[0], add=found[1], kind=kind, failure_probability=chance
    )


def _with_point(profile: Profile, guarantee: Guarantee, chance: float) -> Profile:
    """The envelope of bounds that hold at once, and of the guarantee where it is below that."""
    profile = _including(profile, guarantee.epsilon)
    grid, sides = profile.epsilon, (profile.remove, profile.add)
    remove, add = (_envelope(grid, values) for values in sides)
    here = grid == guarantee.epsilon
    if not (np.maximum(remove, add)[here] > guarantee.delta).any():
        return dataclasses.replace(profile, remove=remove, add=add)
    remove, add = (
        _envelope(grid, np.where(here, np.minimum(values, guarantee.delta), values))
        for values in sides
    )
    kind, total = Kind.UPPER_BOUND, None
    if {profile.kind, guarantee.kind} & {Kind.CONFIDENCE, Kind.VERIFIED}:
        kind, total = Kind.CONFIDENCE, min((profile.failure_probability or 0.0) + chance, 1.0)
    return dataclasses.replace(
        profile, remove=remove, add=add, kind=kind, failure_probability=total
    )


def _including(profile: Profile, epsilon: float) -> Profile:
    """The same with one more ε, where the bound before it holds."""
    grid = profile.epsilon
    if not math.isfinite(epsilon) or (grid == epsilon).any():
        return profile
    place = int(np.searchsorted(grid, epsilon))
    remove, add = (
        np.insert(values, place, values[place - 1] if place else 1.0)
        for values in (profile.remove, profile.add)
    )
    return dataclasses.replace(
        profile, epsilon=np.insert(grid, place, epsilon), remove=remove, add=add
    )


def _envelope(epsilon: Array, delta: Array) -> Array:
    """``convex_envelope``, where nothing else is known from δ(0) ≤ 1 on."""
    return convex_envelope(np.append(0.0, epsilon), np.append(1.0, delta))[1:]


def chords(profile: Profile) -> Profile:
    """The curve through the points of a profile, on a grid that is fine enough to be drawn.

    Between confidence bounds that hold at once these are the chords in e^ε, which are all that is
    known there. Other profiles are drawn by the points that they have, as what was computed at
    these can be computed between them.
    """
    if profile.kind is not Kind.CONFIDENCE or not profile.holds_at_once:
        return profile
    first, last = profile.epsilon[[0, -1]]
    grid = np.union1d(profile.epsilon, np.linspace(first, last, _DRAWN))
    known = np.append(profile.epsilon, grid)
    remove, add = (
        convex_envelope(known, np.append(values, np.full(grid.shape, np.inf)))[-grid.size :]
        for values in (profile.remove, profile.add)
    )
    return dataclasses.replace(profile, epsilon=grid, remove=remove, add=add)


def chance(profile: Profile) -> str:
    """How likely it is that not all of its confidence bounds hold, as text, rounded up."""
    if profile.failure_probability is None:
        return ""
    value = profile.failure_probability
    unit = 10.0 ** (math.floor(math.log10(value)) - 1) if value > 0.0 else 1.0
    return f"{math.ceil(value / unit * (1.0 - 1e-12)) * unit:.2g}"


def rows_of(profile: Profile, count: int) -> list[tuple[str, str, str]]:
    """ε and both δ at so many points of the grid, spread evenly, as text.

    The digits are those of the guarantee's sentence, so that rounding does not part the two.
    """
    rows = np.unique(np.linspace(0, len(profile.epsilon) - 1, count).round().astype(int))
    return [
        (f"{profile.epsilon[i]:.6g}", _delta(profile.remove[i]), _delta(profile.add[i]))
        for i in rows
    ]


def _delta(value: float) -> str:
    return f"≤ {SMALLEST_DELTA:g}" if 0 < value <= SMALLEST_DELTA else f"{value:.6g}"
