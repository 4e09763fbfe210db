"""The chance that an audit finds what is wrong, worked out and not simulated."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import binom, chi2

from dptrain.auditing import least_probability, most_probability
from dptrain.core import checks


def power_against_scaled_noise(factor: float, *, runs: int, steps: int, alpha: float) -> float:
    """Chance that the size of all noise gives away noise of ``factor`` times σ; exact."""
    low, high = chi2.ppf([alpha / 2, 1 - alpha / 2], runs * steps)
    scaled = np.array([low, high]) / factor**2
    return float(chi2.cdf(scaled[0], runs * steps) + chi2.sf(scaled[1], runs * steps))


def power_of_counting(
    *, hit_rate: float, false_rate: float, runs: int, epsilon: float, delta: float, alpha: float
) -> float:
    """Chance that counting refutes (ε, δ) by a test of these rates; computed, not simulated.

    Args:
        hit_rate: chance that the test speaks in its own world.
        false_rate: chance that it speaks in the other.
        runs: m, counted in each world.
        epsilon: the ε of the statement that is tested.
        delta: its δ.
        alpha: chance of a false verdict that is accepted.

    Returns:
        Σ over both binomial counts of what the bounds refute.
    """
    runs = checks.integer("runs", runs)
    counts = np.arange(runs + 1)
    least = least_probability(counts, runs, alpha / 2)
    most = most_probability(counts, runs, alpha / 2)
    # Refuted are pairs with most[false] < (least[hits] - δ)/e^ε; most increases.
    allowed = np.searchsorted(most, (least - delta) / math.exp(epsilon), side="left")
    refuted = np.where(allowed > 0, binom.cdf(allowed - 1, runs, false_rate), 0.0)
    return float(np.sum(binom.pmf(counts, runs, hit_rate) * refuted))
