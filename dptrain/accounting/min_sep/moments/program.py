"""log E_Q[(P/Q)^α] of b-min-sep sampling, and which orders α a machine can compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tqdm.auto import tqdm

from dptrain.accounting.min_sep.moments import periodic, settled
from dptrain.accounting.min_sep.moments.kernel import StepWeights, available
from dptrain.accounting.min_sep.moments.settled import full_gram
from dptrain.accounting.min_sep.moments.states import States, state_count, waiting_count
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.core import Array, checks

# Memory of one order, in bytes, and work, in values (roughly 3e8 a second compiled, 3e7 plain).
MOST_BYTES = 2 << 30
MOST_WORK, MOST_PLAIN_WORK = 4 * 10**9, 3 * 10**8
_MOST_COPIES = 8
# Weights up to e^300 on values up to 1e100 stay within float64.
_LARGEST_EXPONENT, _LARGEST_VALUE, _LEAST_VALUE = 300.0, 1e100, 1e-200
NO_WORK = 5 * 10**6
"""Values of a program that takes no time to speak of."""
LARGEST_ORDER = 1000
"""Of moments that are bounded by fewer copies: larger ones show δ below 1e-100 or nothing."""
# What skipping settled steps may add to log A, in all; a cost is part of a bound that gives more.
_SETTLED, _SETTLED_WITH_COST = 1e-8, 1e-4
# Steps after which levels have usually settled, in units of b.
_USUALLY = 8
_UNIT = 2.0**-53


# Values of the program above which periodic laws take the sums over pairs and triples.
_MANY = 10**7
# Values of the program above which settled messages alone bound runs of so many periods: what they
# give away is that of a period, of so many.
_LONG_WORK, _LONG_PERIODS = 10**8, 64


def _periodic(law: MinSepLaw, order: int) -> bool:
    many = state_count(law.min_sep, order) * law.steps > _MANY
    return many and periodic.covers(law, order)


def settles(law: MinSepLaw, order: int) -> bool:
    """True if an order is bounded by settled messages alone: too large a program, or too long."""
    if not settled.covers(law, order) or settled.bytes_needed(law, order) > MOST_BYTES:
        return False
    work = least_work(law, order)
    long = law.steps >= _LONG_PERIODS * law.min_sep and work > _LONG_WORK
    return long or work > _most_work() or bytes_needed(law, order) > MOST_BYTES


def bounded_by(law: MinSepLaw, order: int) -> str | None:
    """The reason why ``log_moment`` exceeds the moment; ``None`` if only rounding does that."""
    if _periodic(law, order):
        return None if order == periodic.EXACT else "pairs and triples of bins"
    return "settled messages" if settles(law, order) else None


class Affordable(NamedTuple):
    """Limit on the orders of a law at one σ.

    Attributes:
        largest: the largest order that can be computed, 1 if there is none.
        reason: why the next one cannot, in words.
    """

    largest: int
    reason: str


def bytes_needed(law: MinSepLaw, order: int) -> int:
    """Memory of the program: tables and two levels, what waits, and what making tables takes."""
    states = state_count(law.min_sep, order)
    return (60 + 16 * order) * states + 8 * waiting_count(law.min_sep, order)


def least_work(law: MinSepLaw, order: int) -> int:
    """Values of the program if levels settle as early as they usually do.

    Steps near the ends, where columns are cut or have nothing before them, never settle.
    """
    steps = min(law.steps, 2 * law.bands + _USUALLY * law.min_sep)
    return state_count(law.min_sep, order) * steps


def _most_work() -> int:
    return MOST_WORK if available() else MOST_PLAIN_WORK


def affordable(law: MinSepLaw, sigma: float, most_work: int | None = None) -> Affordable:
    """The largest order within ``MOST_BYTES``, the limit on work, and float64."""
    scaled = float(law.squared_norms[0]) / sigma**2
    most_work = min(_most_work(), most_work or _most_work())
    for order in range(2, _MOST_COPIES + 1):
        size, b = bytes_needed(law, order), law.min_sep
        quick = settles(law, order) and settled.usual_work(law, order) <= most_work
        if _periodic(law, order) or quick:
            if order * (order - 1) * scaled <= _LARGEST_EXPONENT:
                continue
            reason = f"has weights beyond e^{_LARGEST_EXPONENT:g} at σ = {sigma:.3g}"
        elif size > MOST_BYTES:
            reason = f"takes {size / 2**30:.3g} GiB at b = {b}, more than {MOST_BYTES / 2**30:.3g}"
        elif (work := least_work(law, order)) > most_work:
            reason = f"takes {work:.2g} values at b = {b} and n = {law.steps}, over {most_work:.2g}"
        elif order * (order - 1) * scaled > _LARGEST_EXPONENT:
            reason = f"has weights beyond e^{_LARGEST_EXPONENT:g} at σ = {sigma:.3g}"
        else:
            continue
        return Affordable(order - 1, f"order {order} {reason}")
    return Affordable(_MOST_COPIES, f"orders above {_MOST_COPIES} are not tried")


def log_moment(
    law: MinSepLaw,
    sigma: float,
    order: int,
    *,
    cost: Array | None = None,
    compiled: bool | None = None,
    progress: bool = False,
) -> float:
    """log E_Q[(P/Q)^α], rounded up; ∞ where its terms do not fit float64, or the limit on work.

    With a ``cost`` it is log E exp(Σ_{k<l} <Cx^k, Cx^l>/σ² - Σ_k <cost, x^k>) of α copies x^k of an
    example's pattern (docs/theory/min-sep.md#thm-min-sep-large-orders), which is that moment if the
    cost is 0. Where something bounds it (``bounded_by``), that is little above it.

    A backward program over multisets of the ages of α copies. States without a free copy are not
    computed: nothing happens until their oldest copy is free. Where the levels of b steps in turn
    grow by the same factor, the steps left of a homogeneous stretch are skipped at the largest
    growth seen (docs/theory/min-sep.md#thm-min-sep-reduced;
    ``test_reduced_moments_equal_the_sum_over_tuples_of_patterns``).

    Args:
        law: the sampling law.
        sigma: σ > 0.
        order: α ≥ 2, an integer.
        cost: of taking part at a step, non-negative, shape (steps,), rounded down; the same at all
            steps whose columns are neither cut nor without columns before them.
        compiled: whether to use numba; by default if it can be imported.
        progress: whether to show a bar after two seconds.
    """
    checks.invariant(order >= 2, "the moment is of order 2 or higher")
    if cost is None and compiled is None and _periodic(law, order):
        return periodic.log_moment(law, sigma, order)
    if cost is None and compiled is None and settles(law, order):
        return settled.settle(law, sigma, order).log_moment
    compiled = available() if compiled is None else compiled
    states = States.of(law.min_sep, order)
    cost = np.zeros(law.steps) if cost is None else cost
    return _MomentProgram(law, sigma, states, order, cost, compiled=compiled).log_moment(
        progress=progress
    )


def log_large_moment(law: MinSepLaw, sigma: float, order: int, copies: int) -> float:
    """log E_Q[(P/Q)^α] from above, by the moment of fewer copies at less noise.

    (docs/theory/min-sep.md#thm-min-sep-large-orders;
    ``test_large_orders_are_above_the_sum_over_tuples_of_patterns``.)

    Args:
        law: the sampling law.
        sigma: σ > 0.
        order: α.
        copies: from 2 to α; more take more time, and give less away.
    """
    less = sigma * math.sqrt((copies - 1) / (order - 1)) * (1.0 - 4.0 * _UNIT)
    return order / copies * log_moment(law, less, copies) * (1.0 + 4.0 * _UNIT)


def rough_large_moments(law: MinSepLaw, sigma: float, second: float) -> dict[int, float]:
    """About what ``log_large_moment`` gives with two copies, by log A of order 2; no bound.

    Few participations of two copies overlap: log A of two is near a sum over the distances of
    those that do.
    """
    gram = full_gram(law, sigma)
    weights = np.where(np.arange(gram.size) > 0, 2.0, 1.0)
    orders = np.arange(2, LARGEST_ORDER)
    orders = orders[(orders - 1) * gram[0] <= _LARGEST_EXPONENT / 2]
    if not len(orders):
        return {}
    sums = np.expm1((orders[:, None] - 1) * gram[: law.bands]) @ weights[: law.bands]
    return dict(zip(orders.tolist(), (orders / 2 * second * sums / sums[0]).tolist(), strict=True))


def most_copies(law: MinSepLaw, work: int) -> int:
    """The most copies, 2 to 4, whose program takes so many values as a rule; 2 at least."""
    return max(copies for copies in (2, 3, 4) if copies == 2 or least_work(law, copies) <= work)


def foreseen(moments: Sequence[float]) -> float:
    """The log A of the next order, from those of orders 1, 2, …: as if third differences were 0.

    It is convex in the order, and so is its slope for the most part: mostly the true one is larger.
    """
    if len(moments) == 2:
        return 2.0 * moments[-1] - moments[-2]
    return 3.0 * moments[-1] - 3.0 * moments[-2] + moments[-3]


class _MomentProgram:
    def __init__(
        self,
        law: MinSepLaw,
        sigma: float,
        states: States,
        order: int,
        cost: Array,
        *,
        compiled: bool,
    ) -> None:
        self._law, self._sigma, self._order, self._states = law, sigma, order, states
        self._cost = cost
        self._weights = StepWeights(states, law.probability, compiled=compiled)
        count = int(states.starts[-1])
        self._after, self._new = np.ones(count), np.empty(count)
        self._lines = np.ones(int(np.arange(1, law.min_sep + 1) @ np.diff(states.starts)))
        self._scale, self._top = 0.0, 1.0
        self._largest_exponent = 0.0

    def _gram(self, t: int) -> Array:
        """<c_t, c_{t-d}>/σ² for d = 0..b-1, rounded up; 0 for what was before the first step."""
        return self._law.overlaps(t) / self._sigma**2 * (1.0 + (2 * self._law.bands + 8) * _UNIT)

    def _compute_weights(self, t: int) -> None:
        gram = self._gram(t)
        exponent = self._order * ((self._order - 1) * float(gram.max()) + float(self._cost[t]))
        self._largest_exponent = max(self._largest_exponent, exponent)
        self._weights.compute(gram, float(self._cost[t]))

    def _step(self, tick: int) -> None:
        self._top = self._weights.advance(self._after, self._lines, tick, self._new)
        self._after, self._new = self._new, self._after

    def _fits(self) -> bool:
        """Bring values back to where weights cannot overflow; False if they are too far apart."""
        if self._top <= _LARGEST_VALUE:
            return True
        power = math.frexp(self._top)[1]
        for values in (self._after, self._lines):
            values *= 2.0**-power  # exact, unless it comes near the smallest numbers
            if float(values.min()) < _LEAST_VALUE:
                return False
        self._scale += power * math.log(2.0)
        self._top *= 2.0**-power
        return True

    def log_moment(self, *, progress: bool) -> float:
        """Run from the last step to the first."""
        law = self._law
        n, b, bands = law.steps, law.min_sep, law.bands
        first, last = bands - 1, n - bands  # the homogeneous steps
        if self._order * (self._order - 1) * float(self._gram(0).max()) > _LARGEST_EXPONENT:
            return math.inf
        # No pattern takes part more often: values stay above e^-300.
        if self._order * -(-n // b) * float(self._cost.max()) > _LARGEST_EXPONENT:
            return math.inf
        checks.invariant(
            first >= last or float(np.ptp(self._cost[first : last + 1])) == 0.0,
            "the cost of taking part is the same at all homogeneous steps",
        )
        left = _most_work() // self._new.size
        tolerated = _SETTLED_WITH_COST if self._cost.any() else _SETTLED
        t, tick = n - 1, 0
        allowed, low, high, window = 0.0, math.inf, 0.0, 0
        with tqdm(
            total=n, desc=f"moment of order {self._order}", unit="step", disable=not progress,
            delay=2.0, leave=False,
        ) as bar:  # fmt: skip
            while t >= 0:
                if not first <= t < last:
                    self._compute_weights(t)
                if -tick >= left:
                    return math.inf  # settles later than hoped for
                tick -= 1
                self._step(tick)
                bar.update()
                # ``_new`` is the level before; both have the same scale here.
                if first < t <= last - b and (window or (last - t) % b == 0):
                    ratio = self._after / self._new
                    low, high = min(low, float(ratio.min())), max(high, float(ratio.max()))
                    window += 1
                    allowed = (t - first) * math.log(high / low)
                    if allowed > tolerated:
                        low, high, window = math.inf, 0.0, 0
                    elif window == b:
                        # Every value of the last b levels grew by ``high`` at most.
                        self._scale += (t - first) * math.log(high * (1.0 + 2.0 * _UNIT))
                        bar.update(t - first)
                        t = first
                if not self._fits():
                    return math.inf
                t -= 1
        return self._finish(tick)

    def _finish(self, tick: int) -> float:
        """log of the mean over the ages before the first step, plus what rounding may have lost."""
        law, states = self._law, self._states
        b, p = law.min_sep, law.probability
        if not law.warm_start:
            value = float(self._after[-1])
        else:
            # A copy is free with weight 1 and barred at each of the b-1 ages with weight p.
            total = float((p ** (self._order - states.free_of) * states.orderings) @ self._after)
            offset = 0
            for block in range(b):
                rows = slice(states.starts[block], states.starts[block + 1])
                size = rows.stop - rows.start
                lines = self._lines[offset : offset + (block + 1) * size].reshape(-1, size)
                offset += (block + 1) * size
                # States without a free copy wait for one of the levels 1..block.
                waiting = lines.sum(axis=0) - lines[tick % (block + 1)]
                total += p**self._order * float(states.orderings[rows] @ waiting)
            value = total / (1.0 + (b - 1) * p) ** self._order
        # A step's weights and sums err by less than this (relatively), skipped ones by as much.
        steps = law.steps + b + 10
        error = 2.0 * steps * (self._order + 4) * (self._largest_exponent + 6.0) * _UNIT
        found = self._scale + math.log(value)
        if not self._cost.any():
            found = max(found, 0.0)
        return found + error + 4e-16 * abs(self._scale)
