"""Least error of banded strategies with columns of norm 1."""

from __future__ import annotations

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import Bounds, minimize
from tqdm import tqdm

from dptrain.core import Array
from dptrain.strategies.matrices.banded_error import BandedError, Loss, inverse_workload
from dptrain.strategies.matrices.dense_optimization import workload_factor
from dptrain.strategies.matrices.lower_triangular import dense_from_diagonals
from dptrain.strategies.workloads import Workload

_DENSE_UP_TO = 2000  # steps, for workloads whose inverse is not known to be banded
_LEAST_DIAGONAL = 1e-6  # of a column of norm about 1, which keeps C invertible


def squared_error(workload: Workload, steps: int, bands: int) -> Loss:
    """‖A C^-1‖_F² and its gradient, as a function of the diagonals of C, shape (bands, n).

    Refuses n > 2000 where it needs dense matrices.
    """
    inverse = inverse_workload(workload, steps)
    if inverse is not None:
        return BandedError(bands, inverse)
    if steps > _DENSE_UP_TO:
        raise ValueError(
            f"steps={steps}: the inverse of the workload {type(workload).__name__} is not known to "
            f"be banded, so at most {_DENSE_UP_TO} steps can be optimized; if some learning rates "
            "are zero, use small positive ones"
        )
    factor = workload_factor(workload, steps)
    inside = np.arange(bands)[:, None] + np.arange(steps) < steps
    k, j = np.nonzero(inside)

    def loss(diagonals: Array) -> tuple[float, Array]:
        c = dense_from_diagonals(diagonals)
        inverse = solve_triangular(c, np.eye(steps), lower=True, check_finite=False)
        error = factor @ inverse
        slope = -2 * error.T @ error @ inverse.T  # d‖K‖² = -2 tr(Kᵀ K dC C^-1)
        gradient = np.zeros_like(diagonals)
        gradient[k, j] = slope[j + k, j]
        return float(np.sum(error**2)), gradient

    return loss


def normalized(diagonals: Array) -> tuple[Array, Array]:
    """The diagonals of C with columns scaled to norm 1, and the norms they had, shape (n,)."""
    norms = np.linalg.norm(diagonals, axis=0)
    return diagonals / norms, norms


def optimal_columns(workload: Workload, steps: int, start: Array) -> Array:
    """Diagonals of the banded C ≥ 0 with columns of norm 1 and least ‖A C^-1‖_F².

    Quasi-Newton (L-BFGS-B) over the entries of the band, all at least 0, with the columns
    normalized inside the loss. Without C ≥ 0 the problem is convex in X = CᵀC (tr(AᵀA X^-1) over
    banded X ≻ 0 with a diagonal of ones) and C ↔ X is smooth both ways, so that a local optimum
    with all entries positive is the optimum. The set of X with C ≥ 0 need not be convex: where
    entries of the result are 0, it is a local optimum, and only that is known.

    Args:
        workload: A.
        steps: n.
        start: first column of a Toeplitz C, shape (bands,), c_0 > 0.

    Returns:
        Shape (bands, n), as ``LowerTriangular.diagonals``.
    """
    bands = len(start)
    loss = squared_error(workload, steps, bands)
    inside = np.arange(bands)[:, None] + np.arange(steps) < steps
    first, _ = normalized(np.where(inside, start[:, None], 0.0))
    first_loss, _ = loss(first)
    least = np.zeros_like(first)
    least[0] = _LEAST_DIAGONAL

    title = f"Banded strategy, {steps} steps"
    with tqdm(desc=title, unit="evaluation", delay=2, mininterval=1) as bar:

        def log_loss(entries: Array) -> tuple[float, Array]:
            diagonals = np.zeros_like(first)
            diagonals[inside] = entries
            columns, norms = normalized(diagonals)
            value, gradient = loss(columns)
            # Only what is orthogonal to the column moves the column of norm 1.
            gradient = (gradient - columns * np.sum(gradient * columns, axis=0)) / norms
            bar.set_postfix(rmse=f"{np.sqrt(value / steps):.7g}", refresh=False)
            bar.update()
            return float(np.log(value)), gradient[inside] / value

        result = minimize(
            log_loss,
            first[inside],
            jac=True,
            method="L-BFGS-B",
            bounds=Bounds(least[inside], np.inf),
            options={"ftol": 1e-11, "gtol": 1e-10, "maxcor": 10, "maxiter": 1000, "maxfun": 1500},
        )
    if not result.fun <= np.log(first_loss):
        raise RuntimeError(
            f"no optimum found for steps={steps}, bands={bands}: {result.message}; use BandMF"
        )
    entries = np.zeros_like(first)
    entries[inside] = result.x
    return normalized(entries)[0]
