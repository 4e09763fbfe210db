"""The error of a Toeplitz strategy as a differentiable function of C^-1, and its privacy cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.signal import fftconvolve

from dptrain.strategies.workload import Workload

Array = npt.NDArray[np.float64]
Loss = Callable[[Array], tuple[float, Array]]

OBJECTIVES = ("mean", "max")
_LOOP_UP_TO = 64  # participations; more of them are cheaper through the FFT


def checked_objective(objective: str) -> str:
    """``objective`` if it is known.

    Raises:
        ValueError: otherwise.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r}: must be one of {OBJECTIVES}")
    return objective


def error_loss(workload: Workload, steps: int, objective: str) -> Loss:
    """The squared error of A C^-1 for a Toeplitz C^-1, as a function of its first column.

    ``"mean"``: ‖A C^-1‖_F², the sum of the variances of all n queries. ``"max"``: the variance of
    the worst query, the largest squared row norm of A C^-1. For a Toeplitz A with w = A g these are
    Σ_t (n - t) w_t² and Σ_t w_t² (the last row, whose entries are all of w).

    Returns:
        A function of g, shape (n,), that returns the loss and its gradient in g, shape (n,).

    Raises:
        ValueError: if the workload is made for another n or the objective is unknown.
    """
    workload.check(steps)
    checked_objective(objective)
    if not workload.is_toeplitz:
        raise NotImplementedError("to come")
    weights = np.arange(steps, 0, -1, dtype=np.float64) if objective == "mean" else np.ones(steps)

    def loss(g: Array) -> tuple[float, Array]:
        w = workload.apply(g)
        weighted = weights * w
        return float(weighted @ w), 2 * workload.adjoint(weighted)

    return loss


def regular_cost(c: Array, m: int, b: int) -> tuple[float, Array]:
    """‖C x‖² for x with ones at 0, b, …, (m-1)b, and its gradient in c, shape (n,).

    For non-negative, non-increasing c it is the squared sensitivity (Kalinin & Lampert 2024,
    Theorem 2).

    Args:
        c: first column of C, shape (n,), zeros included.
        m: number of participations, (m - 1) b < n.
        b: steps between two of them.
    """
    n = c.size
    if m == 1:
        return float(c @ c), 2 * c
    if m <= _LOOP_UP_TO:
        product = c.copy()
        for i in range(b, m * b, b):
            product[i:] += c[: n - i]
        gradient = product.copy()
        for i in range(b, m * b, b):
            gradient[: n - i] += product[i:]
        return float(product @ product), 2 * gradient
    x = np.zeros(n)
    x[: m * b : b] = 1.0
    product = fftconvolve(c, x)[:n]
    gradient = fftconvolve(product[::-1], x)[:n][::-1]
    return float(product @ product), 2 * gradient
