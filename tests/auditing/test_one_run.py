"""The bound of one run: never below what a private mechanism reaches, and reached by some."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom

from dptrain.auditing import audit_one_run, one_run_p_value


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.05])
def test_no_private_mechanism_guesses_better(epsilon, delta):
    """Each canary's coin told with probability δ, else by randomized response; and all at once."""
    m = 30
    right = expit(epsilon)
    for v in range(m + 1):
        bound = one_run_p_value(canaries=m, guesses=m, correct=v, epsilon=epsilon, delta=delta)
        apart = binom.sf(v - 1, m, delta + (1 - delta) * right)
        together = delta + (1 - delta) * binom.sf(v - 1, m, right)
        assert bound >= apart - 1e-12
        assert bound >= together - 1e-12
        if delta == 0:
            assert bound == pytest.approx(apart, rel=1e-12)


def test_the_largest_share_is_found():
    """The maximum over i, term by term."""
    m, r, v, epsilon, delta = 40, 20, 15, 0.5, 1e-3
    right = expit(epsilon)
    terms = [
        (binom.cdf(v - 1, r, right) - binom.cdf(v - i - 1, r, right)) / i for i in range(1, m + 1)
    ]
    expected = binom.sf(v - 1, r, right) + 2 * m * delta * max(terms)
    found = one_run_p_value(canaries=m, guesses=r, correct=v, epsilon=epsilon, delta=delta)
    assert found == pytest.approx(expected, rel=1e-10)


def test_bounds_exceed_the_true_epsilon_as_rarely_as_stated():
    """Randomized response, 400 runs of 300 canaries: 6 sigma."""
    rng, alpha, times, epsilon = np.random.default_rng(6), 0.05, 400, 1.0
    failed, shown = 0, []
    for _ in range(times):
        taken = rng.random(300) < 0.5
        told = np.where(rng.random(300) < expit(epsilon), taken, ~taken)
        found = audit_one_run(told + 0.1 * rng.random(300), taken, delta=0.0, alpha=alpha)
        failed += found.epsilon_lower > epsilon
        shown.append(found.epsilon_lower)
    assert failed <= alpha * times + 6 * math.sqrt(alpha * (1 - alpha) * times)
    assert np.median(shown) > 0.4


def test_all_correct_shows_the_most():
    taken = np.arange(64) % 2 == 0
    found = audit_one_run(taken.astype(float), taken, delta=0.0, alpha=0.05, guesses=[64])
    assert (found.correct, found.epsilon_lower) == (64, found.most)
    # e^ε/(1+e^ε) to the 64th is the chance of it.
    assert expit(found.most) ** 64 == pytest.approx(0.05, rel=1e-2)


def test_a_large_delta_shows_nothing():
    taken = np.arange(64) % 2 == 0
    assert audit_one_run(taken * 1.0, taken, delta=0.1, alpha=0.05).epsilon_lower == 0.0


@pytest.mark.parametrize(
    ("change", "said"),
    [({"guesses": [3]}, "guesses=3"), ({"guesses": [66]}, "guesses=66"), ({"alpha": 0}, "alpha=0")],
)
def test_mistakes_are_told(change, said):
    taken = np.arange(64) % 2 == 0
    with pytest.raises(ValueError, match=said):
        audit_one_run(taken * 1.0, taken, **{"delta": 0.0, "alpha": 0.05, **change})
