"""Sizes of the part of one example in cyclic sampling, gathered into intervals."""

from __future__ import annotations

import math

from scipy.stats import binom

# Ends of the intervals of a random size, in standard deviations from its mean.
_EDGES = (-1.5, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.5, 7.5)
_SLACK = 1e-9


def equal_sizes(dataset_size: int, cycle: int) -> list[tuple[float, int, int]]:
    """(probability, least, most) for parts that differ by at most one: N mod b are the larger.

    A uniform split: the example is in the r larger parts of m + 1 with probability r(m+1)/N.
    """
    least, larger = divmod(dataset_size, cycle)
    if larger == 0:
        return [(1.0, least, least)]
    share = larger * (least + 1) / dataset_size
    return [(1.0 - share, least, least), (share, least + 1, least + 1)]


def independent_sizes(dataset_size: int, cycle: int) -> list[tuple[float, int, int]]:
    """(probability, least, most) of 1 + Bin(N-1, 1/b): intervals that cover 1..N, rounded up."""
    trials, chance = dataset_size - 1, 1.0 / cycle
    if cycle == 1 or trials == 0:
        return [(1.0, dataset_size, dataset_size)]
    mean, deviation = trials * chance, math.sqrt(trials * chance * (1.0 - chance))
    ends = {min(max(math.ceil(mean + edge * deviation), 0), trials) for edge in _EDGES}
    found, first = [], 0
    for last in sorted(ends | {trials}):
        # Above the mean from the upper tail, which keeps its digits.
        if first > mean:
            weight = binom.sf(first - 1, trials, chance) - binom.sf(last, trials, chance)
        else:
            weight = binom.cdf(last, trials, chance) - binom.cdf(first - 1, trials, chance)
        found.append((float(weight) * (1.0 + _SLACK) + 1e-300, first + 1, last + 1))
        first = last + 1
    return found
