"""The worst that exclusion by others can make of a user's draws, whatever its rule."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dptrain.accounting.revealed_grid import NormGrid, binomial

Array = npt.NDArray[np.float64]


def worst_blocking(
    grid: NormGrid, final: Array, *, examples: int, probability: float, min_sep: int
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
        examples: k.
        probability: p.
        min_sep: b.
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
