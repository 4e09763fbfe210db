"""The hockey-stick terms (1 - e^{ε-L})_+ whose mean over privacy losses L is δ(ε)."""

from __future__ import annotations

import math

import numpy as np

from dptrain.core import Array


def hockey_stick(losses: Array, epsilon: float) -> Array:
    """(1 - e^{ε-L})_+ of each loss: its mean over L estimates δ(ε)."""
    return -np.expm1(np.minimum(epsilon - losses, 0.0))


def declare_epsilons(top: float) -> Array:
    """Grid of ε below ``top``: steps of 0.01 up to 1, then of 1 %, up to 500 at most."""
    fine = np.arange(101) * 0.01
    coarse = 1.01 ** np.arange(1, math.ceil(math.log(500.0) / math.log(1.01)))
    grid = np.concatenate([fine, coarse])
    return np.asarray(grid[grid < top])


def hockey_stick_moments(losses: Array, grid: Array) -> Array:
    """Sums of (1 - e^{ε-L})_+ and of its square over the losses: shape (2, len(grid)).

    One sort serves every ε: the sums over L > ε of e^{-L} and e^{-2L} are suffix sums.
    """
    ordered = np.sort(losses)
    # Below the least ε nothing counts, and e^{-L} would only spoil the sums.
    ordered = ordered[np.searchsorted(ordered, grid.min(initial=math.inf), side="right") :]
    first = np.searchsorted(ordered, grid, side="right")
    count = ordered.size - first

    def tail(power: int) -> Array:
        sums = np.zeros(ordered.size + 1)
        sums[:-1] = np.cumsum(np.exp(-power * ordered)[::-1])[::-1]
        with np.errstate(divide="ignore"):
            scaled: Array = np.exp(power * grid + np.log(sums[first]))
        return scaled

    one, two = tail(1), tail(2)
    return np.maximum(np.stack([count - one, count - 2 * one + two]), 0.0)
