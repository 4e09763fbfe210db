"""Rényi divergences of balls-in-bins for many orders."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dptrain.accounting.renyi.banded_program import banded_log_sums, fits_doubles, program_size
from dptrain.accounting.renyi.gram import banded_bound, cyclic_bandwidth
from dptrain.accounting.renyi.log_sums import (
    enumerated_log_sums,
    enumeration_size,
    independent_log_sums,
    renyi_from_log_sums,
)
from dptrain.core import Array

# Work allowed per program, in transitions (roughly 1e8 a second), and orders for bandwidth 1.
EFFORTS = (int(6e6), int(2e7), int(8e7), int(3e8))
# Share of it for each effective bandwidth below the true one, and the ones that are tried.
_INEXACT_SHARE = 4
_BANDWIDTHS = (24, 16, 12, 8, 6, 5, 4, 3, 2)
DIAGONAL_ORDERS = (64, 128, 256, 512)
_MOST_BANDED_ORDER = 128
# Relative rounding of the divergences, above the error of up to 1e4 products of sums.
RELATIVE_PAD = 1e-10


@dataclasses.dataclass(frozen=True)
class RenyiOrders:
    """R_α for integer orders, each the least of the bounds that were affordable.

    Attributes:
        divergence: R_α at index α; ∞ where α < 2.
        bandwidth: effective bandwidth that gave R_α (the number of bins where every count vector
            was visited).
        exact_up_to: largest α at which R_α is the divergence itself, not a bound.
    """

    divergence: Array
    bandwidth: npt.NDArray[np.int64]
    exact_up_to: int


def _largest_order(cost: Callable[[int], int], budget: int, most: int) -> int:
    low, high = 1, min(most, _MOST_BANDED_ORDER)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle - 1)
    return low


def affordable_exactly(gram: Array, order: int) -> bool:
    """True if some effort computes R_α of this order at the true bandwidth."""
    bins, true = gram.shape[0], cyclic_bandwidth(gram)
    if true == 1:
        return order <= DIAGONAL_ORDERS[-1]
    if true <= (bins + 1) // 2 and program_size(true, bins, order) <= EFFORTS[-1]:
        return True
    return enumeration_size(bins, order) * bins <= EFFORTS[-1] // _INEXACT_SHARE


def _largest_fitting(a: Array, largest: int) -> int:
    while largest > 1 and not fits_doubles(a, largest):
        largest -= 1
    return largest


class _Program(NamedTuple):
    bandwidth: int
    a: Array
    tau: float
    top: int


def _affordable(
    gram: Array, bandwidth: int, sigma: float, budget: int, true: int, most: int
) -> _Program:
    """The banded program of this bandwidth, up to the largest order within the budget."""
    banded, tau = banded_bound(gram, bandwidth)
    banded = banded / sigma**2
    allowed = budget if bandwidth == true else budget // _INEXACT_SHARE
    size = functools.partial(program_size, bandwidth, gram.shape[0])
    top = _largest_fitting(banded, _largest_order(size, allowed, most))
    return _Program(bandwidth, banded, tau, top)


def remove_orders(gram: Array, sigma: float, effort: int, *, narrower: bool) -> RenyiOrders:
    """R_α(P‖Q) of the uniform mixture P of N(m_i, σ²I) against Q = N(0, σ²I), from above.

    Lemma 3.2 and Algorithm 1 of Schuchardt & Kalinin 2026. Orders up to which the true cyclic
    bandwidth is affordable at this ``effort`` (an index into ``EFFORTS``) are exact. Beyond, an
    effective bandwidth p below it is used, with G ≤ G^(p) + τ adding ατ/(2σ²): p = 1, and with
    ``narrower`` also those between that are affordable. Every p gives a proven bound; the least
    counts.
    """
    bins, budget = gram.shape[0], EFFORTS[effort]
    true = cyclic_bandwidth(gram)
    divergence = np.full(DIAGONAL_ORDERS[effort] + 1, np.inf)
    bandwidth = np.zeros(divergence.size, dtype=np.int64)
    exact, reached, most = 1, 1, divergence.size - 1

    def offer(log_sums: Array, tau: float, label: int) -> None:
        value = renyi_from_log_sums(log_sums) * (1.0 + RELATIVE_PAD)
        value = value + np.arange(value.size) * tau / (2.0 * sigma**2)
        better = value < divergence[: value.size]
        divergence[: value.size][better] = value[better]
        bandwidth[: value.size][better] = label

    if true > 1:
        share = budget // _INEXACT_SHARE
        widest = min(true, (bins + 1) // 2)
        tried = [widest, *(p for p in _BANDWIDTHS if p < widest and narrower)]
        # Two bins have no band between 1 and all of them.
        programs = [_affordable(gram, p, sigma, budget, true, most) for p in tried if p > 1]
        top = _largest_order(lambda m: enumeration_size(bins, m) * bins, share, most)
        program_reaches = max((each.top for each in programs if each.bandwidth == true), default=1)
        if top > max(program_reaches, 1):
            offer(enumerated_log_sums(gram / sigma**2, top), 0.0, bins)
            exact = reached = top
        for each in programs:
            if each.top > reached:
                offer(banded_log_sums(each.a, each.bandwidth, each.top), each.tau, each.bandwidth)
                exact = each.top if each.bandwidth == true else exact
                reached = each.top
    diagonal, tau = banded_bound(gram, 1)
    offer(independent_log_sums(np.diag(diagonal) / sigma**2, divergence.size - 1), tau, 1)
    if true == 1:
        exact = divergence.size - 1
    return RenyiOrders(divergence, bandwidth, exact)
