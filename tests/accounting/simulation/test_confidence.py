"""The certificate's arithmetic against exact binomial tails and dense grids."""

from __future__ import annotations

import math
from fractions import Fraction

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
)
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
