"""Workload matrices by running the recursion they stand for, and exact errors of a strategy.

Nothing here imports the library. Row t of A is what has reached the parameters after step t.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def prefix_sums(steps: int) -> Array:
    """Parameters of plain SGD with learning rate 1."""
    return np.tril(np.ones((steps, steps)))


def heavy_ball(
    steps: int,
    momentum: float,
    learning_rates: float | npt.ArrayLike = 1.0,
    weight_decay: float = 0.0,
) -> Array:
    """v ← β v + g - λ w, w ← w + η_t v, run once for a unit gradient at every step."""
    rates = np.broadcast_to(np.asarray(learning_rates, dtype=np.float64), (steps,))
    matrix = np.zeros((steps, steps))
    for unit in range(steps):
        velocity = weight = 0.0
        for t in range(steps):
            velocity = momentum * velocity + (t == unit) - weight_decay * weight
            weight += rates[t] * velocity
            matrix[t, unit] = weight
    return matrix


def momentum_and_decay(steps: int, alpha: float, beta: float) -> Array:
    """A[i, j] = Σ_k α^{i-j-k} β^k: momentum β, and weights that keep a share α of themselves."""
    matrix = np.zeros((steps, steps))
    for i in range(steps):
        for j in range(i + 1):
            matrix[i, j] = sum(alpha ** (i - j - k) * beta**k for k in range(i - j + 1))
    return matrix


def errors(workload: Array, left_inverse: Array) -> Array:
    """Standard deviation of the noise on each row of A, for unit noise: row norms of A W."""
    return np.sqrt(((workload @ left_inverse) ** 2).sum(axis=1))


def rmse(workload: Array, left_inverse: Array) -> float:
    """‖A W‖_F / √n."""
    return float(np.sqrt(np.mean(errors(workload, left_inverse) ** 2)))


def max_error(workload: Array, left_inverse: Array) -> float:
    """The largest row norm of A W."""
    return float(errors(workload, left_inverse).max())
