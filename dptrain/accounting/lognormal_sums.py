"""The law of dP/dQ for one pick out of t independent steps, by doubling."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from dptrain.accounting.lognormal_mean import (
    LARGEST_RATIO,
    SMALLEST_RATIO,
    LogMean,
    lognormal,
    mixed,
)

# Spacing of the grid in units of r/√k, about the standard deviation of the logarithm of the mean of
# k variables. A split adds at most h²/4, on average h²/6, to its variance: with one spacing per two
# doublings that is a relative 1e-5 per doubling in the variance, half of it in ε. Above 200
# variables it is coarser, to keep the work bounded.
_RESOLUTION = 0.005
_FULL_RESOLUTION = 200


class _Ladder:
    """Spacings that are halved as variables are averaged, about once in two doublings.

    They divide log 2, so that where one variable dwarfs the other their mean, half of it, falls on
    the grid.
    """

    def __init__(self, ratio: float, count: int) -> None:
        self._target = _RESOLUTION * max(1.0, count / _FULL_RESOLUTION) ** 0.4 * ratio
        self._first = math.log(2.0) / math.ceil(math.log(2.0) / self._target)

    def spacing(self, count: float) -> float:
        """For the mean of so many variables."""
        wanted = self._first * math.sqrt(count) / self._target
        return self._first / 2.0 ** max(round(math.log2(wanted)), 0)


def _equal(ratio: float, count: int, ladder: _Ladder) -> LogMean:
    """The law of the mean of ``count`` copies, halving as evenly as they go.

    At every depth there are at most two sizes, count / 2^depth rounded down and up.
    """

    @functools.cache
    def law(size: int, depth: int) -> LogMean:
        spacing = ladder.spacing(count / 2**depth)
        if size == 1:
            return lognormal(ratio, spacing)
        half = size // 2
        first, second = law(half, depth + 1), law(size - half, depth + 1)
        return mixed(first, second, half / size, round(first.spacing / spacing))

    return law(count, 0)


def mean_of_lognormals(groups: Sequence[tuple[float, int]], *, like: int | None = None) -> LogMean:
    """The law of (1/t) Σ_i e^{r_i Z_i - r_i²/2} with t = Σ counts, spread onto a grid.

    Args:
        groups: pairs (r, how many variables have this r), r in (0, :data:`LARGEST_RATIO`].
        like: the grid of a mean of so many variables is used: where these have the same r, laws
            of different t then have spacings whose quotient is a power of 2.

    The law grows with every r in convex order (e^{rZ - r²/2} is a martingale in r²), so the least
    ones may be rounded up.
    """
    assert all(ratio <= LARGEST_RATIO for ratio, _ in groups)
    groups = [(max(ratio, SMALLEST_RATIO), count) for ratio, count in groups]
    total = sum(count for _, count in groups)
    ratio = math.sqrt(sum(count * ratio**2 for ratio, count in groups) / total)
    ladder = _Ladder(ratio, like or total)
    last = ladder.spacing(total)
    law, done = None, 0
    for ratio, count in groups:
        part = _equal(ratio, count, ladder)
        part = part.refined(round(part.spacing / last))
        law = part if law is None else mixed(law, part, done / (done + count))
        done += count
    assert law is not None
    return law
