"""Messages that have settled, found without running through the steps, and the bound they give."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dptrain.accounting.min_sep.moments.kernel import available
from dptrain.accounting.min_sep.moments.states import state_count
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.core import Array, checks

ORDERS = (2, 3, 4)  # whose states ``settled_kernel`` can number
# A run of fewer periods is for the most part its two ends, at which the bound gives something away.
_LEAST_PERIODS = 8
USUAL_SWEEPS, _MOST_SWEEPS = 8, 64
_UNEVEN = 1e-6  # of log A, in all steps: no sweep is made for less
_HOPELESS = 200.0  # of log A: beyond it nothing is worth a sweep
_UNIT = 2.0**-53


def covers(law: MinSepLaw, order: int) -> bool:
    """True if there are settled messages of a law: many periods, p < 1, and compiled code."""
    many = law.steps >= _LEAST_PERIODS * law.min_sep
    return order in ORDERS and many and law.probability < 1.0 and available()


def bytes_needed(law: MinSepLaw, order: int) -> int:
    """Memory of the messages and of a sweep."""
    return 16 * state_count(law.min_sep, order)


def usual_work(law: MinSepLaw, order: int) -> int:
    """Values of as many sweeps as there are mostly."""
    return USUAL_SWEEPS * state_count(law.min_sep, order)


def full_gram(law: MinSepLaw, sigma: float) -> Array:
    """<c_t, c_{t-d}>/σ² of whole columns for d = 0..b-1, rounded up."""
    found = np.zeros(law.min_sep)
    found[: law.bands] = law.column_products[law.bands] / sigma**2
    return found * (1.0 + (2 * law.bands + 8) * _UNIT)


def chances_of(law: MinSepLaw, order: int) -> Array:
    """[f, j] = C(f, j) p^j (1-p)^{f-j}."""
    p, found = law.probability, np.zeros((order + 1, order + 1))
    for free in range(order + 1):
        for taking in range(free + 1):
            chance = math.comb(free, taking) * p**taking * (1.0 - p) ** (free - taking)
            found[free, taking] = chance
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Settled:
    """Positive numbers h, one for each state with a free copy, that hardly grow in a step.

    A state without one has that of the state that it waits for, over ``growth`` for each step of
    the wait. With T the step of the program over ages in which no column is cut and overlaps reach
    back before step 0, Th/h is at most λ for all states. So A ≤ λ^n E[h(start)]/min h
    (docs/theory/min-sep.md#thm-min-sep-settled;
    ``test_settled_moments_are_above_the_sum_over_tuples_of_patterns``).

    Attributes:
        messages: h, shape (states,), largest wait last; 1 where all copies are free.
        growth: of a step without a free copy.
        uneven: relative distance of Th/h and ``growth``.
        log_start: log E[h(start)].
        log_least: log of a lower bound of h, states without a free copy included.
        log_most: log of an upper bound, likewise.
        log_moment: the bound on log A, rounded up; ∞ where nothing settled.
    """

    messages: Array
    growth: float
    uneven: float
    log_start: float
    log_least: float
    log_most: float
    log_moment: float


def settle(law: MinSepLaw, sigma: float, order: int) -> Settled:
    """Settled messages of a law that is covered, at σ > 0.

    Given what participation adds, the messages of all states follow from each other as they age, in
    one sweep; sweeps are repeated until the growth of all is the same. Whatever they are in the
    end, they bound.
    """
    from dptrain.accounting.min_sep.moments import settled_kernel as kernel

    checks.invariant(
        covers(law, order),
        "the moment is of a law or an order that the settled program does not cover",
    )
    b, n = law.min_sep, law.steps
    gram, chances = full_gram(law, sigma), chances_of(law, order)
    stay = chances[:, 0].copy()
    h = np.ones(state_count(b, order))
    part, growth, high = np.empty_like(h), 1.0, math.inf
    for sweep in range(_MOST_SWEEPS + 1):
        kernel.join(order, b, chances, gram, growth, h, part)
        found = float(stay[order] + part[0])
        last = sweep == _MOST_SWEEPS or n * math.log(found) > _HOPELESS
        if last or n * abs(found - growth) <= _UNEVEN:
            # Th in place of the part; what is proven is about these h and this growth.
            kernel.age(order, b, stay, part, 1.0, h, part)
            part[0] = found
            low, high = kernel.growths(part, h)
            low, high = min(low, growth), max(high, growth)
            if last or n * (high / low - 1.0) <= _UNEVEN:
                break
            kernel.join(order, b, chances, gram, growth, h, part)
        growth = found
        kernel.age(order, b, stay, part, 1.0 / growth, h, h)
    bars = b - 1 if law.warm_start else 0
    start, wait = float(h[0]), (b - 1) * math.log(growth)
    if bars:
        start = kernel.start_total(order, b, law.probability, growth, h)
        start /= (1.0 + bars * law.probability) ** order
    log_start = math.log(start)
    log_least = math.log(float(h.min())) - max(wait, 0.0)
    log_most = math.log(float(h.max())) - min(wait, 0.0)
    # Th errs by less than this (relatively) in each of n steps, E[h(start)] by one of b² sums.
    exponent = order * (order - 1) * float(gram.max()) + abs(wait)
    error = 2.0 * (n + 10) * (order + 4) * (exponent + 6.0) * _UNIT + 4 * (b + 2) ** 2 * _UNIT
    bound = n * math.log(high) * (1.0 + 4.0 * _UNIT) + log_start - log_least
    hopeless = not bound < _HOPELESS
    return Settled(
        messages=h,
        growth=growth,
        uneven=high / low - 1.0,
        log_start=log_start,
        log_least=log_least,
        log_most=log_most,
        log_moment=math.inf if hopeless else max(bound, 0.0) + error,
    )
