"""Truncation: at most so many of the sampled examples, chosen uniformly among them."""

from __future__ import annotations

import numpy as np
from scipy.stats import binom

from dptrain.sampling.scheme import Indices


def truncate(rng: np.random.Generator, batch: Indices, largest: int) -> Indices:
    """A uniformly random subset of ``largest`` of the batch if it has more, in its order."""
    if len(batch) <= largest:
        return batch
    kept = rng.choice(len(batch), size=largest, replace=False, shuffle=False)
    return batch[np.sort(kept)]


def mean_truncated_binomial(trials: int, probability: float, largest: int) -> float:
    """E[min(X, B)] for X ~ Bin(``trials``, ``probability``) and B = ``largest``.

    By k·Bin(n, p)(k) = n·p·Bin(n-1, p)(k-1): n·p·P(Bin(n-1, p) ≤ B-1) + B·P(X > B).
    """
    below = trials * probability * binom.cdf(largest - 1, trials - 1, probability)
    return float(below + largest * binom.sf(largest, trials, probability))
