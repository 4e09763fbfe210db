"""Exact forward program for a cyclically banded Gram matrix.

The bins form a ring in which only bins at a distance under p interact. The ring is cut at a
*window* of p-1 bins whose counts are fixed; the other bins are a chain, and a chain needs to
remember its last p-1 counts only. Fixing one window to every possible content (Algorithm 1 of
Schuchardt & Kalinin 2026, arXiv 2601.21636) costs a program per content. Here the cut is made where
few balls are: of K = b // (p-1) disjoint windows, one has at most w balls as soon as K (w+1) > A.
Count vectors are split by the *first* such window: for each window k and each of its few contents,
one program visits the vectors with that content in which windows 0..k-1 all hold more than w balls
(docs/theory/balls-in-bins.md#thm-bins-ring; ``test_ring_program_equals_enumeration``).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from dptrain.core import Array, checks

Ints = npt.NDArray[np.int64]

# Exponents that doubles can carry, with room for sums.
_EXPONENT = 600.0
# Fixed cost of a step, in transitions.
_STEP_OVERHEAD = 3_000


@dataclasses.dataclass(frozen=True)
class _BallStates:
    """Chain states with at most A balls, and where each comes from.

    A state is (m; newest, …, oldest): m balls so far, of which the last p-1 bins hold those
    counts. States are sorted, m slowest and the oldest count fastest, so states with m ≤ c are a
    prefix. States that differ in the oldest count only form a group; values are kept as a table
    (groups, oldest count).
    """

    counts: Ints
    state_end: Ints
    group: Ints
    source: Ints
    group_counts: Ints
    group_end: Ints


def _compositions(parts: int, most: int) -> Ints:
    """All vectors of ``parts`` counts with sum ≤ ``most``, lexicographic, shape (k, parts)."""
    rows = np.zeros((1, 0), dtype=np.int64)
    used = np.zeros(1, dtype=np.int64)
    for _ in range(parts):
        room = most - used + 1
        parent = np.repeat(np.arange(room.size), room)
        count = np.arange(parent.size) - np.repeat(np.cumsum(room) - room, room)
        rows, used = np.column_stack((rows[parent], count)), used[parent] + count
    return rows


@functools.lru_cache(maxsize=4)
def _plan(bandwidth: int, largest: int) -> _BallStates:
    width = bandwidth - 1
    pieces = [_compositions(width, m) for m in range(largest + 1)]
    balls = np.repeat(np.arange(largest + 1), [len(piece) for piece in pieces])
    counts = np.concatenate(pieces)
    first = counts[:, -1] == 0
    group_balls, group_counts = balls[first], counts[first, :-1]
    # A group is (m; newest, …, second oldest). Appending t to group (m - t; rest) gives the state
    # (m; t, rest): keys that ascend in the order of the groups find it.
    group_keys = _keys(np.column_stack((group_balls, group_counts)))
    source_keys = _keys(np.column_stack((balls - counts[:, 0], counts[:, 1:])))
    return _BallStates(
        counts=counts,
        state_end=np.cumsum([len(piece) for piece in pieces]),
        group=np.cumsum(first) - 1,
        source=np.searchsorted(group_keys, source_keys),
        group_counts=group_counts,
        group_end=np.searchsorted(group_balls, np.arange(largest + 1), side="right"),
    )


def _keys(rows: Ints) -> npt.NDArray[np.bytes_]:
    """A sortable key for every row, in lexicographic order; a number would overflow."""
    digits = np.ascontiguousarray(rows.astype(">u4"))
    return digits.view(f"S{digits.shape[1] * digits.itemsize}").ravel()


def _lightest(bandwidth: int, bins: int, largest: int) -> int:
    """Least w such that one of the disjoint windows must hold at most w balls."""
    return largest // (bins // (bandwidth - 1))


def program_size(bandwidth: int, bins: int, largest: int) -> int:
    """Work of ``banded_log_sums`` for orders up to ``largest``, in transitions."""
    width, light = bandwidth - 1, _lightest(bandwidth, bins, largest)
    contents = math.comb(light + width, width)
    caps = range(largest, -1, -(light + 1))
    steps = [math.comb(cap + bandwidth + 1, bandwidth + 1) + _STEP_OVERHEAD for cap in caps]
    return contents * bins * sum(steps)


def fits_doubles(a: Array, largest: int) -> bool:
    """True if no term of the sum for orders up to ``largest`` leaves the range of doubles.

    The exponents are at most rᵀ a r / 2 ≤ A² max(a) / 2.
    """
    bins = a.shape[0]
    high = 0.5 * largest**2 * float(a.max())
    low = largest * math.log(bins) + math.lgamma(largest + 1.0)
    return high <= _EXPONENT and low <= _EXPONENT


def banded_log_sums(a: Array, bandwidth: int, largest: int) -> Array:
    """log T_m, m = 0..A, for ``a`` cyclically banded with bandwidth p, 2 ≤ p, 2p-1 ≤ b.

    The caller checks ``fits_doubles``: sums are taken in plain doubles, all terms positive.
    """
    bins, width = a.shape[0], bandwidth - 1
    checks.invariant(bandwidth >= 2, "the program is for two bands or more")
    checks.invariant(bins >= 2 * bandwidth - 1, "the program needs 2 · bands - 1 bins")
    plan = _plan(bandwidth, largest)
    light = _lightest(bandwidth, bins, largest)
    result = np.zeros(largest + 1)
    for window in range(largest // (light + 1) + 1):
        if window >= bins // width:
            break
        for held in _compositions(width, light):
            if held.sum() + window * (light + 1) <= largest:
                result += _one_cut(a, plan, bandwidth, largest, window, light, held)
    with np.errstate(divide="ignore"):
        return np.log(result)


def _one_cut(
    a: Array,
    plan: _BallStates,
    bandwidth: int,
    largest: int,
    window: int,
    light: int,
    held: Ints,
) -> Array:
    """T_m of the vectors whose first light window is ``window``, which holds ``held``."""
    bins, width = a.shape[0], bandwidth - 1
    single = np.arange(largest + 1.0)
    single = -gammaln(single + 1.0) - single * math.log(bins)
    fixed = np.arange(window * width, (window + 1) * width)
    inside = a[np.ix_(fixed, fixed)]
    log_weight = 0.5 * float(held @ inside @ held - held @ np.diag(inside))
    log_weight += float(single[held].sum())
    # Balls that windows still to come must hold cannot be used before.
    cap = largest - window * (light + 1)
    table = np.zeros((plan.group_end[cap], largest + 1))
    first = int(held.sum())
    states = slice(plan.state_end[first - 1] if first else 0, plan.state_end[first])
    row = np.flatnonzero((plan.counts[states] == held[::-1]).all(axis=1))
    checks.invariant(row.size == 1, "a state of the program was found twice, or not at all")
    state = states.start + int(row[0])
    table[plan.group[state], held[0]] = math.exp(log_weight)
    values = np.zeros(0)
    for step in range(width, bins):
        k = (window * width + step) % bins
        # Windows 0..window-1 come last, in order; a ball placed in one may use its reserve.
        if k < window * width and k % width == 0:
            cap += light + 1
        coupling = a[k, (k - 1 - np.arange(width)) % bins]
        values = _advance(plan, table, coupling, cap, single, float(a[k, k]))
        n = values.size
        if k < window * width and (k + 1) % width == 0:
            values[plan.counts[:n].sum(axis=1) <= light] = 0.0
        table = np.zeros((plan.group_end[cap], largest + 1))
        table[plan.group[:n], plan.counts[:n, -1]] = values
    # Close the ring: the last p-1 bins against the window, except pairs that the chain has met
    # already because the ring is short.
    back = bins - 1 - np.arange(width)
    met = np.subtract.outer(back, np.arange(width)) < bandwidth
    pairs = np.where(met, 0.0, a[np.ix_((window * width + back) % bins, fixed)])
    values = values * np.exp(plan.counts[: values.size] @ (pairs @ held))
    result = np.zeros(largest + 1)
    starts = np.concatenate(([0], plan.state_end[:cap]))
    result[: cap + 1] = np.add.reduceat(values, starts)
    return result


def _advance(
    plan: _BallStates, table: Array, coupling: Array, cap: int, single: Array, own: float
) -> Array:
    """Values of the states with at most ``cap`` balls after one more bin.

    ``coupling[i]`` is the entry of ``a`` between the new bin and the one i+1 places before.
    """
    n = plan.state_end[cap]
    added, source = plan.counts[:n, 0], plan.source[:n]
    previous = int(np.searchsorted(plan.group_end, table.shape[0]))
    orders = np.arange(cap + 1)
    mixing = np.exp(coupling[-1] * np.outer(orders, orders))
    # Groups that the previous, smaller cap left out have no chains yet.
    groups = plan.group_end[cap]
    summed = np.zeros((groups, cap + 1))
    # Blocks of m: a group with m balls has an oldest count ≤ m and room for cap - m more.
    block = max(1, (previous + 6) // 6)
    for start in range(0, previous + 1, block):
        stop = min(start + block - 1, previous)
        rows = slice(plan.group_end[start - 1] if start else 0, plan.group_end[stop])
        most_old, most_new = stop + 1, cap - start + 1
        summed[rows, :most_new] = table[rows, :most_old] @ mixing[:most_old, :most_new]
    log_factor = single[: cap + 1] + 0.5 * own * orders * (orders - 1)
    pull = (plan.group_counts[:groups] @ coupling[:-1])[source]
    return np.asarray(summed[source, added] * np.exp(pull * added + log_factor[added]))
