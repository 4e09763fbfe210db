"""Sensitivity from the inner products of the columns of C, for any C."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from dptrain.core import Array, checks
from dptrain.strategies.binding import participations
from dptrain.strategies.strategy import Strategy
from dptrain.strategies.toeplitz.toeplitz import Toeplitz

_COUNTED_UP_TO = 128  # participations on one side that the bound counts; beyond, it does not limit
_STARTS_ENTRIES = 1 << 22  # of columns at a time: 32 MB of float64


def best_sums(values: Array, count: int, gap: int) -> Iterator[Array]:
    """The largest sums of at most k of the values, their positions at least ``gap`` apart.

    With S_k[j] the largest sum of at most k values at positions up to j,
    S_k[j] = max(S_k[j-1], values[j] + S_{k-1}[j-gap]): O(len(values)) a k.

    Args:
        values: non-negative, positions along the first axis, any further axes apart.
        count: the largest k, at least 1.
        gap: at least 1.

    Yields:
        The sums for k = 1, 2, … over all positions, of the shape of ``values[0]``; fewer than
        ``count`` of them where no more fit.
    """
    sums = np.maximum.accumulate(values, axis=0)
    yield sums[-1].copy()
    for k in range(1, min(count, -(-len(values) // gap))):
        # The k-th position before this one is at k·gap at the earliest; sums up to there stay.
        start = k * gap
        longer = values[start:] + sums[start - gap : len(values) - gap]
        np.maximum(longer, sums[start:], out=longer)
        sums[start:] = np.maximum.accumulate(longer, axis=0)
        yield sums[-1].copy()


def best_sum(values: Array, count: int, gap: int) -> float:
    """The largest sum of at most ``count`` of the values, shape (n,), at least ``gap`` apart."""
    *_, last = best_sums(values, count, gap)
    return float(last)


def _unlimited_sums(values: Array, gap: int) -> Array:
    """``best_sums`` for any number of positions."""
    sums = np.empty_like(values)
    for j, value in enumerate(values):
        taken = value + sums[j - gap] if j >= gap else value
        sums[j] = np.maximum(taken, sums[j - 1]) if j else taken
    return np.asarray(sums[-1])


def _one_side(values: Array, count: int, gap: int) -> Array:
    """Upper bounds on ``best_sums`` for k = 0, …, ``count``: shape (count + 1, columns)."""
    sums = np.zeros((count + 1, values.shape[1]))
    if not count or not len(values):
        return sums
    k = 0
    for k, best in enumerate(best_sums(values, min(count, _COUNTED_UP_TO), gap), start=1):
        sums[k] = best
    fits = -(-len(values) // gap)
    sums[k + 1 :] = sums[k] if k >= fits else _unlimited_sums(values, gap)
    return sums


def gram_bound(gram: Array, *, max_participations: int, min_sep: int) -> float:
    """Upper bound on max sqrt(Σ_{i,j∈u} |G_ij|), u at most m indices at least b apart, G = CᵀC.

    It bounds the sensitivity to contributions of norm at most 1, whatever the signs of G: every row
    of the sum counts how many members lie on either side of it, and the rows are maximized
    separately (docs/theory/strategies.md#thm-gram-bound; ``test_bound_holds_for_signed_matrices``).
    That sharpens the bound of Choquette-Choo et al. 2023 (arXiv 2306.08153) for general matrices.
    Rows count each pair twice with possibly different partners, which is why it is a bound and not
    the maximum. It takes O(width·n·m). The result is rounded upwards by 10^-12 plus what the sums
    of n products in G can lose.

    Args:
        gram: |G| by diagonals, shape (width, n): ``[d, i]`` is |G_{i,i-d}|, 0 for i < d. G must
            vanish at a distance of ``width`` or more.
        max_participations: m.
        min_sep: b.
    """
    width, n = gram.shape
    m, b = participations(n, max_participations, min_sep)
    count = m - 1
    after = np.zeros_like(gram[b:])
    for d in range(b, width):
        after[d - b, : n - d] = gram[d, d:]
    left = _one_side(gram[b:], count, b)
    right = _one_side(after, count, b)
    best = gram[0] + left[0] + right[count]
    highest = best.max()
    for k in range(1, m):
        before = np.maximum.accumulate(best)
        best = np.full(n, -np.inf)
        best[b:] = before[:-b]
        best += gram[0] + left[k] + right[count - k]
        highest = max(highest, best.max())
    # |G_ij| is off by at most n·eps·‖c_i‖‖c_j‖, so the sum over u by m·n·eps times Σ G_ii.
    slack = 2e-12 + m * n * float(np.finfo(np.float64).eps)
    return math.sqrt(float(highest) * (1 + slack))


def fixed_epoch_sensitivity(strategy: Strategy, *, steps: int, epochs: int) -> float:
    """max over starts s < n/e of sqrt(Σ_{i,j∈u} |G_ij|), u = s, s + n/e, s + 2n/e, …, G = CᵀC.

    This is the sensitivity when every example takes part exactly once an epoch, always at the same
    place: participations exactly n/e apart, known to be so. For a scheme that only keeps them *at
    least* that far apart it is too small; use ``strategy.sensitivity``.

    It is the maximum itself over contributions of norm at most 1 where the entries of G between
    the participations are not negative (always for C ≥ 0), and for e ≤ 2; otherwise contributions
    cannot in general point along all the signs at once and it is an upper bound.

    A Toeplitz C ≥ 0 needs the start 0 only: the columns of a later start are those of start 0,
    moved down and cut at row n. Any other C costs O(e) columns for each start.

    Args:
        strategy: any strategy; bound to ``steps`` here if it is not yet.
        steps: n, a multiple of ``epochs``.
        epochs: e.

    Raises:
        ValueError: if they are not positive integers or n is not a multiple of e.
    """
    steps = checks.steps(steps)
    epochs = checks.integer("epochs", epochs)
    if steps % epochs:
        raise ValueError(
            f"steps={steps} is not a multiple of epochs={epochs}: participations exactly "
            f"steps/epochs apart need, for example, steps={steps - steps % epochs + epochs}"
        )
    bound = strategy.bind(steps)
    period = steps // epochs
    if isinstance(bound, Toeplitz) and bound.magnitude() is bound:
        x = np.zeros(steps)
        x[::period] = 1.0
        return float(np.linalg.norm(bound.apply(x)))
    at_once = max(1, _STARTS_ENTRIES // (bound.rows(steps) * epochs))
    largest = 0.0
    for first in range(0, period, at_once):
        starts = np.arange(first, min(first + at_once, period))
        indices = (starts[:, None] + period * np.arange(epochs)).ravel()
        columns = bound.columns(steps, indices).reshape(-1, len(starts), epochs)
        gram = np.einsum("tsi,tsj->sij", columns, columns, optimize=True)
        largest = max(largest, float(np.abs(gram).sum(axis=(1, 2)).max()))
    return math.sqrt(largest)
