"""Compiled draws from (P/Q)^α Q/A of b-min-sep sampling, and the losses of what is drawn."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from dptrain.accounting.min_sep import engine_compiled as compiled
from dptrain.accounting.min_sep.law import MinSepLaw
from dptrain.accounting.min_sep.losses import LEAST_COMPILED_STEPS
from dptrain.core import Array

ORDERS = (2, 3, 4)  # whose states ``engine_kernel`` can number
LEVEL_BYTES = 1 << 30
# Messages are called settled when b steps in a row change none by more than this (relatively).
_SETTLED = 1e-14
_NEVER = -800.0  # below the logarithm of any uniform number drawn


def engine(law: MinSepLaw) -> Literal["numba", "numpy"]:
    """What draws: compiled code, where it can be and where there are enough steps."""
    many = law.steps >= LEAST_COMPILED_STEPS
    return "numba" if many and compiled.refusal(law) is None else "numpy"


def states(law: MinSepLaw, order: int) -> int:
    """How many states have a free copy: multisets of α-1 waits."""
    return math.comb(law.min_sep + order - 2, order - 1)


class TiltedPatterns:
    """α copies of one example's participations under their tilted law, drawn by compiled code.

    A state is the multiset of the copies' waits until they are free, and only states with a free
    copy count: from any other nothing happens until the first copy is free
    (docs/theory/min-sep.md#thm-min-sep-moments;
    ``test_compiled_draws_have_the_tilted_law``). The messages of the backward program are kept for
    every step at which they have not settled.

    Args:
        law: the sampling law.
        sigma: σ > 0.
        order: α, one of ORDERS.

    Raises:
        MemoryError: if the messages to be kept exceed LEVEL_BYTES.
    """

    def __init__(self, law: MinSepLaw, sigma: float, order: int) -> None:
        assert order in ORDERS, order
        self.law, self.sigma, self.order = law, sigma, order
        self._waits = _sorted_waits(law.min_sep, order)
        p, n = law.probability, law.steps
        self._chances = np.zeros((order + 1, order + 1))
        for free in range(order + 1):
            for taking in range(free + 1):
                chance = math.comb(free, taking) * p**taking * (1.0 - p) ** (free - taking)
                self._chances[free, taking] = chance
        # Away from both ends, from here to there, all steps have the products of row 0.
        self._inner = (law.bands - 1, n - law.bands)
        self._gram_of = np.zeros(n, dtype=np.int64)
        rows = [self._gram(max(self._inner[0], 0))]
        for t in range(n):
            if not self._inner[0] <= t <= self._inner[1]:
                self._gram_of[t] = len(rows)
                rows.append(self._gram(t))
        self._grams = np.stack(rows)
        self._levels, self._level_of, self._log_scale = self._backward()
        self._log_quiet = self._quiet()
        starts = self._starting_weights()
        rows = starts.sum(axis=1)
        self._starts, self._inside = np.cumsum(rows), np.cumsum(starts, axis=1, out=starts)
        self.log_moment = math.log(float(rows.sum())) + float(self._log_scale[0])

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
        kept, alike, growth = 1, 0, 0.0
        fresh = np.empty(len(self._waits))
        for t in range(n - 1, -1, -1):
            inner = self._inner[0] <= t <= self._inner[1]
            if inner and alike >= b:
                level_of[t], log_scale[t] = level_of[t + 1], log_scale[t + 1] + growth
                continue
            kernel.tilted_level(
                t, self.order, n, b, self._grams[self._gram_of[t]], self._chances,
                levels, level_of, log_scale, fresh,
            )  # fmt: skip
            top = float(fresh.max())
            fresh /= top
            growth = math.log(top)
            log_scale[t] = log_scale[t + 1] + growth
            change = float(np.abs(fresh / levels[level_of[t + 1]] - 1.0).max())
            alike = alike + 1 if inner and change < _SETTLED else 0
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

    def _starting_weights(self) -> Array:
        """Row m: weight of every state once the first copy is free at step m, over M_0's scale."""
        law, order = self.law, self.order
        p, n = law.probability, law.steps
        if not (law.warm_start and law.min_sep > 1):
            weights = np.zeros((1, len(self._waits)))
            weights[0, 0] = self._levels[self._level_of[0], 0]
            return weights
        same = [[len(list(group)) for _, group in itertools.groupby(row)] for row in self._waits]
        orderings = np.array(
            [math.factorial(order) / math.prod(math.factorial(k) for k in row) for row in same]
        )
        free = (self._waits == 0).sum(axis=1)
        # A copy is free with weight 1, and barred for each of 1..b-1 steps with weight p.
        each = 1.0 / (1.0 + (law.min_sep - 1) * p)
        weights = np.zeros((law.min_sep, len(self._waits)))
        for m in range(law.min_sep):
            then = min(m, n)
            scale = math.exp(float(self._log_scale[then] - self._log_scale[0]))
            message = self._levels[self._level_of[then]] * scale
            barred = order - free if m == 0 else order
            possible = self._waits[:, -1] + m < law.min_sep
            weights[m] = np.where(possible, orderings * each**order * p**barred * message, 0.0)
        return weights

    def _first(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """Waits before step 0, ascending: shape (size, order)."""
        m_of = _drawn(self._starts, rng.random(size))
        waits = np.empty((size, self.order), dtype=np.int64)
        for m in np.unique(m_of):
            here = np.flatnonzero(m_of == m)
            waits[here] = self._waits[_drawn(self._inside[m], rng.random(here.size))] + m
        return waits

    def _times(
        self, rng: np.random.Generator, events: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Times of all copies, ascending, and how many there are, for one block of lanes."""
        from dptrain.accounting.min_sep import engine_kernel as kernel

        law = self.law
        most = self.order * ((law.steps - 1) // law.min_sep + 1)
        times = np.empty((most, kernel.LANES), dtype=np.int32)
        counts = np.zeros(kernel.LANES, dtype=np.int64)
        kernel.tilted_participations(
            self._first(rng, kernel.LANES), law.steps, law.min_sep, self._grams, self._gram_of,
            self._chances, self._levels, self._level_of, self._log_scale, self._log_quiet,
            events, times, counts,
        )  # fmt: skip
        return times, counts

    def counts(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int16]:
        """Numbers of copies that take part, shape (steps, size)."""
        from dptrain.accounting.min_sep import engine_kernel as kernel

        blocks = -(-size // kernel.LANES)
        events = compiled.generators(rng, blocks, kernel.LANES)[1]
        found = np.zeros((self.law.steps, blocks * kernel.LANES), dtype=np.int16)
        for block in range(blocks):
            times, counts = self._times(rng, events[block])
            for lane in range(kernel.LANES):
                np.add.at(found[:, block * kernel.LANES + lane], times[: counts[lane], lane], 1)
        return found[:, :size]

    def losses(self, rng: np.random.Generator, size: int) -> Array:
        """log P/Q of outputs drawn from (P/Q)^α Q/A, each within ``rounding``; NaN where spoiled.

        A sample is spoiled with a chance below n 2^-47, see ``engine_compiled.rounding_bound``.
        """
        from dptrain.accounting.min_sep import engine_kernel as kernel

        blocks = -(-size // kernel.LANES)
        noise, events = compiled.generators(rng, blocks, kernel.LANES)
        arguments = compiled.kernel_arguments(self.law, [self.sigma], ["remove"], copies=self.order)
        found, out = np.empty(blocks * kernel.LANES), np.empty((1, 1, kernel.LANES))
        for block in range(blocks):
            times, counts = self._times(rng, events[block])
            spoiled = np.zeros(kernel.LANES, dtype=np.int64)
            kernel.log_ratios(noise[block], times, counts, spoiled, *arguments, out)
            found[block * kernel.LANES : (block + 1) * kernel.LANES] = out[0, 0]
        return found[:size]

    @property
    def rounding(self) -> float:
        """Bound on the error of a loss that is not spoiled."""
        return compiled.rounding_bound(self.law, self.sigma, copies=self.order)

    @property
    def variation(self) -> float:
        """Bound on the distance in total variation between the patterns drawn and exact ones.

        Uniforms have 53 bits, and patterns differ only where one of them lies within 2^-51 of a
        boundary: a choice has at most α of them and a gap n; there are at most n choices, and at
        most α⌈n/b⌉ + 1 gaps. A gap's partial sums err by 2^-51 of the last one. Messages that are
        taken for settled change the chance that nobody takes part by at most 4e-14 a step.
        """
        n, b = self.law.steps, self.law.min_sep
        gaps = self.order * -(-n // b) + 1
        sums = gaps * abs(float(self._log_quiet[-1]))
        boundaries = n * self.order + n * gaps + self._inside.size
        return (boundaries + sums) * 2.0**-51 + 4e-14 * n


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
