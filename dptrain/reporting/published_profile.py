"""A profile as it is published beside a guarantee: consistent with it, and no zero that is none."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from dptrain.accounting import Profile
from dptrain.accounting.base import SMALLEST_DELTA, convex_envelope
from dptrain.core import Guarantee, Kind

_BY_TRUST = (Kind.EXACT, Kind.UPPER_BOUND, Kind.VERIFIED, Kind.CONFIDENCE, Kind.ESTIMATE)
_DRAWN = 1000  # points of a curve: about one to a pixel's column


def as_shown(profile: Profile, guarantee: Guarantee) -> Profile:
    """The profile of the guarantee's mechanism, with what the guarantee says itself.

    Where all values are bounds at once, the guarantee's ε and δ are one more of them: its ε joins
    the grid, and the values become those of the least chords in e^ε
    (docs/theory/certification.md#thm-confidence-curve). Of a curve that needed a guarantee which a
    simulation showed, the kind is CONFIDENCE and the chance of failure the sum of both.

    Exact curves, estimates, bounds that hold one by one, and bounds above a guarantee whose chance
    of failure is not told keep their values up to its ε; beyond it they are at most its δ. What was
    computed less tightly is replaced by that; it is then shown as the weaker of the two was. If the
    guarantee is an estimate, so is the profile: it is about the same noise. A bound that vanished
    in double precision is ``SMALLEST_DELTA``.

    Raises:
        ValueError: if the profile is about another adjacency, unit or mechanism.
    """
    profile.check_about(guarantee)
    if profile.kind in (Kind.UPPER_BOUND, Kind.CONFIDENCE) and guarantee.kind is not Kind.ESTIMATE:
        profile = _including(profile, guarantee.epsilon)
        if profile.holds_at_once:
            profile = _enveloped(profile)
    needed, chance = _above(profile, guarantee), _failure_probability(guarantee)
    exact = profile.kind is guarantee.kind is Kind.EXACT
    if needed and profile.holds_at_once and chance is not None and not exact:
        shown = _through(profile, guarantee, chance)
    else:
        shown = _capped(profile, guarantee, needed=needed)
    return shown if shown.kind is Kind.ESTIMATE else positive(shown)


def positive(profile: Profile) -> Profile:
    """The profile, with ``SMALLEST_DELTA`` where a bound vanished in double precision."""
    remove, add = (np.maximum(values, SMALLEST_DELTA) for values in (profile.remove, profile.add))
    return dataclasses.replace(profile, remove=remove, add=add)


def _above(profile: Profile, guarantee: Guarantee) -> bool:
    """True if a δ beyond the guarantee's ε is above the guarantee's."""
    return bool((profile.delta[profile.epsilon >= guarantee.epsilon] > guarantee.delta).any())


def _failure_probability(guarantee: Guarantee) -> float | None:
    """Chance over a simulation's draws that the mechanism is not (ε, δ)-DP; ``None`` if untold."""
    if guarantee.kind in (Kind.EXACT, Kind.UPPER_BOUND):
        return 0.0
    told = (guarantee.certificate or {}).get("failure_probability")
    if guarantee.kind is Kind.ESTIMATE or not isinstance(told, int | float):
        return None
    return float(told)


def _capped(profile: Profile, guarantee: Guarantee, *, needed: bool) -> Profile:
    """The profile at its own points, with δ at most the guarantee's beyond the guarantee's ε."""
    beyond = profile.epsilon >= guarantee.epsilon
    found = [
        np.where(beyond, np.minimum(values, guarantee.delta), values)
        for values in (profile.remove, profile.add)
    ]
    if profile.kind is not Kind.CONFIDENCE:
        found = [np.minimum.accumulate(values) for values in found]
    kind, chance = profile.kind, profile.failure_probability
    if needed or guarantee.kind is Kind.ESTIMATE:
        kind, chance = max(kind, guarantee.kind, key=_BY_TRUST.index), None
    return dataclasses.replace(
        profile, remove=found[0], add=found[1], kind=kind, failure_probability=chance
    )


def _through(profile: Profile, guarantee: Guarantee, chance: float) -> Profile:
    """The envelope of bounds that hold at once, among them the guarantee's."""
    profile = _including(profile, guarantee.epsilon)
    here = profile.epsilon == guarantee.epsilon
    remove, add = (
        np.where(here, np.minimum(values, guarantee.delta), values)
        for values in (profile.remove, profile.add)
    )
    kind, total, name = Kind.UPPER_BOUND, None, profile.accountant
    if {profile.kind, guarantee.kind} & {Kind.CONFIDENCE, Kind.VERIFIED}:
        kind, total = Kind.CONFIDENCE, min((profile.failure_probability or 0.0) + chance, 1.0)
        name = ", ".join(dict.fromkeys((name, guarantee.accountant)))
    bounds = dataclasses.replace(
        profile,
        remove=remove,
        add=add,
        kind=kind,
        failure_probability=total,
        accountant=name,
    )
    return _enveloped(bounds)


def _including(profile: Profile, epsilon: float) -> Profile:
    """The profile with one more ε, at which it has the bound of the point before."""
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


def _enveloped(profile: Profile) -> Profile:
    """``convex_envelope`` of each direction, where nothing else is known from δ(0) ≤ 1 on."""
    at = np.append(0.0, profile.epsilon)
    remove, add = (
        convex_envelope(at, np.append(1.0, values))[1:] for values in (profile.remove, profile.add)
    )
    return dataclasses.replace(profile, remove=remove, add=add)


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
    """The chance that not all of its confidence bounds hold, as text, rounded up."""
    if profile.failure_probability is None:
        return ""
    value = profile.failure_probability
    unit = 10.0 ** (math.floor(math.log10(value)) - 1) if value > 0.0 else 1.0
    return f"{math.ceil(value / unit * (1.0 - 1e-12)) * unit:.2g}"


def read_profile(value: Any) -> Profile:
    """The profile that a statement or ``dptrain account --json`` holds.

    Raises:
        ValueError: if a column or a name is missing, or the columns are no such numbers.
    """
    try:
        remove = value["delta_remove"] if "delta_remove" in value else value["remove"]
        add = value["delta_add"] if "delta_add" in value else value["add"]
        at, remove, add = (np.asarray(each, float) for each in (value["epsilon"], remove, add))
        kind, accountant = Kind(value["kind"]), str(value["accountant"])
        chance = value.get("failure_probability")
        chance = None if chance is None else float(chance)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its profile cannot be read ({error})") from error
    if len({each.shape for each in (at, remove, add)}) > 1 or not all(
        np.isfinite(each).all() and (each >= 0).all() for each in (at, remove, add)
    ):
        raise ValueError(
            "its profile cannot be read: the numbers of ε and δ differ, or some are not numbers"
        )
    return Profile(at, remove, add, kind, accountant, chance)


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
