"""Bounds on how surely a run's past can give away a participation: the p̃ of matrix mechanisms."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.special import expit, log_ndtr, ndtri

from dptrain.core import Array

# Where the normal's tail is expanded, as shares of its quantile: any is valid, the best is taken.
_SHARES = (1.0, 0.99, 0.97, 0.95, 0.92, 0.88, 0.84, 0.79, 0.73, 0.66, 0.58, 0.48, 0.36, 0.2)
# Covers the rounding of the sums of products and of what is computed from them, relatively.
_PAD = 1e-10


@dataclasses.dataclass(frozen=True, eq=False)
class Entries:
    """The non-zero entries of the rows of |C|, and what the rows before tell about their columns.

    With a the part of column j in the rows before, and a_k that of column k: five numbers an
    entry, none of which depends on σ. All arrays have the shape (m,).

    Attributes:
        size: |C_ij| (or the norm of a block of rows of column j).
        square: ‖a‖².
        linear: Σ_k <a, a_k> over all columns.
        quadratic: Σ_k <a, a_k>², or more.
        largest: max_k <a, a_k>, or more.
    """

    size: Array
    square: Array
    linear: Array
    quadratic: Array
    largest: Array

    @property
    def pairs(self) -> int:
        """Number of entries that need an event: those with something before them."""
        return int(np.count_nonzero(self.square > 0.0))


def projection_bounds(
    entries: Entries, *, probability: float, sigma: float, failure: float, remove: bool
) -> Array:
    """τ with Pr[<y, a> > τ] ≤ ``failure`` under P (remove) or Q (add), for every entry: (m,).

    y = Σ_k x_k a_k + σz under P, with independent coins x_k of probability p, and σz under Q.

    Add: <σz, a> is normal, τ = σ‖a‖z with z the quantile of ``failure``.

    Remove: <y, a> is a sum of coins times <a, a_k> and an independent normal number; a tangent of
    the normal tail and Bennett's inequality bound it, for any point of contact, of which the best
    of some is taken (docs/theory/mmcc.md#thm-mmcc-tail; ``test_events_fail_as_rarely_as_claimed``).
    It replaces the quantile of the coins' sum at failure/2 plus that of the normal number in
    Algorithm 2 of Choquette-Choo et al. 2024 (arXiv 2310.15526), which pays for both to be extreme
    at once.
    """
    z = -float(ndtri(failure))
    deviation = sigma * np.sqrt(entries.square)
    if not remove:
        return deviation * (z * (1.0 + _PAD) if z > 0 else z * (1.0 - _PAD))
    p = probability
    best = deviation * z + entries.linear
    used = entries.square > 0.0
    scale, linear = deviation[used], entries.linear[used]
    largest = np.maximum(entries.largest[used], entries.square[used])
    ratio = entries.quadratic[used] / largest**2
    found = best[used]
    for share in _SHARES:
        u = share * z if z > 0 else z
        log_tail = float(log_ndtr(-u))
        hazard = math.exp(-0.5 * u * u - 0.5 * math.log(2.0 * math.pi) - log_tail)
        rate = hazard / scale
        with np.errstate(over="ignore", invalid="ignore"):
            t = rate * (1.0 - p) * largest
            excess = np.expm1(t) - t
            exponent = p * rate * linear + (p / (1.0 - p) * ratio * excess if p < 1.0 else 0.0)
            bound = scale * u + (log_tail - math.log(failure) + exponent) / rate
        # nan (∞ - ∞) loses the comparison.
        found = np.fmin(found, bound)
    best[used] = found
    return np.asarray(best + _PAD * (np.abs(best) + deviation * abs(z)))


def participation_bounds(
    entries: Entries, *, probability: float, sigma: float, failure: float, remove: bool
) -> Array:
    """p̃ for every entry, shape (m,), rounded up.

    p̃ = p e^ε/(p e^ε + 1 - p) with ε = (2τ - ‖a‖²)/(2σ²), and p where a = 0. All of them hold with
    probability at least 1 - ``failure`` · ``Entries.pairs`` (``MMCC`` says what of).
    ``failure`` must lie in (0, 1) if there are pairs.
    """
    if probability == 1.0 or entries.pairs == 0:
        return np.full(entries.size.shape, probability)
    tau = projection_bounds(
        entries, probability=probability, sigma=sigma, failure=failure, remove=remove
    )
    exponent = (2.0 * tau - entries.square) / (2.0 * sigma**2)
    exponent += _PAD * (np.abs(tau) + entries.square) / sigma**2
    odds = math.log(probability) - math.log1p(-probability)
    bounds = np.minimum(expit(odds + exponent) * (1.0 + _PAD), 1.0)
    return np.where(entries.square > 0.0, bounds, probability)
