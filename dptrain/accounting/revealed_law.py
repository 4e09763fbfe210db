"""Law of what a user's draws add up to under exclusion by the user's own draws."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from dptrain.accounting.revealed_grid import NormGrid, binomial

Array = npt.NDArray[np.float64]


def revealed_law(grid: NormGrid, *, examples: int, probability: float, min_sep: int) -> Array:
    """P(level of ‖C x‖²) for a user with exactly ``examples`` examples, shape (size + 1,).

    x_t ~ Bin(k, p) where none of the user's own draws in the last b-1 steps was non-empty, else 0;
    a draw bars the next b-1 steps whether it was used or zeroed. The last entry is the mass beyond
    the grid.

    With A_t(s) the mass that is available at step t at level s, M_t(s) the mass whose draw at
    step t is non-empty, q = (1-p)^k and P_j = P(Bin(k, p) = j):

        B_t = Σ_{t-b < τ < t} q^{t-1-τ} M_τ   (barred: the last non-empty draw was at τ)
        M_t(s) = (1-q) B_t(s) + Σ_{j≥1} P_j A_t(s - added_{t,j})
        A_{t+1} = q A_t + q^{b-1} M_{t+1-b}.

    Only sums and products of non-negative numbers: each probability keeps its relative precision
    however small it is. O(n k size) work, O(b size) memory.
    """
    steps, mass = len(grid.added), binomial(examples, probability)
    empty, some = float(mass[0]), float(mass[1:].sum())
    available = np.zeros(grid.size)
    available[0] = 1.0
    barred = np.zeros(grid.size)
    beyond = 0.0
    window = _DecayingWindow(min(min_sep - 1, steps), empty, grid.size)
    for t in tqdm(range(steps), desc="revealed draws", unit="step", delay=2.0, leave=False):
        drawn = some * barred
        for chance, level in zip(mass[1:], grid.added[t], strict=False):
            fits = max(grid.size - int(level), 0)
            drawn[grid.size - fits :] += chance * available[:fits]
            beyond += float(chance * available[fits:].sum())
        available *= empty
        barred, released = window.push(drawn)
        available += released
    return np.append(available + barred, beyond)


class _DecayingWindow:
    """Sums Σ_{i<w} q^i M_{t-i} of the last w pushed vectors, in two additions a push.

    Steps are cut into blocks of w. The window is a tail of the previous block, whose tail sums are
    made once when the block ends, and the beginning of the current one. Nothing is subtracted.
    """

    def __init__(self, width: int, decay: float, size: int) -> None:
        self._width, self._decay = width, decay
        self._last = np.zeros((width, size))  # the vectors of the last w pushes
        self._tails = np.zeros((width + 1, size))  # of the previous block, from position i on
        self._current = np.zeros(size)
        self._position = 0

    def push(self, vector: Array) -> tuple[Array, Array]:
        """The window's sum after ``vector``, and q^w times the vector that just left it."""
        if self._width == 0:
            return np.zeros_like(vector), vector
        at, q = self._position, self._decay
        left = q**self._width * self._last[at]
        self._last[at] = vector
        self._current = q * self._current + vector
        total = self._current + q ** (at + 1) * self._tails[at + 1]
        self._position = at + 1
        if self._position == self._width:
            # Position w - 1 was pushed last: the tail from i on, seen from the end of the block.
            self._tails[self._width] = 0.0
            for i in range(self._width - 1, -1, -1):
                weight = q ** (self._width - 1 - i)
                self._tails[i] = self._tails[i + 1] + weight * self._last[i]
            self._current = np.zeros_like(vector)
            self._position = 0
        return total, left
