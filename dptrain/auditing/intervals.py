"""Confidence bounds that hold for every number of samples."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.stats import beta

from dptrain.core import Array, checks

# Shares of the capital that are bet on every sample; one of them is near the best for any spread.
_SHARES = np.geomspace(1e-4, 0.5, 14)
_HALVINGS = 40


def least_probability(successes: npt.ArrayLike, trials: int, alpha: float) -> Array:
    """Lower bound on the mean probability of independent trials, which need not be alike.

    Above the mean with chance at most ``alpha``, which is to be at most 1/4 where trials differ.
    That of Clopper & Pearson 1934, except α/n for one success: unlike trials have one success more
    often than alike ones of the same mean (docs/theory/auditing.md#thm-unequal-trials;
    ``test_bounds_hold_of_trials_that_are_not_alike``). Of any shape, that of ``successes``.
    """
    k = np.asarray(successes)
    bound = beta.ppf(alpha, np.maximum(k, 1), trials - k + 1)
    return np.asarray(np.select([k == 0, k == 1], [0.0, alpha / trials], bound))


def most_probability(successes: npt.ArrayLike, trials: int, alpha: float) -> Array:
    """Upper bound on the mean probability; it is too low with chance at most ``alpha``.

    What ``least_probability`` says of the failures.
    """
    k = np.asarray(successes)
    bound = beta.ppf(1.0 - alpha, k + 1, np.maximum(trials - k, 1))
    one_failure = 1.0 - alpha / trials
    return np.asarray(np.select([k == trials, k == trials - 1], [1.0, one_failure], bound))


def least_mean(terms: Array, alpha: float) -> float:
    """Lower confidence bound on the mean of independent terms that are not negative.

    A bet at fair odds: if the mean is μ, the capital of a player who stakes the share θ of it on
    every term, Π (1 - θ + θ f_i/μ), has the expectation 1, and so has the mean over several θ; it
    exceeds 1/α with chance at most α (Markov). The bound is the largest μ under which it does. The
    terms need no upper bound, which importance weights do not have (Waudby-Smith & Ramdas 2024,
    arXiv 2010.09686, bet the same way with bounded terms).

    Args:
        terms: f ≥ 0, shape (samples,).
        alpha: chance that the bound exceeds the mean.

    Raises:
        ValueError: if a term is negative or α is not in (0, 1).
    """
    alpha = checks.number("alpha", alpha, above=0, below=1)
    if terms.size and terms.min() < 0:
        raise ValueError(f"terms has the entry {terms.min()}, but the bound requires terms ≥ 0")
    positive = terms[terms > 0]
    zeros = terms.size - positive.size
    if not positive.size:
        return 0.0

    def refuted(mean: float) -> bool:
        capital = zeros * np.log1p(-_SHARES) + np.array(
            [np.log1p(share * (positive / mean - 1.0)).sum() for share in _SHARES]
        )
        top = capital.max()
        log_mean = top + math.log(float(np.mean(np.exp(capital - top))))
        return log_mean >= -math.log(alpha)

    above = float(terms.mean())
    below = above
    while not refuted(below):
        below /= 2.0
        if below < above * 1e-12:
            return 0.0
    for _ in range(_HALVINGS):
        middle = math.sqrt(below * above)
        below, above = (middle, above) if refuted(middle) else (below, middle)
        if above < below * (1 + 1e-6):
            break
    return below
