"""A profile as it is published beside a guarantee: consistent with it, and no zero that is none."""

from __future__ import annotations

import dataclasses

import numpy as np

from dptrain.accounting import Profile
from dptrain.accounting.base import SMALLEST_DELTA
from dptrain.core import Guarantee, Kind

_BY_TRUST = (Kind.EXACT, Kind.UPPER_BOUND, Kind.VERIFIED, Kind.CONFIDENCE, Kind.ESTIMATE)


def as_shown(profile: Profile, guarantee: Guarantee) -> Profile:
    """The profile of the guarantee's mechanism, with what the guarantee says itself.

    δ falls as ε grows, in either direction, so beyond the guarantee's ε it is at most the
    guarantee's δ, and beyond any point of the grid at most the δ there (but of confidence bounds
    each may be false by itself). What was computed less tightly is replaced by that; it is then
    shown as the weaker of the two was. If the guarantee is an estimate, so is the profile: it is
    about the same noise. A bound that vanished in double precision is ``SMALLEST_DELTA``.
    """
    beyond = profile.epsilon >= guarantee.epsilon
    found = [
        np.where(beyond, np.minimum(values, guarantee.delta), values)
        for values in (profile.remove, profile.add)
    ]
    if profile.kind is not Kind.CONFIDENCE:
        found = [np.minimum.accumulate(values) for values in found]
    kind = profile.kind
    borrowed = any(
        (values[beyond] > guarantee.delta).any() for values in (profile.remove, profile.add)
    )
    if borrowed or guarantee.kind is Kind.ESTIMATE:
        kind = max(profile.kind, guarantee.kind, key=_BY_TRUST.index)
    if kind is not Kind.ESTIMATE:
        found = [np.maximum(values, SMALLEST_DELTA) for values in found]
    return dataclasses.replace(profile, remove=found[0], add=found[1], kind=kind)


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
