"""Gram matrix of the balls-in-bins means."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dptrain.core import Array
from dptrain.strategies import Strategy


def gram_matrix(strategy: Strategy, *, steps: int, bins: int) -> Array:
    """G with G_ij = <m_i, m_j>, m_i = Σ_j |C|_{:, i+j·bins}, shape (bins, bins).

    Costs ``apply`` on the (steps, bins) matrix of comb vectors; never forms C.
    """
    combs = np.zeros((steps, bins))
    combs[np.arange(steps), np.arange(steps) % bins] = 1.0
    means = strategy.magnitude().apply(combs)
    return np.asarray(means.T @ means)


def cyclic_distance(bins: int) -> npt.NDArray[np.int64]:
    """min(|i-j|, bins-|i-j|), shape (bins, bins)."""
    gap = np.abs(np.subtract.outer(np.arange(bins), np.arange(bins)))
    return np.minimum(gap, bins - gap)


def cyclic_bandwidth(gram: Array) -> int:
    """Least p with G_ij = 0 wherever the cyclic distance of i and j is p or more."""
    distance = cyclic_distance(gram.shape[0])
    # Products of exact zeros are exact zeros, but an FFT-based apply leaves rounding behind.
    present = gram > 1e-13 * float(gram.max())
    return int(distance[present].max()) + 1


def banded_bound(gram: Array, bandwidth: int) -> tuple[Array, float]:
    """G^(p) and τ with G ≤ G^(p) + τ entrywise and G^(p) cyclically banded (Algorithm 1)."""
    outside = cyclic_distance(gram.shape[0]) >= bandwidth
    tau = float(gram[outside].max()) if outside.any() else 0.0
    return np.where(outside, 0.0, np.maximum(gram - tau, 0.0)), tau
