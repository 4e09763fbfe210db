"""From Rényi divergences of integer orders to (ε, δ) and back, with real orders between them.

log A_α = log E_Q[(P/Q)^α] is convex in α and 0 at α = 1, so between two orders it is at most their
chord, also where both are only bounded from above (docs/theory/composition.md#thm-renyi-chords;
``test_chords_are_above_the_divergence_and_their_best_order_is_found``).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import xlogy

from dptrain.core import Array


def log_delta_from_renyi(divergence: Array, epsilon: float) -> tuple[float, float]:
    """log δ at ε and the real order that gives it (Canonne et al. 2020, Prop. 12).

    ``divergence`` holds R_α at index α, ∞ where unknown; entries 0 and 1 are not used.
    """
    orders, moments, start, slope = _segments(divergence)
    # On a chord the bound is convex in α; its derivative slope - ε + log(1 - 1/α) is 0 here.
    gap = slope - epsilon
    with np.errstate(over="ignore", divide="ignore"):
        inner = np.where(gap > 0.0, -1.0 / np.expm1(-gap), np.inf)
    inner = np.clip(inner, start, start + 1.0)
    at = np.concatenate((orders, inner))
    log_moment = np.concatenate((moments, _on_chords(inner, start, moments, orders, slope)))
    value = log_moment - (at - 1.0) * epsilon + _term(at)
    if not value.size:
        return 0.0, 2.0
    best = int(np.argmin(value))
    return min(float(value[best]), 0.0), float(at[best])


def epsilon_from_renyi(divergence: Array, delta: float) -> tuple[float, float]:
    """Least ε ≥ 0 at δ and the real order that gives it; the inverse of the above."""
    orders, moments, start, slope = _segments(divergence)
    if not orders.size:
        return math.inf, 2.0
    # With log A_α = a + slope (α-1) on a chord, ε falls in α up to e^a/δ and grows from there.
    first = _on_chords(start, start, moments, orders, slope)
    level = first - slope * (start - 1.0) - math.log(delta)
    inner = np.clip(np.exp(np.minimum(level, 700.0)), start, start + 1.0)
    at = np.concatenate((orders, inner))
    log_moment = np.concatenate((moments, _on_chords(inner, start, moments, orders, slope)))
    usable = at > 1.0
    at, log_moment = at[usable], log_moment[usable]
    value = (log_moment + _term(at) - math.log(delta)) / (at - 1.0)
    best = int(np.argmin(value))
    return max(float(value[best]), 0.0), float(at[best])


def _segments(divergence: Array) -> tuple[Array, Array, Array, Array]:
    """Known orders and their log A; lower ends and slopes of the chords between neighbors."""
    orders = np.arange(2.0, divergence.size)
    known = np.isfinite(divergence[2:])
    moments = np.concatenate(([0.0], (orders - 1.0) * divergence[2:]))
    both = known & np.concatenate(([True], known[:-1]))
    start = orders[both] - 1.0
    place = start.astype(np.int64) - 1
    slope = moments[place + 1] - moments[place]
    return orders[known], moments[1:][known], start, slope


def _on_chords(at: Array, start: Array, moments: Array, orders: Array, slope: Array) -> Array:
    """The chords' values at one order on each."""
    # Order 1 has log A = 0; the lower end of every other chord is a known order.
    ends = np.concatenate(([0.0], moments))[np.searchsorted(orders, start, side="right")]
    ends = np.where(start == 1.0, 0.0, ends)
    return np.asarray(ends + (at - start) * slope)


def _term(orders: Array) -> Array:
    """log[(1 - 1/α)^α/(α-1)], 0 at α = 1."""
    return np.asarray(xlogy(orders - 1.0, orders - 1.0) - orders * np.log(orders))
