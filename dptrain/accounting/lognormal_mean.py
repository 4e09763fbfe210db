"""Laws of means of independent log-normal variables, on a logarithmic grid.

The privacy of picking one of t steps hangs on A = dP/dQ = (1/t) Σ_i X_i, where the X_i are
independent under Q with X_i = e^{r_i Z - r_i²/2}, Z ~ N(0, 1). Both directions are expectations of
convex functions of A:

    remove  δ(ε) = E[(A - e^ε)_+],        add  δ(ε) = E[(1 - e^ε A)_+].

So every *spread* of A that keeps the mean (a larger law in convex order) bounds both from above.
Means of independent variables keep the order: if X̂ ≥ X, then wX̂ + (1-w)Y ≥ wX + (1-w)Y, as
x ↦ E[φ(wx + (1-w)Y)] is convex for a convex φ. Hence the law of A may be built step by step, and
after every step each value is split between two grid points around it, with the mean kept. The
error is of second order in the spacing, and one law serves both directions.

Spreads are the same as domination of pairs: (aμ̂, μ̂), with μ̂ the law of Â, dominates (P, Q) in the
sense of Blackwell (Strassen's theorem: there is a martingale from A to Â), so that independent
copies of it dominate independent copies of (P, Q), and losses compose.

Two more points close the grid. A value below it is split between 0 and the lowest point; one above
it between 0 and M with M → ∞: its mass goes to 0, its mean counts "at infinity", where the loss of
P is infinite. Also, all bounds are integrals of positive functions against products of μ̂: more
mass anywhere can only raise them, so masses may be rounded up.

Rounding: masses are products and sums of positive numbers, each relatively exact; 1e-12 is added to
the masses of every variable, above the errors of its interval masses (1e-13) and its share of those
of the sums. Means of single cells err by less than 1e-13 relatively, :data:`SLACK` in all: whoever
reads δ(ε) must read it at ε - SLACK. Products that underflow lose less than 1e-100 of the mean for
ratios up to :data:`LARGEST_RATIO`; as much is charged at infinity.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from dptrain.accounting.lognormal_pairs import Pairs
from dptrain.accounting.pld import LossDistribution
from dptrain.accounting.subsampled_gaussian import interval_masses

Array = npt.NDArray[np.float64]

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
        zero: mass at 0.
        infinity: what E[A] has beyond the grid.
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
        """Without the ends of the grid that hold next to nothing, their mass and mean charged."""
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

    Args:
        first: the law of A.
        second: the law of B.
        weight: w in (0, 1).
        refine: the new spacing is the old one over this integer.
    """
    h = first.spacing
    assert second.spacing == h
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
