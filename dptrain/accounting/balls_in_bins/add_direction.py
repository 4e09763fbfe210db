"""Add-direction Rényi divergences of balls-in-bins with independent noise, from above."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.special import gammainc, gammaincc, gammaln, logsumexp, ndtr

from dptrain.accounting.renyi.bins import DIAGONAL_ORDERS
from dptrain.accounting.renyi.chords import log_delta_from_renyi
from dptrain.core import Array

# Above c/σ = 10 the grids below are too coarse to be of use.
_LARGEST_RATIO = 10.0
_CUT = 12.0
_POINTS, _NODES = 2000, 1500
# Relative rounding of the Laplace transform, and absolute rounding of the log moment: far above the
# errors of 1e-13 a term of the special functions.
_PAD, _LOG_MOMENT_PAD = 1e-12, 1e-8


def _masses(edges: Array) -> Array:
    """Standard normal mass between neighboring edges, with relative precision in both tails."""
    left, right = ndtr(edges), ndtr(-edges)
    positive = edges[1:] + edges[:-1] > 0
    return np.maximum(np.where(positive, right[:-1] - right[1:], left[1:] - left[:-1]), 0.0)


def _log_laplace(at: Array, bins: int, ratio: float) -> Array:
    """log E[e^{-λA}] from above at every λ, for A the mean of t copies of X = e^{kZ - k²/2}.

    1 - e^{-uX} is concave in X, so on an interval of X it is at least its chord; the mean of the
    chord follows from the interval's mass and partial mean, both of closed form. Beyond ±12
    standard deviations it is at least 0.
    """
    z = np.linspace(-_CUT, _CUT + ratio, _POINTS + 1)
    x = np.exp(ratio * z - ratio**2 / 2.0)
    mass, mean = _masses(z), _masses(z - ratio)
    upper = np.clip((mean - mass * x[:-1]) / np.diff(x), 0.0, mass)
    weights = np.append(mass - upper, 0.0) + np.append(0.0, upper)
    outside = 2.0 * float(ndtr(-_CUT))
    result = np.empty(at.size)
    for i, u in enumerate(at / bins):
        gone = float(-np.expm1(-u * x) @ weights) * (1.0 - _PAD)
        if gone < 0.5:
            result[i] = math.log1p(-gone)
        else:  # the same bound, without cancellation
            result[i] = math.log((float(np.exp(-u * x) @ weights) + outside) * (1.0 + _PAD))
    return bins * result


def add_orders(bins: int, ratio: float, largest: int) -> Array:
    """R_α(Q‖P) from above at index α = 0..``largest`` (∞ below 2) for t bins and c/σ = ``ratio``.

    Q is N(0, σ²I_t) and P = (1/t) Σ_i N(c·e_i, σ²I_t), so dP/dQ is A = (1/t) Σ_i X_i under Q, with
    independent X_i = e^{kZ_i - k²/2}, k = c/σ; and R_α(Q‖P) = (1/s) log E[A^{-s}], s = α - 1.
    That moment is an integral of f(λ) = E[e^{-λA}] = E[e^{-λX/t}]^t, which is bounded at nodes, by
    chords of its logarithm between them, and by the inequalities of Cauchy-Schwarz and of the means
    beyond (docs/theory/random-allocation.md#thm-allocation-add;
    ``test_add_moments_are_above_the_truth_and_near_it``).
    """
    result = np.full(largest + 1, np.inf)
    if ratio > _LARGEST_RATIO:
        return result
    top = 8.0 + ratio**2 / 2.0 + 14.0 * ratio / math.sqrt(bins) + math.log(largest)
    at = np.exp(np.linspace(-20.0, top, _NODES))
    log_f = _log_laplace(at, bins, ratio)
    slope = -np.diff(log_f) / np.diff(at)
    falls = slope > 0
    slope = np.where(falls, slope, 1.0)
    height = log_f[:-1] + slope * at[:-1]
    low, high = slope * at[:-1], slope * at[1:]
    for s in range(1, largest):
        above, below = gammaincc(s, low) - gammaincc(s, high), gammainc(s, high) - gammainc(s, low)
        share = np.where(low > s, above, below)
        normal = falls & (share > 1e-280)
        chord = height - s * np.log(slope) + np.log(np.where(normal, share, 1.0))
        # Where the chord is flat or the share underflows: f at the left node, over all of 0..λ.
        flat = log_f[:-1] + s * np.log(at[1:]) - gammaln(s + 1.0)
        head = s * math.log(at[0]) - gammaln(s + 1.0)
        tail = s * math.log(2.0) + log_f[-1] / 2.0 + s * ratio**2 / 2.0 + (s * ratio) ** 2 / bins
        total = logsumexp(np.concatenate((np.where(normal, chord, flat), [head, tail])))
        result[s + 1] = max(float(total) + _LOG_MOMENT_PAD, 0.0) / s
    return result


@dataclasses.dataclass(frozen=True)
class AddDivergences:
    """Add-direction divergences of one pick out of t, at open σ.

    t is ``bins``, and ``norm`` is the largest shift c of a coordinate. A smaller one of some
    coordinates is a post-processing: added noise.
    """

    bins: int
    norm: float
    _orders: dict[float, Array] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def _divergence(self, sigma: float) -> Array:
        if sigma not in self._orders:
            while len(self._orders) >= 12:
                del self._orders[next(iter(self._orders))]
            self._orders[sigma] = add_orders(self.bins, self.norm / sigma, DIAGONAL_ORDERS[0])
        return self._orders[sigma]

    def log_delta(self, sigma: float, epsilon: Array) -> Array:
        """log δ(ε) from above, by the best order."""
        orders = self._divergence(sigma)
        return np.array([log_delta_from_renyi(orders, float(at))[0] for at in epsilon])
