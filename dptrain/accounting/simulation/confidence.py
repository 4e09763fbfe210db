"""Arithmetic of Monte Carlo certificates: what a mean of s samples proves about δ."""

from __future__ import annotations

import math

from scipy.optimize import brentq

from dptrain.core import checks

# Relative error allowed for the rounding of exp(-s·KL) with s·KL up to about 700.
ROUNDING = 1e-9


def _excess(x: float) -> float:
    """(1+x) log(1+x) - x ≥ 0 for x ≥ -1, without cancellation near 0."""
    if abs(x) < 1e-2:
        # Alternating series Σ_{k≥2} (-1)^k x^k / (k(k-1)); the tenth term is below 1e-20·x².
        return math.fsum((-1) ** k * x**k / (k * (k - 1)) for k in range(2, 13))
    if x == -1.0:
        return 1.0
    return (1.0 + x) * math.log1p(x) - x


def binary_kl(a: float, b: float) -> float:
    """Kullback-Leibler divergence KL(a‖b) of Bernoulli(a) from Bernoulli(b), in nats.

    Written as b φ((a-b)/b) + (1-b) φ((b-a)/(1-b)) with φ(x) = (1+x) log(1+x) - x: both terms are
    non-negative, so nothing cancels, down to a, b = 1e-300.
    """
    if not 0.0 <= a <= 1.0:
        raise ValueError(f"a={a}: must lie in [0, 1]")
    if not 0.0 < b < 1.0:
        raise ValueError(f"b={b}: must lie in (0, 1)")
    return b * _excess((a - b) / b) + (1.0 - b) * _excess((b - a) / (1.0 - b))


def failure_probability(threshold: float, violated: float, samples: int) -> float:
    """q = exp(-s·KL(δ'‖δ_v)), rounded up.

    An upper bound on the chance that the mean of s independent values in [0, 1], each of mean
    ≥ ``violated`` = δ_v, is at most ``threshold`` = δ' < δ_v (Hoeffding 1963, Theorem 1;
    docs/theory/certification.md#thm-chernoff; ``test_the_bound_holds_for_bernoulli_sums``).
    """
    if not 0.0 <= threshold < violated < 1.0:
        raise ValueError(
            f"threshold={threshold}, violated={violated}: need 0 ≤ threshold < violated < 1"
        )
    checks.integer("samples", samples)
    q = math.exp(-samples * binary_kl(threshold, violated))
    return min(1.0, q * (1.0 + ROUNDING) + 5e-324)


def counted_split(delta: float, attempts: int) -> tuple[float, float]:
    """δ_v and q with δ_v + k q (1 - δ_v) ≤ δ and k q = δ/1000, for k attempts.

    Where what several certificates say picks one, any of them may be wrong, and all of them have to
    rest on one δ_v (docs/theory/certification.md#thm-evr;
    ``test_the_best_of_several_is_as_private_as_stated``).
    """
    failure = delta / 1000.0
    violated = (delta - failure) / (1.0 - failure) * (1.0 - 1e-12)
    return violated, failure / attempts


def largest_threshold(delta: float, samples: int, failure: float) -> float:
    """The largest δ' (rounded down) whose ``failure_probability`` against δ is ≤ ``failure``."""
    if failure_probability(0.0, delta, samples) > failure:
        least = math.ceil(math.log(failure) / math.log1p(-delta)) + 1
        raise ValueError(
            f"samples={samples}: too few to show delta={delta} with failure probability {failure}; "
            f"use at least {least}, better three times that"
        )

    def excess(share: float) -> float:
        q = failure_probability(share * delta, delta, samples)
        return math.log(max(q, 1e-300)) - math.log(failure)

    if failure_probability(0.0, delta, samples) == failure:
        return 0.0
    share = float(brentq(excess, 0.0, 1.0 - 1e-12, xtol=1e-12)) * (1.0 - 1e-9)
    checks.invariant(
        failure_probability(share * delta, delta, samples) <= failure,
        "the bound fails more often than it may",
    )
    return share * delta


def upper_confidence(mean: float, samples: int, failure: float) -> float:
    """Upper bound on the mean of values in [0, 1], false with probability ≤ ``failure``.

    The largest u with exp(-s·KL(mean‖u)) ≥ failure (docs/theory/certification.md#thm-chernoff;
    ``test_upper_confidence_covers``).
    """
    if not 0.0 <= mean <= 1.0 or samples < 1 or not 0.0 < failure < 1.0:
        raise ValueError(f"mean={mean}, samples={samples}, failure={failure}: out of range")
    if mean == 1.0:
        return 1.0
    target = -math.log(failure) / samples * (1.0 + ROUNDING)
    if mean == 0.0:
        return min(1.0, -math.expm1(-target) * (1.0 + ROUNDING))
    top = 1.0 - 1e-16
    if binary_kl(mean, top) <= target:
        return 1.0

    def gap(log_u: float) -> float:
        u = math.exp(log_u)
        return -target if u <= mean else binary_kl(mean, min(u, top)) - target

    root = math.exp(brentq(gap, math.log(mean), 0.0, xtol=1e-13, rtol=1e-13))
    return float(min(1.0, root * (1.0 + ROUNDING)))


def upper_confidence_by_squares(mean: float, samples: int, failure: float) -> float:
    """The same of values ≥ 0 of which no bound is known, but whose squares have a mean of ≤ 1.

    The u in [mean, 1] with exp(-s·KL(mean u‖u²)) = failure
    (docs/theory/certification.md#thm-weighted-squares;
    ``test_upper_confidence_by_squares_covers``).
    """
    if not mean >= 0.0 or samples < 1 or not 0.0 < failure < 1.0:
        raise ValueError(f"mean={mean}, samples={samples}, failure={failure}: out of range")
    target, top = -math.log(failure) / samples * (1.0 + ROUNDING), 1.0 - 1e-9

    def gap(u: float) -> float:
        return binary_kl(mean * u, u * u) - target

    if mean >= top or gap(top) <= 0.0:
        return 1.0
    # At the mean, and where u² is below the target, nothing is shown.
    root = float(brentq(gap, max(mean, 1e-150), top, xtol=1e-300, rtol=1e-13))
    return min(1.0, root * (1.0 + ROUNDING))
