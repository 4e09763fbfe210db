"""The best error × sensitivity of a family at tiny n, by SciPy's general optimisers.

Nothing here imports the library. Losses are evaluated with dense matrices and gradients by finite
differences; sensitivities try every pattern. Slow, and only ever an upper bound on the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, minimize

from tests.oracles import strategy_matrices as matrices
from tests.oracles.strategy_patterns import largest_norm, patterns
from tests.oracles.strategy_workloads import max_error, rmse

Array = npt.NDArray[np.float64]
Loss = Callable[[Array], float]
ERRORS = {"mean": rmse, "max": max_error}
INFEASIBLE = 1e6


def descend(
    loss: Loss, starts: Iterable[Array], low: float = -np.inf, high: float = np.inf
) -> Array:
    """The best of a quasi-Newton run from each start, polished by simplices."""
    starts = list(starts)
    if starts[0].size == 0:
        return starts[0]
    bounds = Bounds(np.full(len(starts[0]), low), np.full(len(starts[0]), high))
    found = [minimize(loss, start, method="L-BFGS-B", bounds=bounds).x for start in starts]
    best = min(starts + found, key=loss)
    for scale in (1e-1, 1e-2, 1e-3):
        legs = np.where(best + scale <= high, scale, -scale)
        simplex = np.clip(np.vstack([best, best + np.diag(legs)]), low, high)
        options = {"initial_simplex": simplex, "xatol": 1e-9, "fatol": 1e-11, "maxfev": 1500}
        x = minimize(loss, best, method="Nelder-Mead", bounds=bounds, options=options).x
        best = min(x, best, key=loss)
    return best


def banded_toeplitz(workload: Array, bands: int, error: str = "mean") -> tuple[float, Array]:
    """The least error × ‖c‖ over c_0 = 1 and non-negative c_1.. c_{bands-1}, and that c."""
    steps = len(workload)

    def loss(tail: Array) -> float:
        matrix = matrices.toeplitz([1.0, *tail], steps)
        return ERRORS[error](workload, matrices.inverse(matrix)) * float(
            np.hypot(1, np.linalg.norm(tail))
        )

    root = matrices.square_root(workload)
    starts = [root[1:bands, 0] / root[0, 0], np.full(bands - 1, 0.1)]
    tail = descend(loss, starts, low=0.0)
    return loss(tail), np.array([1.0, *tail])


def inverse_banded(
    workload: Array,
    inverse_bands: int,
    max_participations: int,
    min_sep: int,
    error: str = "mean",
    *,
    monotone: bool = False,
) -> tuple[float, Array]:
    """The least error × sensitivity over g_0 = 1, g_1.., the first column of C^-1, and that g.

    Participations may have signs where C has a negative entry. With ``monotone`` only matrices
    with a non-negative and non-increasing first column are looked at.
    """
    steps = len(workload)
    plain = patterns(steps, max_participations, min_sep)
    signed = patterns(steps, max_participations, min_sep, signs=True)

    def loss(tail: Array) -> float:
        noise = matrices.toeplitz([1.0, *tail], steps)
        matrix = matrices.inverse(noise)
        column = matrix[:, 0]
        if monotone and (column.min() < 0 or np.diff(column).max() > 0):
            return INFEASIBLE
        rows = plain if column.min() >= 0 else signed
        return ERRORS[error](workload, noise) * largest_norm(matrix, rows)

    root = matrices.inverse(matrices.square_root(workload))
    start = root[1:inverse_bands, 0] / root[0, 0]
    tail = descend(loss, [start, 0.5 * start, 1.3 * start])
    return loss(tail), np.array([1.0, *tail])


def blt(
    workload: Array, buffers: int, max_participations: int, min_sep: int, error: str = "mean"
) -> tuple[float, Array, Array]:
    """The least error × sensitivity over 0 < θ < 1 and ω ≥ 0 with non-increasing c, and (θ, ω)."""
    steps = len(workload)
    rows = patterns(steps, max_participations, min_sep)
    inside = 1e-6

    def split(x: Array) -> tuple[Array, Array]:
        return x[:buffers], x[buffers:]

    def loss(x: Array) -> float:
        theta, omega = split(x)
        if omega.sum() > 1:
            return INFEASIBLE
        matrix = matrices.blt(theta, omega, steps)
        return ERRORS[error](workload, matrices.inverse(matrix)) * largest_norm(matrix, rows)

    rng = np.random.default_rng(0)
    spread = 1 - 0.5 * 4.0 ** -np.arange(buffers)
    starts = [np.concatenate([spread, np.full(buffers, 0.3 / buffers)])]
    starts += [
        np.concatenate([rng.uniform(0.2, 0.95, buffers), rng.uniform(0.05, 0.4, buffers) / buffers])
        for _ in range(3)
    ]
    best = descend(loss, starts, low=inside, high=1 - inside)
    return loss(best), *split(best)


def dense_single(workload: Array, seed: int = 0) -> tuple[float, Array]:
    """The least ‖A C^-1‖_F / √n × largest column norm over all lower-triangular C, and that C."""
    steps = len(workload)
    lower = np.tril_indices(steps)

    def matrix_of(x: Array) -> Array:
        matrix = np.zeros((steps, steps))
        matrix[lower] = x
        return matrices.normalise_columns(matrix)  # equal norms: raising the smaller ones helps

    def loss(x: Array) -> float:
        matrix = matrix_of(x)
        if np.abs(np.diag(matrix)).min() < 1e-3:
            return INFEASIBLE
        return rmse(workload, matrices.inverse(matrix))

    rng = np.random.default_rng(seed)
    root = matrices.square_root(workload)
    noisy = root + 0.1 * np.tril(rng.standard_normal((steps, steps)))
    runs = [minimize(loss, start[lower], method="BFGS").x for start in (root, noisy)]
    best = min(runs, key=loss)
    return loss(best), matrix_of(best)


def dense_multiple(
    workload: Array,
    max_participations: int,
    min_sep: int,
    *,
    bands: int | None = None,
    equal_norms: bool = False,
) -> tuple[float, Array]:
    """The least ‖A C^-1‖_F / √n × sensitivity over all lower-triangular C, and X = CᵀC of norm 1.

    Convex in X: minimise tr(A X^-1 Aᵀ) with xᵀ X x ≤ 1 for every pattern x with signs. With
    ``bands`` only X with that many bands, as those of banded C; with ``equal_norms`` only X with
    one value on its diagonal.
    """
    steps = len(workload)
    rows = patterns(steps, max_participations, min_sep, signs=True)
    i, j = np.tril_indices(steps)
    if bands is not None:
        i, j = i[np.abs(i - j) < bands], j[np.abs(i - j) < bands]
    target = workload.T @ workload

    def gram_of(x: Array) -> Array:
        gram = np.zeros((steps, steps))
        gram[i, j] = x
        gram[j, i] = x
        return gram

    def loss(x: Array) -> float:
        values = np.linalg.eigvalsh(gram_of(x))
        if values.min() < 1e-9:
            return INFEASIBLE
        return float(np.trace(np.linalg.solve(gram_of(x), target)) / steps)

    def gradient(x: Array) -> Array:
        inverse = np.linalg.inv(gram_of(x))
        slope = -(inverse @ target @ inverse) / steps
        return np.where(i == j, 1.0, 2.0) * slope[i, j]

    terms = np.where(i == j, 1.0, 2.0) * rows[:, i] * rows[:, j]  # xᵀ X x is linear in X
    root = matrices.truncate(matrices.square_root(workload), bands or steps)
    constraints = [{"type": "ineq", "fun": lambda x: 1 - terms @ x, "jac": lambda x: -terms}]
    if equal_norms:
        unit = np.eye(len(i))[i == j]
        equal = unit[1:] - unit[:1]
        constraints.append({"type": "eq", "fun": lambda x: equal @ x, "jac": lambda x: equal})
    options = {"maxiter": 300, "ftol": 1e-13}
    best, bound = np.zeros(len(i)), np.inf
    norms = np.linalg.norm(root, axis=0)
    for start in (np.eye(steps), root.T @ root / np.outer(norms, norms), np.eye(steps)):
        x = 0.5 * (best + start[i, j] / (terms @ start[i, j]).max())  # inside, from either side
        x = minimize(
            loss, x, jac=gradient, method="SLSQP", constraints=constraints, options=options
        ).x
        x /= (terms @ x).max()
        if loss(x) < bound:
            best, bound = x, loss(x)
    return float(np.sqrt(bound)), gram_of(best)
