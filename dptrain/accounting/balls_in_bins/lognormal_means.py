"""The law of dP/dQ for one pick out of t steps: a mean of independent log-normal variables.

The privacy of picking one of t steps hangs on A = dP/dQ = (1/t) Σ_i X_i, where the X_i are
independent under Q with X_i = e^{r_i Z - r_i²/2}, Z ~ N(0, 1). Both directions are expectations of
convex functions of A:

    remove  δ(ε) = E[(A - e^ε)_+],        add  δ(ε) = E[(1 - e^ε A)_+].

So every *spread* of A that keeps the mean (a larger law in convex order) bounds both from above,
and the law of A may be built by averaging two independent laws at a time, after which each value is
split between two grid points around it, with the mean kept
(docs/theory/random-allocation.md#thm-convex-order; ``test_mixing_spreads_every_pair``). The error
is of second order in the spacing, and one law serves both directions. Two more points close the
grid: 0 below it, and "at infinity" above it, where the loss of P is infinite.

Rounding: masses are products and sums of positive numbers, each relatively exact; 1e-12 is added to
the masses of every variable, above the errors of its interval masses (1e-13) and its share of those
of the sums. Means of single cells err by less than 1e-13 relatively, ``SLACK`` in all: whoever
reads δ(ε) must read it at ε - SLACK. Products that underflow lose less than 1e-100 of the mean for
ratios up to ``LARGEST_RATIO``; as much is charged at infinity.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from scipy.special import ndtr

from dptrain.accounting.losses.composition import LossDistribution
from dptrain.accounting.losses.subsampled_gaussian import interval_masses
from dptrain.core import Array, checks


class Pairs:
    """Places of (1-w)·e^{jh} + w·e^{(j+d)h}, d ≥ 0, on a grid of spacing h/refine.

    The value is e^{jh}·v_d with v_d free of j: a shift of log v_d on the grid. It is split between
    two grid points around it such that the mean is kept. Beyond a certain d the smaller variable
    no longer reaches the next point; as the split is linear in the value, only the mass and the
    mean of all those small values matter, with the mass at 0 among them. On a grid so narrow that
    w·e^{jh} is always below it, a pair with 0 is split between 0 and the lowest point.

    Attributes:
        below: results start so many points lower than the variables.
    """

    def __init__(self, weight: float, spacing: float, refine: int, size: int) -> None:
        """Tabulate for the weight w of the larger variable, and grids of ``size`` points."""
        self._weight, self._spacing, self._refine = weight, spacing, refine
        fine, log_weight = spacing / refine, math.log(weight)
        # Points around w·e^{jh}, the upper one at least half a cell away.
        self._under = math.floor(log_weight / fine + 1e-9)
        self._over = self._under + (1 if (self._under + 1) * fine - log_weight > 0.5 * fine else 2)
        room = math.expm1(self._over * fine - log_weight)
        far = max(math.ceil(math.log((1.0 - weight) / (weight * room)) / spacing), 1)
        self._narrow = log_weight + (size - 1) * spacing <= 0.0
        self._near = size if self._narrow else min(far, size)
        self.below = 0 if self._narrow else -self._under

    def add(
        self,
        out: Array,
        small: Array,
        big: Array,
        logs: Array,
        *,
        zero: float,
        equal: float,
        apart: float,
    ) -> float:
        """Add ``small[j] · big[j+d]`` for all j and d ≥ 0 to ``out``.

        Args:
            out: masses of the result, changed in place; its lowest point is ``below`` points
                under the lowest one of the variables.
            small: masses of the smaller variable, shape (m,).
            big: masses of the larger variable, shape (m,).
            logs: logarithms of the points, shape (m,).
            zero: mass of the smaller variable at 0.
            equal: multiplies the pairs with d = 0.
            apart: multiplies those with d > 0, and with 0.

        Returns:
            the mass of the result at 0.
        """
        fine = self._spacing / self._refine
        shift = np.log(
            (1.0 - self._weight) + self._weight * np.exp(self._spacing * np.arange(self._near))
        )
        cell = np.floor(shift / fine).astype(np.int64)
        share = np.clip(np.expm1(shift - cell * fine) / math.expm1(fine), 0.0, 1.0)
        times = np.full(self._near, apart)
        times[0] = equal
        product, scaled = np.empty(small.size), np.empty(small.size)
        for d in range(0 if equal else 1, self._near):
            n = small.size - d
            np.multiply(small[:n], big[d:], out=product[:n])
            at, up = self.below + int(cell[d]), float(times[d] * share[d])
            for offset, factor in ((at, times[d] - up), (at + 1, up)):
                # Not BLAS's axpy: its threads wait for each other wherever a core is busy.
                np.multiply(product[:n], factor, out=scaled[:n])
                out[offset : offset + n * self._refine : self._refine] += scaled[:n]
        if self._narrow:
            share = self._weight * np.exp(logs - logs[0])
            out[0] += apart * zero * float(big @ share)
            return apart * zero * float(big @ np.maximum(1.0 - share, 0.0))
        self._add_far(out, small, apart * big, logs, zero)
        return 0.0

    def _add_far(self, out: Array, small: Array, big: Array, logs: Array, zero: float) -> None:
        fine, near = self._spacing / self._refine, self._near
        mass, mean = np.full(small.size, zero), np.zeros(small.size)
        mass[near:] += np.cumsum(small[: small.size - near])
        mean[near:] = np.cumsum((small * np.exp(logs))[: small.size - near])
        mean *= np.exp(-logs)
        lower = math.exp(self._under * fine)
        excess = max(self._weight - lower, 0.0) * mass + (1.0 - self._weight) * mean
        up = np.minimum(excess / (math.exp(self._over * fine) - lower), mass)
        stop = self._refine * small.size
        at = self.below + self._under
        out[at : at + stop : self._refine] += big * (mass - up)
        at = self.below + self._over
        out[at : at + stop : self._refine] += big * up


# Standard deviations of one variable on the grid, and the mass that may be cut off later: 2e-36.
_DEVIATIONS = 12.5
_TAIL = 1e-36
# Rounding, see above.
_PAD = 1e-12
_UNDERFLOW = 1e-100
SLACK = 1e-12
# Ratios r that the grid serves: above, doubles underflow; a smaller one is rounded up to the least.
LARGEST_RATIO = 20.0
SMALLEST_RATIO = 1e-7


@dataclasses.dataclass(frozen=True)
class LogMean:
    """Law of a variable A ≥ 0 with mean 1.

    Attributes:
        spacing: h.
        lowest: index of the first grid point; point i is the value e^{h (lowest + i)}.
        mass: mass of every grid point.
        infinity: the part of E[A] beyond the grid.
    """

    spacing: float
    lowest: int
    mass: Array
    zero: float
    infinity: float

    @property
    def logs(self) -> Array:
        """Logarithms of the grid points."""
        return np.asarray(self.spacing * (self.lowest + np.arange(self.mass.size)), float)

    @property
    def mean(self) -> float:
        """E[A]: 1, but for rounding."""
        return float(self.mass @ np.exp(self.logs)) + self.infinity

    def refined(self, times: int) -> LogMean:
        """The same law on a grid ``times`` as fine."""
        if times == 1:
            return self
        mass = np.zeros((self.mass.size - 1) * times + 1)
        mass[::times] = self.mass
        return LogMean(self.spacing / times, self.lowest * times, mass, self.zero, self.infinity)

    def trimmed(self) -> LogMean:
        """The law without the nearly empty ends of its grid, whose mass and mean are charged."""
        weighted = self.mass * np.exp(self.logs)
        above = np.cumsum(weighted[::-1])
        cut = self.mass.size - int(np.searchsorted(above, _TAIL, side="right"))
        below = np.cumsum(self.mass[:cut])
        start = min(int(np.searchsorted(below, _TAIL, side="right")), cut - 1)
        mass = self.mass[start:cut].copy()
        bottom = math.exp(self.spacing * (self.lowest + start))
        mass[0] += float(weighted[:start].sum()) / bottom
        return LogMean(
            self.spacing,
            self.lowest + start,
            mass,
            self.zero + float(self.mass[:start].sum()) + float(self.mass[cut:].sum()),
            self.infinity + float(weighted[cut:].sum()),
        )

    def loss(self, *, remove: bool) -> LossDistribution:
        """log A under aμ (remove), or -log A under μ (add)."""
        with np.errstate(divide="ignore"):
            log_mass = np.log(self.mass)
        if remove:
            return LossDistribution(self.spacing, self.lowest, log_mass + self.logs, self.infinity)
        lowest = -(self.lowest + self.mass.size - 1)
        return LossDistribution(self.spacing, lowest, log_mass[::-1], self.zero)


def lognormal(ratio: float, spacing: float) -> LogMean:
    """The law of e^{rZ - r²/2} spread onto a grid."""
    bottom = math.floor((-_DEVIATIONS * ratio - ratio**2 / 2.0) / spacing)
    top = math.ceil((_DEVIATIONS * ratio + ratio**2 / 2.0) / spacing)
    logs = np.asarray(spacing * np.arange(bottom, top + 1), float)
    z = logs / ratio + ratio / 2.0
    mass, mean = interval_masses(z), interval_masses(z - ratio)
    # Of a cell [g, g e^h] with mass m and mean s, (s/g - m)/(e^h - 1) goes to the upper end.
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.exp(np.log(mean) - np.log(mass) - logs[:-1])
    share = np.clip(np.nan_to_num((relative - 1.0) / math.expm1(spacing), nan=0.0), 0.0, 1.0)
    upper = mass * share
    result = np.append(mass - upper, 0.0) + np.append(0.0, upper)
    result[0] += float(ndtr(z[0] - ratio)) * math.exp(-logs[0])
    zero = float(ndtr(z[0]) + ndtr(-z[-1]))
    infinity = float(ndtr(ratio - z[-1])) + _UNDERFLOW
    return LogMean(spacing, bottom, result * (1.0 + _PAD), zero, infinity)


def mixed(first: LogMean, second: LogMean, weight: float, refine: int = 1) -> LogMean:
    """The law of wA + (1-w)B for independent A and B on the same grid, spread onto a grid.

    ``weight`` is w in (0, 1); the new spacing is the old one over the integer ``refine``.
    """
    h = first.spacing
    checks.invariant(second.spacing == h, "two laws on grids of different spacings were mixed")
    low = min(first.lowest, second.lowest)
    high = max(first.lowest + first.mass.size, second.lowest + second.mass.size)
    a, b = np.zeros(high - low), np.zeros(high - low)
    a[first.lowest - low :][: first.mass.size] = first.mass
    b[second.lowest - low :][: second.mass.size] = second.mass
    logs = np.asarray(h * (low + np.arange(a.size)), float)
    zero = first.zero * second.zero
    if first is second and weight == 0.5:
        pairs = Pairs(0.5, h, refine, a.size)
        below = pairs.below
        out = np.zeros(below + refine * a.size + 2)
        zero += pairs.add(out, a, b, logs, zero=first.zero, equal=1.0, apart=2.0)
    else:
        upper, lower = Pairs(1.0 - weight, h, refine, a.size), Pairs(weight, h, refine, a.size)
        below = max(upper.below, lower.below)
        out = np.zeros(below + refine * a.size + 2)
        here, there = out[below - upper.below :], out[below - lower.below :]
        zero += upper.add(here, a, b, logs, zero=first.zero, equal=1.0, apart=1.0)
        zero += lower.add(there, b, a, logs, zero=second.zero, equal=0.0, apart=1.0)
    return LogMean(
        h / refine,
        refine * low - below,
        out,
        zero,
        weight * first.infinity + (1.0 - weight) * second.infinity,
    ).trimmed()


# Spacing of the grid in units of r/√k, about the standard deviation of the logarithm of the mean of
# k variables. A split adds at most h²/4, on average h²/6, to its variance: with one spacing per two
# doublings that is a relative 1e-5 per doubling in the variance, half of it in ε. Above 200
# variables it is coarser, to keep the work bounded.
_RESOLUTION = 0.005
_FULL_RESOLUTION = 200


class _Ladder:
    """Spacings that are halved as variables are averaged, about once in two doublings.

    They divide log 2, so that where one variable dwarfs the other their mean, half of it, falls on
    the grid.
    """

    def __init__(self, ratio: float, count: int) -> None:
        self._target = _RESOLUTION * max(1.0, count / _FULL_RESOLUTION) ** 0.4 * ratio
        self._first = math.log(2.0) / math.ceil(math.log(2.0) / self._target)

    def spacing(self, count: float) -> float:
        """The spacing for the mean of so many variables."""
        wanted = self._first * math.sqrt(count) / self._target
        return self._first / 2.0 ** max(round(math.log2(wanted)), 0)


def _equal(ratio: float, count: int, ladder: _Ladder) -> LogMean:
    """The law of the mean of ``count`` copies, halving as evenly as they go.

    At every depth there are at most two sizes, count / 2^depth rounded down and up.
    """

    @functools.cache
    def law(size: int, depth: int) -> LogMean:
        spacing = ladder.spacing(count / 2**depth)
        if size == 1:
            return lognormal(ratio, spacing)
        half = size // 2
        first, second = law(half, depth + 1), law(size - half, depth + 1)
        return mixed(first, second, half / size, round(first.spacing / spacing))

    return law(count, 0)


@functools.lru_cache(maxsize=8)
def mean_of_lognormals(
    groups: tuple[tuple[float, int], ...], *, like: int | None = None
) -> LogMean:
    """The law of (1/t) Σ_i e^{r_i Z_i - r_i²/2} with t = Σ counts, spread onto a grid.

    Args:
        groups: pairs (r, how many variables have this r), r in (0, ``LARGEST_RATIO``].
        like: the grid of a mean of so many variables is used: where these have the same r, laws
            of different t then have spacings whose quotient is a power of 2.

    The law grows with every r in convex order (e^{rZ - r²/2} is a martingale in r²), so the least
    ones may be rounded up.
    """
    checks.invariant(
        all(ratio <= LARGEST_RATIO for ratio, _ in groups),
        "a ratio lies beyond the largest that the law covers",
    )
    groups = tuple((max(ratio, SMALLEST_RATIO), count) for ratio, count in groups)
    total = sum(count for _, count in groups)
    ratio = math.sqrt(sum(count * ratio**2 for ratio, count in groups) / total)
    ladder = _Ladder(ratio, like or total)
    last = ladder.spacing(total)
    law, done = None, 0
    for ratio, count in groups:
        part = _equal(ratio, count, ladder)
        part = part.refined(round(part.spacing / last))
        law = part if law is None else mixed(law, part, done / (done + count))
        done += count
    assert law is not None
    return law
