"""The rows of a strategy, as conditional composition sees them; nothing here depends on σ."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
from scipy.linalg import toeplitz

from dptrain.accounting.mmcc.posterior import Entries
from dptrain.core import Array
from dptrain.strategies import Strategy
from dptrain.strategies.toeplitz import Toeplitz

Indices = npt.NDArray[np.int64]

# Entries of |C|, kept columns only, that are worked on at once: 256 MB an array of float64.
MOST_ENTRIES = 1 << 25
# Of a Toeplitz matrix only some rows are looked at: from one to the next at most 1 % longer.
_ROW_RATIO = 0.01


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixRows:
    """Rows (or blocks of rows) of |C|, equal ones once.

    Attributes:
        entries: of all rows, one row after the other, positive sizes only.
        starts: where each row begins, and the end: shape (K + 1,).
        counts: number of rows of C that each stands for, or dominates: shape (K,).
        pairs: number of events that all rows of C need together.
    """

    entries: Entries
    starts: Indices
    counts: Indices
    pairs: int

    @property
    def greatest_sum(self) -> float:
        """Upper bound of the sum of any row's entries."""
        return float(np.add.reduceat(self.entries.size, self.starts[:-1]).max()) * (1.0 + 1e-12)


def rows_of(strategy: Strategy, *, steps: int, cycle: int) -> list[MatrixRows]:
    """One member a part of the cycle; for Toeplitz matrices the first part, which is the worst.

    Part s has the columns s, s + cycle, … and no coins in between. A block is what is released
    from one of its steps up to the next: ``cycle`` rows of a square C. Its entry for a column is
    the norm of the column's part in the block. With cycle = 1 every row is a block of its own, also
    where a step releases several rows (trees).

    For a Toeplitz matrix part s is part 1 with fewer steps, and later steps are post-processing.
    Its blocks far enough down see the same lags of the same columns, and fewer columns before, so
    block i is dominated by every later full one: all of ``Entries`` but the sizes, which are
    equal, only grow. From block ceil((2·bands - 1)/cycle) on all numbers agree.
    """
    if isinstance(strategy, Toeplitz):
        return [_toeplitz_rows(np.abs(strategy.first_column(steps)), steps, cycle)]
    parts = []
    for part in range(min(cycle, steps)):
        dense = np.abs(strategy.columns(steps, np.arange(part, steps, cycle)))
        parts.append(_rows_of_dense(dense, each_row=cycle == 1))
    return parts


def work_entries(strategy: Strategy, *, steps: int, cycle: int) -> int:
    """Entries of the largest array that ``rows_of`` forms."""
    if isinstance(strategy, Toeplitz):
        blocks = _toeplitz_blocks(strategy.bands, steps, cycle)
        return min(blocks * cycle, steps) * blocks
    return strategy.rows(steps) * math.ceil(steps / cycle)


def _toeplitz_blocks(bands: int, steps: int, cycle: int) -> int:
    return min(math.ceil(steps / cycle), math.ceil((2 * bands - 1) / cycle) + 1)


def _toeplitz_rows(c: Array, steps: int, cycle: int) -> MatrixRows:
    total = math.ceil(steps / cycle)
    blocks = _toeplitz_blocks(c.size, steps, cycle)
    rows = min(blocks * cycle, steps)
    column = np.zeros(rows)
    column[: min(c.size, rows)] = c[:rows]
    dense = toeplitz(column, np.zeros(rows))[:, ::cycle]
    block_starts = np.arange(0, rows, cycle)
    chosen = [0]
    # The last block may be shorter, so it dominates no other.
    full = blocks - 1 if rows % cycle else blocks
    while chosen[-1] + 1 < full:
        chosen.append(min(chosen[-1] + max(1, int(_ROW_RATIO * chosen[-1])), full - 1))
    if full < blocks and blocks > 1:
        chosen.append(blocks - 1)
    counts = np.diff([-1, *chosen])
    counts[-1] += total - blocks
    lags = np.add.reduceat(dense[:, 0] ** 2, block_starts)[1:] > 0.0
    pairs = int(np.sum((total - 1.0 - np.arange(lags.size))[lags]))
    return _gathered(dense, block_starts, np.array(chosen), counts, pairs)


def _rows_of_dense(dense: Array, *, each_row: bool) -> MatrixRows:
    rows = dense.shape[0]
    if each_row:
        block_starts = np.arange(rows)
    else:
        # A block begins with the first row that has a part in its column or a later one.
        first = np.argmax(dense > 0.0, axis=0)
        block_starts = np.unique(np.minimum.accumulate(first[::-1])[::-1])
    return _gathered(dense, block_starts, np.arange(block_starts.size), None, None)


def _before(values: Array, block_starts: Indices) -> Array:
    """Sums over the rows before each block, shape (blocks, columns)."""
    sums = np.cumsum(values, axis=0)
    result = np.zeros((block_starts.size, values.shape[1]))
    later = block_starts > 0
    result[later] = sums[block_starts[later] - 1]
    return result


def _gathered(
    dense: Array,
    block_starts: Indices,
    chosen: Indices,
    counts: Indices | None,
    pairs: int | None,
) -> MatrixRows:
    """The chosen blocks; by default all count once, equal ones are merged, and pairs are counted.

    <a, a_k> is the sum of C_rj C_rk over the rows r before the block. So Σ_k <a, a_k> is that of
    C_rj (Σ_k C_rk), and Σ_k <a, a_k>² that of 2 C_rj (Σ_{s<r} C_sj <c_s, c_r>) + C_rj² ‖c_r‖², c_r
    row r: the columns' Gram matrices are never formed.
    """
    squares = np.add.reduceat(dense**2, block_starts, axis=0)
    sizes = np.sqrt(squares)[chosen]
    if (np.diff(block_starts) == 1).all() and block_starts.size == dense.shape[0]:
        sizes = dense[chosen]  # as they are: 1.0 remains 1.0
    square = _before(dense**2, block_starts)[chosen]
    linear = _before(dense * dense.sum(axis=1, keepdims=True), block_starts)[chosen]
    products = dense @ dense.T
    increments = 2.0 * dense * (np.tril(products, -1) @ dense)
    increments += dense**2 * np.diagonal(products)[:, None]
    quadratic = _before(increments, block_starts)[chosen]
    del products, increments
    # By Cauchy-Schwarz, or by the greatest entry of each row.
    norms = np.sqrt(square)
    largest = norms * norms.max(axis=1, initial=0.0, keepdims=True)
    direct = _before(dense * dense.max(axis=1, keepdims=True), block_starts)[chosen]
    largest = np.minimum(largest, direct)
    present = sizes > 0.0
    stacked = np.stack([sizes, square, linear, quadratic, largest])
    found: dict[bytes, int] = {}
    tables: list[Array] = []
    times: list[int] = []
    for i in range(chosen.size):
        table = stacked[:, i, present[i]]
        if table.shape[1] == 0:
            continue
        if counts is None:
            table = table[:, np.lexsort(table)]
            key = table.tobytes()
            if key in found:
                times[found[key]] += 1
                continue
            found[key] = len(tables)
        tables.append(table)
        times.append(1 if counts is None else int(counts[i]))
    if pairs is None:
        pairs = int(np.count_nonzero(present & (square > 0.0)))
    starts = np.cumsum([0, *(table.shape[1] for table in tables)])
    return MatrixRows(Entries(*np.concatenate(tables, axis=1)), starts, np.array(times), pairs)
