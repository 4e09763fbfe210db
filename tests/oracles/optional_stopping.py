"""The worst rule for when to stop making releases, by dynamic programming over the privacy loss.

Nothing here imports the library.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr

_REACH = 9.0  # standard deviations of one release that are told apart


def worst_delta(
    shifts: Sequence[float], epsilons: Sequence[float], *, spacing: float = 1e-3
) -> tuple[float, float]:
    """The δ of saying ε_k after k Gaussian releases, k chosen by what they were: (least, most).

    Release k is N(μ_k, 1) in one world and N(0, 1) in the other, so that its loss is
    N(μ_k²/2, μ_k²). Whoever has seen k of them stops, and says ε_k, or asks for the next one; after
    the last there is none. A rule is worth E[(1 - e^(ε_K - L_K))_+] with L_K the loss so far: that
    is by how much P(S) exceeds e^(ε_K) Q(S) on the best event S of each K. The best rule follows
    backwards: the value of a loss is the larger one of stopping and of going on. Losses are rounded
    up to a grid for ``most`` and down for ``least``, and so are both tails of a step.

    Args:
        shifts: μ_k, in order.
        epsilons: ε_k that is said after k releases.
        spacing: of the grid.
    """
    found = []
    for up in (False, True):
        top = 0.5 * sum(m * m for m in shifts) + _REACH * np.linalg.norm(shifts)
        cells = int(np.ceil(top / spacing)) + 1
        grid = spacing * np.arange(-cells, cells + 1)
        value = np.zeros_like(grid)
        for number in reversed(range(len(shifts))):
            stopped = np.maximum(-np.expm1(epsilons[number] - grid), 0.0)
            value = np.maximum(stopped, value)
            value = _before(value, shifts[number], spacing, up=up)
        found.append(float(value[cells]))
    return found[0], found[1]


def _before(value: np.ndarray, shift: float, spacing: float, *, up: bool) -> np.ndarray:
    """The mean of ``value`` after one release, at every loss before it."""
    mean, reach = 0.5 * shift * shift, _REACH * shift
    first, last = (int(np.floor((mean + way * reach) / spacing)) for way in (-1, 1))
    edges = spacing * np.arange(first, last + 2)
    below = ndtr((edges - mean) / shift)
    mass = np.diff(below)  # of the cells between the edges
    moves = np.arange(first, last + 1) + up
    if up:
        mass[0] += below[0]
    else:
        mass[-1] += 1.0 - below[-1]
    # A loss beyond the grid is worth 1 at most, and what is below it nothing.
    low, high = max(0, -moves[0]), max(0, moves[-1])
    padded = np.concatenate([np.zeros(low), value, np.full(high, 1.0 if up else value[-1])])
    start = low + moves[0]
    size = value.size + mass.size - 1
    after = np.convolve(padded[start : start + size], mass[::-1], mode="valid")
    return after + (1.0 - below[-1] if up else 0.0)
