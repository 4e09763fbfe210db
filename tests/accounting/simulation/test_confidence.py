"""The certificate's arithmetic against exact binomial tails and dense grids."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from dptrain.accounting.simulation.confidence import (
    ROUNDING,
    binary_kl,
    counted_split,
    failure_probability,
    upper_confidence,
    upper_confidence_by_squares,
)
from dptrain.accounting.simulation.terms import WeightedTerms
from dptrain.accounting.simulation.verdicts import Rule


def exact_kl(a: float, b: float) -> float:
    """KL with 60 decimal digits."""
    from decimal import Decimal, getcontext

    getcontext().prec = 60
    x, y = Decimal(a), Decimal(b)
    first = x * (x / y).ln() if a else Decimal(0)
    return float(first + (1 - x) * ((1 - x) / (1 - y)).ln())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (5e-6, 1e-5),
        (0.0, 1e-12),
        (1e-300, 3e-300),
        (1e-9, 1.0000001e-9),
        (0.3, 0.3 + 1e-9),
        (0.3, 0.9),
        (0.999, 0.9999999),
        (1e-5, 1.0099e-5),
        (1e-5, 1.0101e-5),
    ],
)
def test_binary_kl_is_accurate(a: float, b: float) -> None:
    assert binary_kl(a, b) == pytest.approx(exact_kl(a, b), rel=1e-12)
    assert binary_kl(b, b) == 0.0


@given(
    violated=st.floats(1e-4, 0.6),
    ratio=st.floats(0.01, 0.99),
    samples=st.integers(1, 20_000),
)
def test_the_bound_holds_for_bernoulli_sums(violated: float, ratio: float, samples: int) -> None:
    threshold = violated * ratio
    accepted = math.floor(Fraction(threshold) * samples)
    assert binom.cdf(accepted, samples, violated) <= failure_probability(
        threshold, violated, samples
    ) * (1 + 1e-12)


def test_the_bound_is_not_trivial() -> None:
    # The exponent is right: -log tail / (s KL) tends to 1; at s·KL = 69 it is within 10 %.
    tail = binom.logcdf(500, 10_000, 0.078)
    bound = math.log(failure_probability(0.05, 0.078, 10_000))
    assert tail < bound < 0.9 * tail


@pytest.mark.parametrize("attempts", [2, 7])
@pytest.mark.parametrize("delta", [0.3, 0.02, 1e-4])
def test_the_best_of_several_is_as_private_as_stated(attempts: int, delta: float) -> None:
    """Somebody takes whichever of k independent certificates accepts, as a planner would.

    Every one is of a mechanism that violates δ_v: its terms are Bernoulli, of a mean just above it,
    so that chances are binomial sums. Whatever is taken then counts as lost.
    """
    violated, failure = counted_split(delta, attempts)
    assert counted_split(delta, 1)[0] == violated  # whatever is taken rests on one δ_v
    assert failure == delta / 1000 / attempts
    rule = Rule.plain(violated, failure, 10**9)
    wrong = sum(
        binom.cdf(math.floor(rule.threshold(1.0, each) * each), each, violated * (1 + 1e-9))
        for each in rule.looks(1.0)
    )
    assert 0.0 < wrong <= failure
    lost = 1.0 - (1.0 - wrong) ** attempts
    assert violated + lost * (1.0 - violated) <= delta


@given(count=st.integers(0, 60), samples=st.integers(60, 3000), failure=st.floats(1e-9, 0.3))
def test_upper_confidence_covers(count: int, samples: int, failure: float) -> None:
    u = upper_confidence(count / samples, samples, failure)
    # Were the true mean u, a result this low would have probability ≤ failure; exactly so by the
    # binomial tail, and with equality in the Chernoff exponent.
    if u < 1:
        assert binom.cdf(count, samples, u) <= failure
        needed = -math.log(failure)
        assert samples * exact_kl(count / samples, u) >= needed
        # It is not larger than its rounding makes it: near 1 the exponent is steep, and a digit of
        # u less is what has to fall short.
        less = u / (1.0 + ROUNDING) ** 2 * (1.0 - 1e-12)
        assert samples * exact_kl(count / samples, less) <= needed * (1.0 + 1e-5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: binary_kl(-0.1, 0.5),
        lambda: binary_kl(0.1, 0.0),
        lambda: failure_probability(0.2, 0.1, 10),
        lambda: failure_probability(0.1, 0.2, 0),
        lambda: upper_confidence(1.1, 10, 0.1),
        lambda: upper_confidence(0.1, 10, 0.0),
    ],
)
def test_bad_arguments_are_refused(call: object) -> None:
    with pytest.raises(ValueError, match=r"must lie|need|must be|out of range"):
        call()  # type: ignore[operator]


def chance_of_small_sums(values: list[int], weights: list[float], samples: int, most: int) -> float:
    """Pr[X_1 + … + X_s ≤ most] of independent whole numbers, by convolution."""
    law = np.zeros(most + 1)
    law[0] = 1.0
    for _ in range(samples):
        after = np.zeros(most + 1)
        for value, weight in zip(values, weights, strict=True):
            if value <= most:
                after[value:] += weight * law[: most + 1 - value]
        law = after
    return float(law.sum())


@pytest.mark.parametrize("seed", range(4))
def test_terms_of_bounded_squares_are_small_as_rarely_as_stated(seed: int) -> None:
    """Values without a bound to speak of: rare ones are ten times the M that stands for them."""
    rng = np.random.default_rng(seed)
    tightest = 0.0
    for _ in range(15):
        values = sorted({0, *rng.integers(1, 12, size=2).tolist(), 40})
        weights = [*(rng.random(len(values) - 2) * 0.05).tolist(), 1e-4 * rng.random()]
        weights = [1.0 - sum(weights), *weights]
        mean = sum(v * w for v, w in zip(values, weights, strict=True))
        square = sum(v * v * w for v, w in zip(values, weights, strict=True))
        violated = mean * float(rng.uniform(0.8, 1.0))  # what is claimed may be less than the mean
        terms = WeightedTerms(math.sqrt(square), 1, lambda rng, size: np.zeros(size), bounded=False)
        reach = terms.range_at(violated)
        samples = int(rng.integers(50, 400))
        for share in (0.0, 0.3, 0.7):
            most = math.floor(share * violated * samples)
            threshold = most / samples
            bound = failure_probability(threshold / reach, violated / reach, samples)
            truth = chance_of_small_sums(values, weights, samples, most)
            assert truth <= bound * (1 + 1e-9)
            tightest = max(tightest, truth / bound)
    assert tightest > 0.01


def test_two_values_are_the_worst_of_a_mean_and_a_mean_square() -> None:
    # 0 and V/mean: the chance is that of a coin, so nothing smaller than V/mean would do.
    samples, reach, violated = 200, 5, 0.1
    truth = chance_of_small_sums([0, reach], [1 - violated / reach, violated / reach], samples, 0)
    assert truth == pytest.approx(failure_probability(0.0, violated / reach, samples), rel=1e-6)
    with_less = failure_probability(0.0, violated / (0.9 * reach), samples)
    assert truth > with_less


@pytest.mark.parametrize("samples", [40, 400])
def test_upper_confidence_by_squares_covers(samples: int) -> None:
    """Of Bernoulli sums, whose mean square is the mean: of all sums together at most q fail."""
    failure = 0.01
    for mean in (0.001, 0.02, 0.3):
        root = math.sqrt(mean)
        wrong = 0.0
        for total in range(samples + 1):
            shown = root * upper_confidence_by_squares(total / samples / root, samples, failure)
            assert shown <= root * (1 + 1e-9)
            if shown < mean:
                wrong += float(binom.pmf(total, samples, mean))
        assert wrong <= failure
    assert upper_confidence_by_squares(1.5, samples, failure) == 1.0
    assert 0.9 < upper_confidence_by_squares(0.0, 10, 1e-9) < 1.0
    # The deterministic bound is 1, and many samples show their mean.
    assert 0.5 < upper_confidence_by_squares(0.5, 10**7, failure) < 0.51
    with pytest.raises(ValueError, match="out of range"):
        upper_confidence_by_squares(-0.1, samples, failure)
