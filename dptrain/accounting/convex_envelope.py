"""What upper bounds on a privacy profile say together: its lower convex envelope."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def convex_envelope(epsilon: Array, delta: Array) -> Array:
    """The least of the bounds and of the chords between them, as functions of e^ε.

    δ(ε) is the greatest P[S] - e^ε Q[S] of all events (and worlds, where there are several): a
    supremum of falling straight lines in e^ε. So it falls and is convex there, and whatever bounds
    it from above at two ε does so, by their chord, between them. Bounds of different proofs, or
    numbers that were rounded up to different extents, need not look like that: this makes them.

    Args:
        epsilon: ascending, shape (n,).
        delta: upper bounds on δ at these, shape (n,).

    Returns:
        Upper bounds that are no greater, fall, and are convex in e^ε up to rounding, shape (n,).
    """
    at, place = np.unique(epsilon, return_inverse=True)
    least = np.full(at.shape, np.inf)
    np.minimum.at(least, place, delta)
    least = np.minimum.accumulate(least)
    hull: list[int] = []
    for new in range(at.size):
        # A corner above the chord of its neighbours goes: the steeper part must come first.
        while len(hull) > 1 and _steepness(at, least, hull[-2], hull[-1]) <= _steepness(
            at, least, hull[-1], new
        ):
            hull.pop()
        hull.append(new)
    cell = np.clip(np.searchsorted(hull, np.arange(at.size), side="right") - 1, 0, None)
    left = np.array(hull)[cell]
    right = np.array([*hull[1:], hull[-1]])[cell]
    with np.errstate(divide="ignore", invalid="ignore"):
        # (e^ε - e^a)/(e^b - e^a), which neither overflows nor cancels.
        share = np.exp(at - at[right]) * np.expm1(at[left] - at) / np.expm1(at[left] - at[right])
    share = np.where(left == right, 0.0, share)
    chord = least[left] * (1.0 - share) + least[right] * share
    # The chord's own rounding: a few parts of its greater end.
    chord += 4.0 * np.finfo(float).eps * least[left]
    return np.asarray(np.minimum(least, chord)[place])


def _steepness(epsilon: Array, delta: Array, left: int, right: int) -> float:
    """Logarithm of the fall per unit of e^ε."""
    fall, gap = delta[left] - delta[right], epsilon[right] - epsilon[left]
    if fall <= 0.0:
        return -math.inf
    return float(math.log(fall) - epsilon[right] - math.log(-math.expm1(-gap)))
