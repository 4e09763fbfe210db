"""Truncation: at most so many of the sampled examples, chosen uniformly among them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from dptrain.sampling.scheme import Indices


def truncate(rng: np.random.Generator, batch: Indices, largest: int) -> Indices:
    """A uniformly random subset of ``largest`` of the batch if it has more, in its order."""
    if len(batch) <= largest:
        return batch
    kept = rng.choice(len(batch), size=largest, replace=False, shuffle=False)
    return batch[np.sort(kept)]


def inclusion_probability(
    trials: npt.ArrayLike, probability: float, largest: int
) -> npt.NDArray[np.float64]:
    """E[min(X, B)]/m: one example's chance to be drawn and kept, for X ~ Bin(m, p).

    It equals p·E[min(1, B/(1+Y))] with Y ~ Bin(m-1, p), the number of *other* examples drawn. By
    k·Bin(m, p)(k) = m·p·Bin(m-1, p)(k-1) it is p·P(Bin(m-1, p) ≤ B-1) + (B/m)·P(X > B).

    Args:
        trials: m ≥ 1, the examples that toss a coin; one number or an array of them.
        probability: p.
        largest: B ≥ 1.
    """
    m = np.asarray(trials)
    below = probability * binom.cdf(largest - 1, m - 1, probability)
    return np.asarray(below + largest / m * binom.sf(largest, m, probability), dtype=np.float64)


def mean_truncated_binomial(trials: int, probability: float, largest: int) -> float:
    """E[min(X, B)] for X ~ Bin(``trials``, ``probability``) and B = ``largest``."""
    return trials * float(inclusion_probability(trials, probability, largest))
