"""Tree aggregation with Honaker's online estimator, as C and its left inverse W, by least squares.

Nothing here imports the library. Leaves are steps; the nodes are the complete dyadic intervals
within n steps, in order of completion: of those that end at a step the leaf first, then larger.
Row v of C is the indicator of node v. The estimate of prefix sum t is the sum, over the intervals
of t's binary expansion, of the best linear unbiased estimate of each from all nodes inside it; row
t of W is the difference of the weights of the prefix sums t and t - 1, so that W C = I.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

Array = npt.NDArray[np.float64]


def nodes(steps: int) -> list[tuple[int, int]]:
    """(first, last + 1) of every complete dyadic interval, in order of completion."""
    found = []
    for end in range(1, steps + 1):
        size = 1
        while end % size == 0:
            found.append((end - size, end))
            size *= 2
    return found


def matrix(steps: int) -> Array:
    """C: (nodes, steps)."""
    rows = np.zeros((len(nodes(steps)), steps))
    for row, (first, last) in zip(rows, nodes(steps), strict=True):
        row[first:last] = 1.0
    return rows


def _unbiased_weights(design: Array, target: Array) -> Array:
    """The shortest λ with λᵀ design = target: the best linear unbiased estimate of target·x."""
    weights, *_ = np.linalg.lstsq(design.T, target, rcond=None)
    np.testing.assert_allclose(design.T @ weights, target, atol=1e-10)
    return np.asarray(weights)


def _expansion(end: int) -> list[tuple[int, int]]:
    """The intervals of the binary expansion of ``end``, the largest first."""
    intervals, first = [], 0
    for power in reversed(range(end.bit_length())):
        if end >> power & 1:
            intervals.append((first, first + 2**power))
            first += 2**power
    return intervals


def prefix_weights(steps: int) -> Array:
    """Row t: weights (over nodes) of the estimate of the prefix sum of steps 0..t."""
    everything = nodes(steps)
    design = matrix(steps)
    rows = np.zeros((steps, len(everything)))
    for t in range(steps):
        for first, last in _expansion(t + 1):
            inside = [k for k, (a, b) in enumerate(everything) if first <= a and b <= last]
            target = np.zeros(steps)
            target[first:last] = 1.0
            rows[t, inside] += _unbiased_weights(design[inside], target)
    return rows


def available_prefix_weights(steps: int) -> Array:
    """The same in one least-squares problem a step, from every node complete by then."""
    everything = nodes(steps)
    design = matrix(steps)
    rows = np.zeros((steps, len(everything)))
    for t in range(steps):
        seen = [k for k, (_, last) in enumerate(everything) if last <= t + 1]
        target = np.zeros(steps)
        target[: t + 1] = 1.0
        rows[t, seen] = _unbiased_weights(design[seen], target)
    return rows


def left_inverse(steps: int) -> Array:
    """W: (steps, nodes)."""
    prefixes = prefix_weights(steps)
    return np.diff(prefixes, axis=0, prepend=np.zeros((1, prefixes.shape[1])))


def _block_diagonal(steps: int, height: int, columns: bool) -> Array:
    leaves = 2 ** (height - 1)
    sizes = [min(leaves, steps - start) for start in range(0, steps, leaves)]
    blocks = [matrix(size) if columns else left_inverse(size) for size in sizes]
    whole = np.zeros(np.sum([block.shape for block in blocks], axis=0))
    row = column = 0
    for block in blocks:
        whole[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return whole


def restart_matrix(steps: int, height: int) -> Array:
    """C of trees of 2^{h-1} leaves one after the other, the last one cut off at step n."""
    return _block_diagonal(steps, height, columns=True)


def restart_left_inverse(steps: int, height: int) -> Array:
    """Its W: every tree's estimates by themselves."""
    return _block_diagonal(steps, height, columns=False)


def worst_square(matrix: Array, max_participations: int, min_sep: int) -> int:
    """max ‖C x‖² over patterns by integer programming, for matrices of zeros and ones.

    A count k is the sum of k binaries, of which the i-th (from 0) is worth 2 i + 1: k² in all.
    """
    rows, steps = matrix.shape
    owner = [v for v in range(rows) for _ in range(int(min(matrix[v].sum(), max_participations)))]
    unit = np.eye(steps + len(owner))
    worth = np.zeros(steps + len(owner))
    at_most = []  # (weights of the variables, bound)
    for v in range(rows):
        mine = [steps + k for k, node in enumerate(owner) if node == v]
        worth[mine] = 2 * np.arange(len(mine)) + 1
        at_most.append((unit[mine].sum(axis=0) - matrix[v] @ unit[:steps], 0))
        at_most += [(unit[i + 1] - unit[i], 0) for i in mine[:-1]]
    at_most.append((unit[:steps].sum(axis=0), max_participations))
    for first in range(steps):
        at_most.append((unit[first : min(first + min_sep, steps)].sum(axis=0), 1))
    weights, bounds = zip(*at_most, strict=True)
    result = milp(
        -worth,
        constraints=LinearConstraint(np.array(weights), -np.inf, np.array(bounds)),
        integrality=np.ones(len(worth)),
        bounds=Bounds(0, 1),
    )
    assert result.success, result.message
    return round(-result.fun)
