"""Pieces into parts of nearly equal size, and who is dropped so that no conflict remains."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from dptrain.sampling.users.partition.pieces import Rows


def packed(sizes: Rows, bins: int, rng: np.random.Generator) -> Rows:
    """The bin of every piece: the largest first, each into the emptiest bin (Graham 1969).

    Pieces of equal size are in random order, so that the order of the data set decides nothing.
    """
    order = rng.permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    found = np.empty(len(sizes), dtype=np.int64)
    single = int(np.searchsorted(-sizes[order], 0, side="left"))
    ones = int(np.searchsorted(-sizes[order], -1, side="left"))
    loads = [(0, place) for place in range(bins)]
    for piece in order[:ones].tolist():
        load, place = loads[0]
        found[piece] = place
        heapq.heapreplace(loads, (load + int(sizes[piece]), place))
    level = np.zeros(bins, dtype=np.int64)
    for load, place in loads:
        level[place] = load
    found[order[ones:single]] = filled(level, single - ones)
    return found


def filled(loads: Rows, count: int) -> Rows:
    """The bins of ``count`` pieces of size 1, each into the emptiest bin; shape (count,)."""
    low, high = int(loads.min()), int(loads.max()) + count
    while low < high:  # the highest level that they suffice to fill up to
        middle = (low + high + 1) // 2
        if int(np.maximum(middle - loads, 0).sum()) <= count:
            low = middle
        else:
            high = middle - 1
    added = np.maximum(low - loads, 0)
    rest = count - int(added.sum())
    added[np.flatnonzero(loads + added == low)[:rest]] += 1
    return np.repeat(np.arange(len(loads)), added)


def cover(left: Rows, right: Rows) -> Rows:
    """Examples without whom none of the pairs is left, ascending: always who is in most of them.

    (The greedy vertex cover.) Without them, no two examples of a pair remain.
    """
    if not len(left):
        return np.empty(0, dtype=np.int64)
    rivals: dict[int, set[int]] = {}
    for one, other in zip(left.tolist(), right.tolist(), strict=True):
        rivals.setdefault(one, set()).add(other)
        rivals.setdefault(other, set()).add(one)
    heap = [(-len(others), example) for example, others in rivals.items()]
    heapq.heapify(heap)
    dropped = []
    while heap:
        degree, example = heapq.heappop(heap)
        others = rivals[example]
        if -degree != len(others):  # it has fewer rivals by now
            if others:
                heapq.heappush(heap, (-len(others), example))
            continue
        dropped.append(example)
        for other in others:
            rivals[other].discard(example)
        rivals[example] = set()
    return np.array(sorted(dropped), dtype=np.int64)


def imbalance(sizes: npt.NDArray[np.int64]) -> float:
    """The excess of the largest over the smallest, as a share of the smallest."""
    least = int(sizes.min())
    return float("inf") if least == 0 else int(sizes.max()) / least - 1.0
