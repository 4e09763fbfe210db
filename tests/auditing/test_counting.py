"""Counting against the Gaussian mechanism, whose trade-off is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from dptrain.auditing import (
    StatedCurve,
    count,
    count_epsilon,
    least_probability,
    most_countable,
    most_probability,
)
from tests.helpers.power import power_of_counting

MU = 1.0
GRID = np.linspace(0.0, 3.0, 16)


def delta(epsilon: float | np.ndarray, mu: float = MU) -> np.ndarray:
    """Balle & Wang 2018, Theorem 8."""
    epsilon = np.asarray(epsilon)
    return norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


CURVE = StatedCurve(epsilon=GRID, remove=delta(GRID), add=delta(GRID))


def scores(seed: int, runs: int, mu: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(mu, 1.0, runs), rng.normal(0.0, 1.0, runs)


def test_true_statements_pass_as_often_as_stated():
    """400 times, at the boundary: no more than 6 sigma above the stated chance."""
    alpha, times = 0.05, 400
    wrong = [
        count(*scores(seed, 2000, MU), alpha=alpha, epsilon=1, delta=float(delta(1)), curve=CURVE)
        for seed in range(times)
    ]
    failed = sum(each.violated for each in wrong)
    assert failed <= alpha * times + 6 * math.sqrt(alpha * (1 - alpha) * times)
    assert all(each.epsilon_lower <= 1.2 for each in wrong)


def test_a_tenth_too_little_noise_is_counted():
    found = count(
        *scores(1, 200_000, MU / 0.9), alpha=0.01, epsilon=1, delta=float(delta(1)), curve=CURVE
    )
    assert found.violated
    assert found.delta_lower <= float(delta(found.epsilon, MU / 0.9))


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_either_direction_is_seen(direction):
    """An event that one world has with probability .1 and the other never."""
    rng = np.random.default_rng(5)
    plain, odd = rng.normal(size=4000), rng.normal(size=4000)
    odd[rng.random(4000) < 0.1] = 50.0
    worlds = (odd, plain) if direction == "remove" else (-plain, -odd)
    found = count(*worlds, alpha=0.01, epsilon=1.0, delta=1e-3)
    assert (found.direction, found.false) == (direction, 0)
    assert found.violated
    assert 3 < found.epsilon_lower < found.most


def test_perfect_tests_show_what_counting_can():
    found = count_epsilon(np.ones(2000), np.zeros(2000), alpha=0.02, delta=1e-5)
    assert found.epsilon_lower == pytest.approx(most_countable(1000, 1e-5, 0.02), rel=1e-12)
    never = 1 - 0.01 ** (1 / 1000)  # what no error in a thousand runs leaves of an error
    assert found.most == pytest.approx(math.log((1 - never - 1e-5) / never), rel=1e-9)


def test_guessing_shows_nothing():
    assert not count(*scores(2, 4000, 0.0), alpha=0.01, epsilon=0.5, delta=1e-5).violated
    assert count_epsilon(*scores(2, 4000, 0.0), alpha=0.01, delta=1e-5).epsilon_lower < 0.2


@pytest.mark.slow
def test_counted_epsilons_exceed_the_true_one_as_rarely_as_stated():
    """400 times; the test is chosen to show most, by runs that are not counted."""
    alpha, times, level = 0.05, 400, float(delta(1.0))
    found = [
        count_epsilon(*scores(seed, 2000, MU), alpha=alpha, delta=level).epsilon_lower
        for seed in range(times)
    ]
    failed = sum(each > 1.0 for each in found)
    assert failed <= alpha * times + 6 * math.sqrt(alpha * (1 - alpha) * times)
    assert np.median(found) > 0.3


def test_power_is_what_enumeration_gives():
    runs, alpha, epsilon, stated = 40, 0.1, 0.3, 0.05
    power = power_of_counting(
        hit_rate=0.8, false_rate=0.2, runs=runs, epsilon=epsilon, delta=stated, alpha=alpha
    )
    total = 0.0
    for hits in range(runs + 1):
        for false in range(runs + 1):
            low = least_probability(hits, runs, alpha / 2)
            high = most_probability(false, runs, alpha / 2)
            if low - math.exp(epsilon) * high > stated:
                total += binom.pmf(hits, runs, 0.8) * binom.pmf(false, runs, 0.2)
    assert power == pytest.approx(total, rel=1e-9)
    assert 0.2 < power < 1


def test_what_is_refused():
    with pytest.raises(ValueError, match="equally many"):
        count(np.ones(5), np.ones(6), alpha=0.1, epsilon=1, delta=0.1)
    with pytest.raises(ValueError, match="remove has the shape"):
        StatedCurve(epsilon=np.ones(3), remove=np.ones(2), add=np.ones(3))
