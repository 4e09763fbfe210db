"""Curves of cut draws, and the sizes of the parts that cyclic Poisson sampling draws from."""

from __future__ import annotations

import math

from scipy.stats import binom

from dptrain.accounting.poisson.curves import CasesCurve, ComposedCurve, SubsampledGaussianCurve
from dptrain.accounting.poisson.truncated_step import Branches
from dptrain.core import Adjacency

# Ends of the intervals of a random size, in standard deviations from its mean.
_EDGES = (-1.5, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.5, 7.5)
_SLACK = 1e-9


def poisson_curve(
    adjacency: Adjacency, *, probability: float, steps: int, sensitivity: float
) -> ComposedCurve:
    """Composed steps of a Poisson draw that is not cut, under one of the three adjacencies."""
    if adjacency.one_side_empty:
        return SubsampledGaussianCurve(probability, steps, sensitivity)
    alone = Branches(open=1.0, full=0.0, kept=probability)
    return CasesCurve(probability, alone, steps, sensitivity, adjacency)


def truncated_curve(
    adjacency: Adjacency,
    *,
    dataset_size: int,
    probability: float,
    max_batch_size: int,
    steps: int,
    sensitivity: float,
    least: int | None = None,
) -> ComposedCurve:
    """Composed steps for N examples (add-remove: for N against N-1), at most B of them kept.

    With ``least`` the curve bounds those of all numbers of examples from that up to N.
    """
    if max_batch_size >= dataset_size:
        return poisson_curve(
            adjacency, probability=probability, steps=steps, sensitivity=sensitivity
        )
    cases = Branches.covering(
        dataset_size if least is None else least,
        dataset_size,
        probability=probability,
        max_batch_size=max_batch_size,
    )
    return CasesCurve(probability, cases, steps, sensitivity, adjacency)


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
