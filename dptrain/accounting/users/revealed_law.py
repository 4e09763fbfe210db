"""The sum of what a user's draws add: excluded by its own draws, or in the worst way by others'."""

from __future__ import annotations

import numpy as np
from tqdm import tqdm

from dptrain.accounting.users.squared_norm_grid import SquaredNormGrid, binomial
from dptrain.core import Array


def worst_blocking(
    grid: SquaredNormGrid, final: Array, *, examples: int, probability: float, min_sep: int
) -> Array:
    """max over controllers of E[F(‖C x‖²)] for non-negative F, shape (rows,).

    A controller says before each step t, from all earlier draws, how many a ≤ k of the user's
    examples may be drawn (none within b-1 steps of the last participation); then x_t ~ Bin(a, p).
    By induction over t, backwards, the value of the rest of the run at level s is

        V_t(s) = max_a [P_{a,0} V_{t+1}(s) + Σ_{j≥1} P_{a,j} V_{t+b}(s + added_{t,j})],

    P_{a,j} = P(Bin(a, p) = j), V_t = F for t ≥ n: what happened before t matters only through s, as
    later draws are independent of it and F sees nothing but the sum.

    Args:
        grid: levels; sums beyond it get the last value of F.
        final: F at every level and beyond, shape (rows, size + 1): one F a row, ascending in a row.
    """
    steps = len(grid.added)
    chances = [binomial(allowed, probability) for allowed in range(1, examples + 1)]
    beyond = final[:, -1:]
    # after[t % b] holds V_t for the b steps to come.
    period = min(min_sep, steps)
    after = np.repeat(final[None, :, :-1], period, axis=0)
    value = final[:, :-1].copy()
    for t in range(steps - 1, -1, -1):
        # V_{t+b} is F if t + b ≥ n, which the initial entries are.
        later = after[t % period] if min_sep <= steps else final[:, :-1]
        taken = []
        for level in grid.added[t]:
            fits = max(grid.size - int(level), 0)
            moved = np.broadcast_to(beyond, later.shape).copy()
            moved[:, :fits] = later[:, grid.size - fits :]
            taken.append(moved)
        best = value  # a = 0
        for chance in chances:
            option = chance[0] * value
            for j in range(1, len(chance)):
                option += chance[j] * taken[j - 1]
            best = np.maximum(best, option)
        after[t % period] = value = best
    return np.asarray(value[:, 0])


def revealed_law(
    grid: SquaredNormGrid, *, examples: int, probability: float, min_sep: int
) -> Array:
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
