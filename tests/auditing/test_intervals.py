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
