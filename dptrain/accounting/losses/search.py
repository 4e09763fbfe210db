"""Root finding whose answer is always on the safe side."""

from __future__ import annotations

import math
from collections.abc import Callable

from dptrain.core import checks


def least_true(
    holds: Callable[[float], bool], *, low: float, high: float, tolerance: float
) -> float:
    """Bisect for the least x in [low, high] at which the monotone ``holds`` is true.

    The answer is a point at which ``holds`` was seen to be true (or ``high``, which the caller
    knows to be), at most ``tolerance`` above the least one: rounding is upwards.
    """
    checks.invariant(low <= high, "the lower end of a search is above its upper end")
    if holds(low):
        return low
    while high - low > tolerance:
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def least_scale(
    excess: Callable[[float], float],
    *,
    start: float,
    relative_tolerance: float,
    smallest: float,
    largest: float,
) -> float | None:
    """Least s > 0 with ``excess(s) <= 0`` for a decreasing ``excess``, rounded up.

    Works on log s: doubling until the root is bracketed, then secant steps that are nudged past
    the estimate so that the bracket closes from both sides, with bisection as the fallback.

    Returns:
        A point at which ``excess`` was seen to be ≤ 0, at most a factor 1 + ``relative_tolerance``
        above one at which it was seen to be > 0 (or ``smallest`` if it holds there), or ``None``
        if it does not hold at ``largest``.
    """
    high = min(max(start, smallest), largest)
    factor, at_high, at_low, low = 2.0, excess(high), math.nan, math.nan
    while at_high > 0:
        if high >= largest:
            return None
        low, at_low = high, at_high
        high, factor = min(high * factor, largest), factor**2
        at_high = excess(high)
    factor = 2.0
    while math.isnan(low):
        if high <= smallest:
            return high
        trial = max(high / factor, smallest)
        factor, value = factor**2, excess(trial)
        if value > 0:
            low, at_low = trial, value
        else:
            high, at_high = trial, value
    width, slow = math.log(high / low), 0
    while high > low * (1.0 + relative_tolerance):
        nudge = 0.4 * math.log1p(relative_tolerance)
        share = at_low / (at_low - at_high) if math.isfinite(at_low) and slow < 2 else math.nan
        if not math.isfinite(share):
            share, slow = 0.5, 0
        # Aim a little to the far side of the end that is still distant.
        toward = nudge if share < 0.5 else -nudge
        step = min(max(share * width + toward, nudge), width - nudge)
        trial = low * math.exp(step)
        value = excess(trial)
        if value > 0:
            low, at_low = trial, value
        else:
            high, at_high = trial, value
        slow = slow + 1 if math.log(high / low) > 0.5 * width else 0
        width = math.log(high / low)
    return high
