"""The mean, over all k-subsets of t positive numbers, of the product of a subset's numbers.

It is p_k = e_k(w_1..w_t)/C(t, k) with the elementary symmetric polynomial e_k. Adding a number at a
time, p_j of i numbers is (1 - j/i) p_j + (j/i) w_i p_{j-1} of the i - 1 before: a weighted mean of
positive numbers, so that nothing cancels, and p_j lies between the j-th powers of the least number
and of the largest.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dptrain.core import Array

UNIT = 2.0**-53
"""Unit roundoff of doubles."""
# |log p_j| up to which no p_j leaves the doubles: e^{±700} would.
_LARGEST_EXPONENT = 600.0
_BATCH = 16  # numbers that a compiled loop advances together
_PIECE = 512  # as numpy does


def log_subset_means(log_numbers: Array, picks: int) -> Array:
    """log p_k of every column.

    Args:
        log_numbers: log w_i, finite, shape (t, samples).
        picks: k in 1..t.

    Returns:
        shape (samples,), off by less than ``rounding``.
    """
    count = log_numbers.shape[0]
    if 2 * picks > count:  # e_k(w) = (Π w_i) e_{t-k}(1/w)
        total = log_numbers.sum(axis=0)
        return total + log_subset_means(-log_numbers, count - picks) if picks < count else total
    high, low = log_numbers.max(axis=0), log_numbers.min(axis=0)
    center = 0.5 * (high + low)
    plain = picks * (high - center) <= _LARGEST_EXPONENT
    found = np.empty(log_numbers.shape[1])
    if plain.all():
        found[:] = _plain(log_numbers - center, picks)
    else:
        found[plain] = _plain(log_numbers[:, plain] - center[plain], picks)
        found[~plain] = _logarithmic(log_numbers[:, ~plain] - center[~plain], picks)
    return found + picks * center


def rounding(count: int, picks: int, largest: float) -> float:
    """Bound on the error of ``log_subset_means`` for |log w_i| ≤ ``largest``, these exact to 8u.

    With κ = min(k, t-k): in each of t steps a logarithm of a sum of two numbers, of at most
    4(κ·largest + log t + 4)u, or relatively 5u without logarithms; k factors of relative error
    (10·largest + 4)u; and where k > t/2 the sum of all log w_i, t²·largest·u.
    """
    least = min(picks, count - picks)
    steps = count * 4.0 * (least * largest + math.log(count + 1.0) + 4.0)
    factors = picks * (10.0 * largest + 4.0)
    total = float(count) ** 2 * largest if 2 * picks > count else 0.0
    return 2.0 * UNIT * (steps + factors + total)


def _plain(log_numbers: Array, picks: int) -> Array:
    numbers = np.exp(log_numbers)
    if importlib.util.find_spec("numba") is not None:
        return np.asarray(np.log(_compiled()(np.ascontiguousarray(numbers), picks)))
    return np.log(means_by_numpy(numbers, picks))


def means_by_numpy(numbers: Array, picks: int) -> Array:
    """p_k of every column, shape (t, samples), where no p_j over- or underflows."""
    count, samples = numbers.shape
    found = np.empty(samples)
    for start in range(0, samples, _PIECE):
        part = numbers[:, start : start + _PIECE]
        means = np.zeros((picks + 1, part.shape[1]))
        means[0] = 1.0
        for i in range(count):
            top = min(picks, i + 1)
            share = (np.arange(1.0, top + 1.0) / (i + 1.0))[:, None]
            means[1 : top + 1] = (1.0 - share) * means[1 : top + 1] + share * (
                part[i] * means[:top]
            )
        found[start : start + _PIECE] = means[picks]
    return found


def _logarithmic(log_numbers: Array, picks: int) -> Array:
    """log p_k in logarithms throughout: for numbers that lie far apart."""
    count, samples = log_numbers.shape
    logs = np.full((picks + 1, samples), -np.inf)
    logs[0] = 0.0
    with np.errstate(divide="ignore"):
        for i in range(count):
            top = min(picks, i + 1)
            j = np.arange(1.0, top + 1.0)[:, None]
            stay, move = np.log((i + 1.0 - j) / (i + 1.0)), np.log(j / (i + 1.0))
            logs[1 : top + 1] = np.logaddexp(
                stay + logs[1 : top + 1], move + (log_numbers[i] + logs[:top])
            )
    return logs[picks]


def _means(numbers: Any, picks: Any) -> Any:
    count, samples = numbers.shape
    found = np.empty(samples)
    means = np.empty((picks + 1, _BATCH))
    for start in range(0, samples, _BATCH):
        size = min(_BATCH, samples - start)
        means[:] = 0.0
        means[0] = 1.0
        for i in range(count):
            for j in range(min(picks, i + 1), 0, -1):
                stay, move = (i + 1.0 - j) / (i + 1.0), j / (i + 1.0)
                for s in range(size):
                    means[j, s] = (
                        stay * means[j, s] + move * numbers[i, start + s] * means[j - 1, s]
                    )
        for s in range(size):
            found[start + s] = means[picks, s]
    return found


@functools.cache
def _compiled() -> Callable[[Array, int], Array]:
    import numba  # late: it takes long to import

    compiled: Callable[[Array, int], Array] = numba.njit(nogil=True, fastmath={"contract"})(_means)
    return compiled
