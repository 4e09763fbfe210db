"""Compiled draws from (P/Q)^α Q/A of b-min-sep sampling, and the losses of what is drawn."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dptrain.accounting.min_sep import engine_compiled as compiled
from dptrain.accounting.min_sep.moments.settled import chances_of
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.core import Array, checks

LEVEL_BYTES = 1 << 30
START_BYTES = 64 << 20  # of weights of waits before the first step that are kept
# Messages are called settled when in b steps in a row all of them grow by one factor, but for so
# much (relatively) that all settled steps together change what is drawn by less than _UNSETTLED in
# total variation; no more than rounding allows, and never less than _SETTLED.
_UNSETTLED, _SETTLED, _AT_MOST = 1e-7, 2e-14, 1e-11
_NEVER = -800.0  # below the logarithm of any uniform number drawn


def states(law: MinSepLaw, order: int) -> int:
    """Number of states with a free copy: multisets of α-1 waits."""
    return math.comb(law.min_sep + order - 2, order - 1)


def fits(law: MinSepLaw, order: int) -> bool:
    """True if the messages fit into memory even if they never settle."""
    return 8 * states(law, order) * (law.steps + 1) <= LEVEL_BYTES


class TiltedPatterns:
    """α copies of one example's participations under their tilted law, drawn by compiled code.

    A state is the multiset of the copies' waits until they are free, and only states with a free
    copy count: from any other nothing happens until the first copy is free
    (docs/theory/min-sep.md#thm-min-sep-moments;
    ``test_compiled_draws_have_the_tilted_law``). The messages of the backward program are kept for
    every step at which they have not settled.

    ``order`` is α ≥ 1; one copy is drawn from its own law. Messages to be kept may take LEVEL_BYTES
    at most.
    """

    def __init__(self, law: MinSepLaw, sigma: float, order: int) -> None:
        checks.invariant(order >= 1, "the moment is of order 1 or higher")
        checks.invariant(law.steps < 1 << 31, "the times of participation fit into 32 bits")
        self.law, self.sigma, self.order = law, sigma, order
        self._waits = _sorted_waits(law.min_sep, order)
        n = law.steps
        self._chances = chances_of(law, order)
        # Away from both ends, from here to there, all steps have the products of row 0.
        self._inner = (law.bands - 1, n - law.bands)
        self._gram_of = np.zeros(n, dtype=np.int64)
        rows = [self._gram(max(self._inner[0], 0))]
        for t in range(n):
            if not self._inner[0] <= t <= self._inner[1]:
                self._gram_of[t] = len(rows)
                rows.append(self._gram(t))
        self._grams = np.stack(rows)
        self._uneven = 0.0  # of the growth of settled messages
        self._levels, self._level_of, self._log_scale = self._backward()
        self._log_quiet = self._quiet()
        warm = law.warm_start and law.min_sep > 1
        self._orderings = _orderings(self._waits) if warm else np.empty(0)
        self._kept_starts: dict[int, Array] = {}
        bars = law.min_sep if warm else 1
        totals = np.array([self._starting_weights(m)[-1] for m in range(bars)])
        self._starts = np.cumsum(totals)
        self.log_moment = math.log(float(totals.sum())) + float(self._log_scale[0])

    def _gram(self, t: int) -> Array:
        """<c_t, c_{t-d}>/σ² for d = 0..b-1; 0 for participations before the first step."""
        return self.law.overlaps(t) / self.sigma**2

    def _backward(self) -> tuple[Array, npt.NDArray[np.int64], Array]:
        from dptrain.accounting.min_sep import engine_kernel as kernel

        n, b = self.law.steps, self.law.min_sep
        most = min(n + 1, max(LEVEL_BYTES // (8 * len(self._waits)), 1))
        levels = np.empty((most, len(self._waits)))
        level_of = np.zeros(n + 1, dtype=np.int64)
        log_scale = np.zeros(n + 1)
        levels[0] = 1.0
        kept, alike, growth, low, high = 1, 0, 0.0, math.inf, 0.0
        tolerance = min(_AT_MOST, max(_SETTLED, _UNSETTLED / (n * (b + 2))))
        fresh = np.empty(len(self._waits))
        for t in range(n - 1, -1, -1):
            inner = self._inner[0] <= t <= self._inner[1]
            if inner and alike >= b:
                level_of[t], log_scale[t] = level_of[t + 1], log_scale[t + 1] + growth
                self._uneven = high / low - 1.0
                continue
            kernel.tilted_level(
                t, self.order, n, b, self._grams[self._gram_of[t]], self._chances,
                levels, level_of, log_scale, fresh,
            )  # fmt: skip
            if inner:
                with np.errstate(divide="ignore", invalid="ignore"):  # messages that underflowed
                    ratio = fresh / levels[level_of[t + 1]]
                low, high = np.minimum(low, ratio.min()), np.maximum(high, ratio.max())  # NaN stays
                alike += 1
            if not (inner and 0.0 <= high / low - 1.0 <= tolerance):  # nor where they are NaN
                alike, low, high = 0, math.inf, 0.0
            top = float(fresh.max())
            fresh /= top
            growth = math.log(top)
            log_scale[t] = log_scale[t + 1] + growth
            if kept == most:
                raise MemoryError(
                    f"order {self.order}: the messages of more than {most} steps of "
                    f"{len(self._waits)} states each exceed {LEVEL_BYTES} bytes"
                )
            levels[kept], level_of[t] = fresh, kept
            kept += 1
        return levels[:kept], level_of, log_scale

    def _quiet(self) -> Array:
        """Logarithm of the chance that no copy takes part before t, if all are free at step 0."""
        alone = np.log(self._levels[self._level_of, 0]) + self._log_scale
        with np.errstate(divide="ignore"):
            stay = np.log(self._chances[self.order, 0]) + np.diff(alone)
        return np.concatenate([[0.0], np.cumsum(np.clip(stay, _NEVER, 0.0))])

    def _starting_weights(self, m: int) -> Array:
        """Partial sums of the weights of all states if the first copy is free at step m.

        They are relative to M_0's scale.
        """
        if m in self._kept_starts:
            return self._kept_starts[m]
        law, order = self.law, self.order
        if self._orderings.size == 0:
            weights = np.zeros(len(self._waits))
            weights[0] = self._levels[self._level_of[0], 0]
        else:
            # A copy is free with weight 1, and barred for each of 1..b-1 steps with weight p.
            p, then = law.probability, min(m, law.steps)
            barred = order - (self._waits == 0).sum(axis=1) if m == 0 else order
            scale = math.exp(float(self._log_scale[then] - self._log_scale[0]))
            weights = self._orderings * self._levels[self._level_of[then]]
            weights *= scale * (1.0 + (law.min_sep - 1) * p) ** -order * p**barred
            weights[self._waits[:, -1] + m >= law.min_sep] = 0.0
        sums = np.cumsum(weights, out=weights)
        if sums.nbytes * (len(self._kept_starts) + 1) <= START_BYTES:
            self._kept_starts[m] = sums
        return sums

    def _first(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """Waits before step 0, ascending: shape (size, order)."""
        m_of = _drawn(self._starts, rng.random(size))
        waits = np.empty((size, self.order), dtype=np.int64)
        for m in np.unique(m_of):
            here = np.flatnonzero(m_of == m)
            sums = self._starting_weights(int(m))
            waits[here] = self._waits[_drawn(sums, rng.random(here.size))] + m
        return waits

    def _times(
        self, first: npt.NDArray[np.int64], events: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Times of all copies, ascending, and how many there are, for one block of lanes."""
        return self._drawn_times(first, events, self.law.steps)

    def _drawn_times(
        self, first: npt.NDArray[np.int64], events: npt.NDArray[np.uint64], steps: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """``_times`` of the first ``steps`` steps, of which there are messages."""
        from dptrain.accounting.min_sep import engine_kernel as kernel

        law = self.law
        most = self.order * ((steps - 1) // law.min_sep + 1)
        times = np.empty((most, kernel.LANES), dtype=np.int32)
        counts = np.zeros(kernel.LANES, dtype=np.int64)
        kernel.tilted_participations(
            first, steps, law.min_sep, self._grams, self._gram_of,
            self._chances, self._levels, self._level_of, self._log_scale, self._log_quiet,
            events, times, counts,
        )  # fmt: skip
        return times, counts

    def _weights(
        self,
        first: npt.NDArray[np.int64],
        times: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int64],
    ) -> Array:
        """Logarithms of the weights of one block's lanes: 0, the law drawn from is the tilted."""
        return np.zeros(counts.size)

    def events(
        self, rng: np.random.Generator, size: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Array]:
        """Times of all participations of ``size`` samples, one for each copy, and whose they are.

        In no order; their law is off by ``variation`` at most. And the logarithm of the weight of
        each sample, at most 0.
        """
        from dptrain.accounting.min_sep import engine_kernel as kernel

        blocks = -(-size // kernel.LANES)
        states = compiled.generators(rng, blocks, kernel.LANES)[1]
        first = self._first(rng, blocks * kernel.LANES).reshape(blocks, kernel.LANES, -1)
        times, lanes, weights = [], [], []
        for block in range(blocks):
            drawn, counts = self._times(first[block], states[block])
            weights.append(self._weights(first[block], drawn, counts))
            here = min(kernel.LANES, size - block * kernel.LANES)
            place, lane = np.nonzero(np.arange(counts.max())[:, None] < counts[:here])
            times.append(drawn[place, lane].astype(np.int64))
            lanes.append(lane + block * kernel.LANES)
        return np.concatenate(times), np.concatenate(lanes), np.concatenate(weights)[:size]

    def counts(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int16]:
        """Numbers of copies that take part, shape (steps, size)."""
        found = np.zeros((self.law.steps, size), dtype=np.int16)
        np.add.at(found, self.events(rng, size)[:2], 1)
        return found

    def losses(self, rng: np.random.Generator, size: int) -> tuple[Array, Array]:
        """log P/Q of outputs, each within ``rounding``, NaN where spoiled; and log weights.

        Outputs are drawn from a mixture whose density times weight times e^{``log_moment``} is
        that of (P/Q)^α Q, or a little more.

        A sample is spoiled with a chance below n 2^-47, see ``engine_compiled.rounding_bound``.
        """
        from dptrain.accounting.min_sep import engine_kernel as kernel

        blocks = -(-size // kernel.LANES)
        noise, events = compiled.generators(rng, blocks, kernel.LANES)
        pair = compiled.kernel_pair(self.law, self.sigma, copies=self.order)
        first = self._first(rng, blocks * kernel.LANES).reshape(blocks, kernel.LANES, -1)
        found, weights = np.empty((2, blocks * kernel.LANES))
        nothing = compiled.NOTHING_HELD
        for block in range(blocks):
            place = slice(block * kernel.LANES, (block + 1) * kernel.LANES)
            times, counts = self._times(first[block], events[block])
            weights[place] = self._weights(first[block], times, counts)
            spoiled = np.zeros(kernel.LANES, dtype=np.int64)
            kernel.log_ratios(noise[block], times, counts, spoiled, *nothing, pair, found[place])
        return found[:size], weights[:size]

    @property
    def rounding(self) -> float:
        """Bound on the error of a loss that is not spoiled."""
        return compiled.rounding_bound(self.law, self.sigma, copies=self.order)

    @property
    def variation(self) -> float:
        """Bound on the distance in total variation between the patterns drawn and exact ones.

        *Boundaries.* Uniforms have 53 bits; patterns differ only where one of them lies so close to
        a boundary between two outcomes as this is rounded. Of a sample's at most E = α⌈n/b⌉
        participations each has one choice with at most α boundaries, off by 2^-51; the at most
        E + 1 stretches without a bar have n each, off by 2^-51 of the logarithm of the last one,
        and the at most 2E + α others b each, off by 2^-49 and, in exponents of size X, by 2^-51 X.
        The overlaps in a choice's weight, α²‖c‖²/σ² at most in all, are sums of α products of as
        many terms as there are bands: off by 2^-51 (α + bands) of that.
        *Steps.* The chance of a step without participation is that of its stored messages. They are
        sums of the stored messages after them but for rounding, less than (4α + 20) 2^-53 and
        2^-50 of the scale's logarithm, and where they are taken for settled: all of them grew by
        one factor in b steps but for a part η, hence in all later ones
        (docs/theory/min-sep.md#thm-min-sep-reduced, c), and a sum over messages of b steps by
        (b + 2) η.
        """
        n, b, order = self.law.steps, self.law.min_sep, self.order
        events = order * -(-n // b)
        keep = abs(math.log1p(-self.law.probability)) if self.law.probability < 1.0 else 800.0
        scale = float(np.abs(self._log_scale).max())
        exponent = 2.0 * scale + order * b * keep
        overlaps = order**2 * float(self.law.squared_norms[0]) / self.sigma**2
        choices = events * (order + (order + self.law.bands) * overlaps) * 2.0**-51
        choices += (self._starts.size + len(self._waits)) * 2.0**-51
        quiet = (events + 1) * (n + abs(float(self._log_quiet[-1])) * n) * 2.0**-51
        others = (2 * events + order) * b * (2.0**-49 + 2.0**-51 * exponent)
        steps = n * ((4 * order + 20) * 2.0**-53 + 2.0**-50 * scale + (b + 2) * self._uneven)
        return choices + quiet + others + 2.0 * steps


def _drawn(cumulated: Array, uniform: Array) -> npt.NDArray[np.int64]:
    """Places drawn in proportion to weights, given their partial sums."""
    found = np.searchsorted(cumulated, uniform * cumulated[-1], side="right")
    return np.minimum(found, cumulated.size - 1)


def _sorted_waits(min_sep: int, order: int) -> npt.NDArray[np.int64]:
    """Waits of the states in the kernel's order: the first is 0, later ones weigh more."""
    waits = np.zeros((1, order), dtype=np.int64)
    for k in range(1, order):
        # Copy k's wait is at least copy k-1's: extend every state found so far.
        parts = []
        for value in range(min_sep):
            below = waits[waits[:, k - 1] <= value].copy()
            below[:, k] = value
            parts.append(below)
        waits = np.concatenate(parts)
    return waits


def _orderings(waits: npt.NDArray[np.int64]) -> Array:
    """α!/Π(multiplicities): number of ways in which copies have these waits, ascending rows."""
    run, divisor = np.ones(len(waits)), np.ones(len(waits))
    for column in range(1, waits.shape[1]):
        run = np.where(waits[:, column] == waits[:, column - 1], run + 1.0, 1.0)
        divisor *= run
    return np.asarray(math.factorial(waits.shape[1]) / divisor)
