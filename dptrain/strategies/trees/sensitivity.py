"""Sensitivity of tree strategies: an exact search over trees, and a bound where it is too long.

With x the indicator of at most m participations, any two at least b apart, ‖C x‖² is the sum over
all complete nodes of count², the count of participations in the node: an integer.
"""

from __future__ import annotations

import functools

import numpy as np

from dptrain.strategies.binding import participations

SEARCH_UP_TO = 2_000_000
"""Pairs of outcomes that the exact search may combine, about a second; then the bound."""

_Outcomes = list[tuple[int, int, int]]


@functools.lru_cache(maxsize=256)
def worst_square(
    steps: int, height: int, max_participations: int, min_sep: int
) -> tuple[int, bool]:
    """max ‖C x‖² over all patterns, or an upper bound on it; and whether it is the maximum."""
    m, b = participations(steps, max_participations, min_sep)
    bound = level_bound(steps, height, m, b)
    if bound == regular_square(steps, height, m, b):
        return bound, True
    try:
        return _PatternSearch(height, m, b).worst(steps), True
    except _TooLong:
        return bound, False


def level_bound(steps: int, height: int, m: int, b: int) -> int:
    """An upper bound on ‖C x‖²: every level at its own worst.

    The proof is docs/theory/strategies.md#thm-tree-sensitivity; it is checked by
    ``test_search_and_bound_against_every_pattern``.

    The pattern 0, b, 2b, … attains it for m = 1, for b at least the leaves of a tree, and for b a
    power of two (it fills one node after the other, on every level at once).
    """
    total = 0
    for level in range(height):
        k = min(m, -(-(1 << level) // b))
        everyone = min(m, -(-(steps >> level << level) // b))
        full, rest = divmod(everyone, k)
        total += full * k * k + rest * rest
    return total


def regular_square(steps: int, height: int, m: int, b: int) -> int:
    """‖C x‖² for participations at 0, b, …, (m-1) b, without x.

    Before step s there are min(m, ceil(s/b)) of them.
    """
    total = 0
    for level in range(height):
        end = steps >> level << level
        if 1 << level <= b:  # no two in a node
            total += min(m, -(-end // b))
        else:
            edges = np.arange(0, min(end, m * b + (1 << level)) + 1, 1 << level, dtype=np.int64)
            counts = np.diff(np.minimum(m, -(-edges // b)))
            total += int(counts @ counts)
    return total


class _TooLong(Exception):
    """The search would combine more than ``SEARCH_UP_TO`` pairs."""


class _PatternSearch:
    """The worst pattern by dynamic programming over the dyadic intervals of 0, …, n - 1.

    An outcome of an interval is (k, barred, value): the number of participations in it, how many
    steps after it the last of them (or an earlier one) still bars, and Σ count² over the nodes of C
    in it. An interval larger than a tree is no row of C and only adds up its halves.

    Two reductions, neither of which loses the maximum
    (docs/theory/strategies.md#thm-tree-sensitivity):

    * An interval of at most b steps holds at most one participation, at its first free step.
    * Of two outcomes with as many participations, the one that bars no fewer steps and has no
      greater value is dropped.

    An interval is the same wherever it lies, so the work hardly grows with n; it grows with the
    number of participations and of distances modulo b.
    """

    def __init__(self, height: int, m: int, b: int) -> None:
        self._height = height
        self._m = m
        self._b = b
        self._pairs = 0
        self._known: dict[tuple[int, int], _Outcomes] = {}

    def worst(self, steps: int) -> int:
        """The maximum, over the maximal dyadic intervals of n steps from left to right."""
        found: _Outcomes = [(0, 0, 0)]
        for level in reversed(range(steps.bit_length())):
            if steps >> level & 1:
                found = self._followed(found, level)
        return max(value for _, _, value in found)

    def _interval(self, level: int, barred: int) -> _Outcomes:
        """The outcomes of an interval of 2^level steps, the first ``barred`` of them barred."""
        size = 1 << level
        if barred >= size:
            return [(0, barred - size, 0)]
        if size <= self._b:
            rows = min(level + 1, self._height)
            return [(0, 0, 0), (1, barred + self._b - size, rows)]
        if (level, barred) not in self._known:
            found = self._followed(self._interval(level - 1, barred), level - 1)
            if level < self._height:
                found = [(k, after, value + k * k) for k, after, value in found]
            self._known[level, barred] = found
        return self._known[level, barred]

    def _followed(self, left: _Outcomes, level: int) -> _Outcomes:
        """Outcomes of ``left`` followed by an interval of that level, dominated ones dropped."""
        best: dict[tuple[int, int], int] = {}
        for k, barred, value in left:
            right = self._interval(level, barred)
            self._pairs += len(right)
            if self._pairs > SEARCH_UP_TO:
                raise _TooLong
            for more, after, gained in right:
                if k + more <= self._m:
                    end = (k + more, after)
                    best[end] = max(best.get(end, -1), value + gained)
        kept: _Outcomes = []
        for (k, after), value in sorted(best.items()):
            if not kept or kept[-1][0] != k or kept[-1][2] < value:
                kept.append((k, after, value))
        return kept
