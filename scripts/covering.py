"""Few combinations of choices in which every possible pair of choices occurs.

Most faults of a program show when two of its options meet (Cohen, Dalal, Fredman & Patton 1997,
IEEE TSE 23(7), whose greedy choice this is, over combinations that are listed instead of drawn):
where all combinations are too many for a test, all pairs are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Combination = tuple[Hashable, ...]
Pair = tuple[int, Hashable, int, Hashable]
C = TypeVar("C", bound=Combination)


def pairs_of(combination: Combination) -> frozenset[Pair]:
    """All pairs of choices in a combination, each choice with the number of its axis."""
    return frozenset(
        (i, combination[i], j, combination[j])
        for i, j in itertools.combinations(range(len(combination)), 2)
    )


def covered(combinations: Iterable[Combination]) -> frozenset[Pair]:
    """The pairs that occur in any of them."""
    return frozenset().union(*map(pairs_of, combinations))


def all_pairs(possible: Sequence[C]) -> list[C]:
    """Some of the possible combinations, in which every pair occurs that occurs in all of them.

    Each is the first of those with the most pairs that were not there yet. A combination never has
    more new pairs later than earlier, so that only those are counted anew whose old count could
    still be the largest.

    Args:
        possible: combinations of the same axes, in a fixed order.
    """
    left = set(covered(possible))
    new = {combination: pairs_of(combination) for combination in possible}
    counts = {combination: len(pairs) for combination, pairs in new.items()}
    cover: list[C] = []
    while left:
        best, most = None, 0
        for combination in possible:
            if counts[combination] > most:
                counts[combination] = len(new[combination] & left)
                if counts[combination] > most:
                    best, most = combination, counts[combination]
        assert best is not None, "every pair that is left occurs somewhere"
        cover.append(best)
        left -= new[best]
    return cover
