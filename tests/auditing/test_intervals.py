"""Bounds fail no more often than they say, and are not wider than they must be."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from dptrain.auditing import least_mean, least_probability, most_probability


@pytest.mark.parametrize("p", [0.003, 0.2, 0.97])
def test_probability_bounds_fail_as_rarely_as_they_say(p):
    """Summed over all counts: no simulation."""
    runs, alpha = 60, 0.05
    chances = binom.pmf(np.arange(runs + 1), runs, p)
    low = np.array([least_probability(k, runs, alpha) for k in range(runs + 1)])
    high = np.array([most_probability(k, runs, alpha) for k in range(runs + 1)])
    assert chances[low > p].sum() <= alpha
    assert chances[high < p].sum() <= alpha


def chance_of_error(side: str, table: np.ndarray, ones: int, unsure: int, p: float) -> float:
    """That a bound is false of trials of which so many succeed, and so many do with chance p."""
    counts = ones + np.arange(unsure + 1)
    mean = (ones + unsure * p) / (table.size - 1)
    wrong = table[counts] > mean if side == "low" else table[counts] < mean
    return float(binom.pmf(np.arange(unsure + 1), unsure, p)[wrong].sum())


@pytest.mark.sample(every=13)
@pytest.mark.parametrize("alpha", [0.25, 0.05, 0.025, 1e-3, 1e-6])
@pytest.mark.parametrize("runs", [1, 2, 3, 5, 12, 40])
def test_bounds_hold_of_trials_that_are_not_alike(runs, alpha):
    """All that have to be tried, without simulation.

    Of a given mean a tail is largest where all probabilities are 0, 1 or one more number (Hoeffding
    1956), and the chance of an error grows with the mean up to the next value of the bound.
    """
    counts = np.arange(runs + 1)
    low = least_probability(counts, runs, alpha)
    high = most_probability(counts, runs, alpha)
    assert (np.diff(low) > 0).all()
    assert np.allclose(high, 1.0 - low[::-1], rtol=0, atol=1e-12)
    for ones in range(runs + 1):
        for unsure in range(1, runs - ones + 1):
            for side, table, way in (("low", low, -1e-9), ("high", high, 1e-9)):
                shares = (runs * (table + way) - ones) / unsure
                for p in shares[(shares >= 0) & (shares <= 1)]:
                    error = chance_of_error(side, table, ones, unsure, float(p))
                    assert error <= alpha * (1 + 1e-6), (ones, unsure, p)


@pytest.mark.parametrize("runs", [10, 100, 1000])
def test_one_success_says_less_of_trials_that_are_not_alike(runs):
    """One trial alone may succeed: the bound for alike trials would be false too often."""
    alpha = 0.025
    alike = 1.0 - (1.0 - alpha) ** (1 / runs)
    chance = runs * alike * (1 - 1e-9)  # of that trial, with a mean just below the bound
    assert chance > alpha
    assert float(least_probability(1, runs, alpha)) <= chance / runs
    assert float(most_probability(runs - 1, runs, alpha)) >= 1.0 - chance / runs


def test_no_error_in_m_runs_leaves_the_known_bound():
    assert most_probability(0, 100, 0.05) == pytest.approx(1 - 0.05 ** (1 / 100))
    assert least_probability(100, 100, 0.05) == pytest.approx(0.05 ** (1 / 100))


@pytest.mark.slow
@pytest.mark.parametrize("heavy", [False, True])
def test_means_are_seldom_overestimated(heavy):
    """Of terms with heavy tails as well, 2000 times: 6 sigma above the stated chance at most."""
    rng = np.random.default_rng(3)
    failed, widths, times, alpha = 0, [], 2000, 0.1
    for _ in range(times):
        if heavy:
            terms = rng.lognormal(0.0, 2.0, 300)
            mean = np.exp(2.0)
        else:
            terms = np.where(rng.random(300) < 0.1, rng.exponential(1.0, 300), 0.0)
            mean = 0.1
        bound = least_mean(terms, alpha)
        failed += bound > mean
        widths.append(1 - bound / terms.mean())
    assert failed <= alpha * times + 6 * np.sqrt(alpha * (1 - alpha) * times)
    assert 0 < np.median(widths) < (0.95 if heavy else 0.55)


def test_the_bound_is_near_what_the_normal_law_would_give():
    """With many samples: within 2.2 times its 2.33 standard errors, at 99 %."""
    terms = np.random.default_rng(4).exponential(1.0, 100_000)
    bound = least_mean(terms, 0.01)
    assert 1 - 2.2 * 2.33 / np.sqrt(100_000) < bound / terms.mean() < 1 - 2.33 / np.sqrt(100_000)


def test_what_has_no_bound():
    assert least_mean(np.zeros(50), 0.01) == 0.0
    with pytest.raises(ValueError, match="terms ≥ 0"):
        least_mean(np.array([1.0, -1e-9]), 0.01)
    with pytest.raises(ValueError, match="alpha=0"):
        least_mean(np.ones(3), 0.0)
