"""The nodes of the trees over n steps: which there are and in which order they complete.

A node of level l covers the 2^l steps i·2^l, …, (i+1)·2^l - 1 and is complete once the last of
them is over. Trees of height h have levels 0 (the leaves, one a step) to h - 1 (the root, 2^{h-1}
steps) and follow one another, so that all of them together are the dyadic intervals of levels
below h. Only complete nodes are rows of C: for step t the leaf first, then the larger ones that
end there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dptrain.core import Array

Indices = npt.NDArray[np.int64]


def node_count(steps: int, height: int) -> int:
    """Number of complete nodes within the first ``steps`` steps: 2n - popcount(n) in one tree."""
    return sum(steps >> level for level in range(height))


def node_rows(steps: int, level: int, height: int) -> Indices:
    """Rows of C of the complete nodes of a level, from left to right: shape (steps >> level,)."""
    start = (np.arange(1, (steps >> level) + 1, dtype=np.int64) << level) - 1  # the last step
    rows = np.full_like(start, level)
    for other in range(height):
        rows += start >> other
    return rows


def top_level(step: int, height: int) -> int:
    """Level of the largest node that ``step`` completes; the smaller ones end there as well."""
    after = step + 1
    return min((after & -after).bit_length(), height) - 1


def steps_with(rows: int, height: int) -> int:
    """The n whose trees have that many complete nodes."""
    low, high = 1, max(rows, 1)  # every step completes at least one node
    while low < high:
        middle = (low + high) // 2
        if node_count(middle, height) < rows:
            low = middle + 1
        else:
            high = middle
    if rows < 1 or node_count(low, height) != rows:
        raise ValueError(
            f"z has {rows} rows: must have {node_count(low, height)}, one for each node of the "
            f"trees of height {height} over {low} steps"
        )
    return low


def pair_sums(x: Array) -> Array:
    """Sums of x_0 + x_1, x_2 + x_3, … over the first axis; an odd one out is dropped."""
    even = x.shape[0] // 2 * 2
    return x[0:even:2] + x[1:even:2]


def level_sums(x: Array, height: int) -> Iterator[Array]:
    """The sums of x over the complete nodes of every level, from the leaves, O(n) altogether."""
    for level in range(height):
        if level:
            x = pair_sums(x)
        yield x
