"""The best error × sensitivity of a family at tiny n, by SciPy's general optimizers.

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

    starts = [matrices.bsr(steps, bands)[1:bands, 0], np.full(bands - 1, 0.1)]
    tail = descend(loss, starts, low=0.0)
    return loss(tail), np.array([1.0, *tail])


def inverse_banded(
    workload: Array,
    inverse_bands: int,
    max_participations: int,
    min_sep: int,
    error: str = "mean",
    *,
    negative_tail: bool = False,
) -> tuple[float, Array]:
    """The least error × sensitivity over g_0 = 1, g_1.., the first column of C^-1, and that g.

    Participations may have signs where C has a negative entry. With ``negative_tail`` only
    g_1, g_2, … ≤ 0 are looked at, which is enough for C ≥ 0 but not all there is.
    """
    steps = len(workload)
    plain = patterns(steps, max_participations, min_sep)
    signed = patterns(steps, max_participations, min_sep, signs=True)

    def loss(tail: Array) -> float:
        noise = matrices.toeplitz([1.0, *tail], steps)
        matrix = matrices.inverse(noise)
        column = matrix[:, 0]
        rows = plain if column.min() >= 0 else signed
        return ERRORS[error](workload, noise) * largest_norm(matrix, rows)

    start = matrices.inverse(matrices.bsr(steps, steps))[1:inverse_bands, 0]
    high = 0.0 if negative_tail else np.inf
    tail = descend(loss, [np.minimum(scale * start, high) for scale in (1.0, 0.5, 1.3)], high=high)
    return loss(tail), np.array([1.0, *tail])


def blt(
    workload: Array, buffers: int, max_participations: int, min_sep: int, error: str = "mean"
) -> tuple[float, Array, Array]:
    """The least error × sensitivity over 0 < θ < 1, ω ≥ 0 and Σω ≤ 1 (c falls), and (θ, ω)."""
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
        return matrices.normalize_columns(matrix)  # equal norms: raising the smaller ones helps

    def loss(x: Array) -> float:
        matrix = matrix_of(x)
        if np.abs(np.diag(matrix)).min() < 1e-3:
            return INFEASIBLE
        return rmse(workload, matrices.inverse(matrix))

    rng = np.random.default_rng(seed)
    root = matrices.bsr(steps, steps)
    noisy = root + 0.1 * np.tril(rng.standard_normal((steps, steps)))
    runs = [minimize(loss, start[lower], method="BFGS").x for start in (root, noisy)]
    best = min(runs, key=loss)
    return loss(best), matrix_of(best)


def dense_gram(
    workload: Array,
    rows: Array,
    *,
    zero: npt.NDArray[np.bool_] | None = None,
    equal_norms: bool = False,
) -> tuple[float, Array]:
    """The least ‖A C^-1‖_F / √n over C with ‖C x‖ ≤ 1 for all ``rows`` x, and X = CᵀC.

    Convex in X: minimise tr(A X^-1 Aᵀ) with xᵀ X x ≤ 1. C may have negative entries.

    Args:
        workload: A.
        rows: the patterns, with signs where contributions can have signs.
        zero: symmetric, which entries of X must be zero.
        equal_norms: only X with one value on its diagonal.
    """
    steps = len(workload)
    i, j = np.tril_indices(steps)
    if zero is not None:
        i, j = i[~zero[i, j]], j[~zero[i, j]]
    twice = np.where(i == j, 1.0, 2.0)
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
        return twice * slope[i, j]

    terms = twice * rows[:, i] * rows[:, j]  # xᵀ X x is linear in X
    constraints = [{"type": "ineq", "fun": lambda x: 1 - terms @ x, "jac": lambda x: -terms}]
    if equal_norms:
        unit = np.eye(len(i))[i == j]
        equal = unit[1:] - unit[:1]
        constraints.append({"type": "eq", "fun": lambda x: equal @ x, "jac": lambda x: equal})
    options = {"maxiter": 300, "ftol": 1e-13}
    identity, decaying = np.eye(steps), 0.3 ** np.abs(np.subtract.outer(range(steps), range(steps)))
    best, bound = np.zeros(len(i)), np.inf
    for start in (identity, decaying, identity):
        x = 0.5 * (best + start[i, j] / (terms @ start[i, j]).max())  # inside, from either side
        x = minimize(
            loss, x, jac=gradient, method="SLSQP", constraints=constraints, options=options
        ).x
        x /= (terms @ x).max()
        if loss(x) < bound:
            best, bound = x, loss(x)
    return float(np.sqrt(bound)), gram_of(best)


def dense_multiple(
    workload: Array, max_participations: int, min_sep: int, *, bands: int | None = None
) -> tuple[float, Array]:
    """The least ‖A C^-1‖_F / √n × sensitivity over all C, or those with X of that many bands."""
    steps = len(workload)
    lag = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
    rows = patterns(steps, max_participations, min_sep, signs=True)
    return dense_gram(workload, rows, zero=None if bands is None else lag >= bands)


def dense_epochs(workload: Array, epochs: int) -> tuple[float, Array]:
    """The least ‖A C^-1‖_F / √n × √e with columns of one norm, orthogonal n/e, 2n/e, … apart."""
    steps = len(workload)
    lag = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
    zero = (lag > 0) & (lag % (steps // epochs) == 0)
    value, gram = dense_gram(workload, np.eye(steps), zero=zero, equal_norms=True)
    return value * float(np.sqrt(epochs)), gram


def banded_columns(workload: Array, bands: int) -> tuple[float, Array]:
    """The least ‖A C^-1‖_F / √n over banded C ≥ 0 with columns of norm 1, and that C."""
    steps = len(workload)
    lag = np.subtract.outer(np.arange(steps), np.arange(steps))
    inside = (lag >= 0) & (lag < bands)

    def matrix_of(x: Array) -> Array:
        matrix = np.zeros((steps, steps))
        matrix[inside] = x
        return matrices.normalize_columns(matrix)

    def loss(x: Array) -> float:
        matrix = matrix_of(x)
        if np.diag(matrix).min() < 1e-5:
            return INFEASIBLE
        return rmse(workload, matrices.inverse(matrix))

    bounds = Bounds(np.where(lag[inside] == 0, 1e-3, 0.0), np.inf)
    found = []
    for start in (0.6 ** lag[inside], np.where(lag[inside] == 0, 1.0, 0.1)):
        x = start
        for _ in range(3):  # finite differences end early: from there once more
            options = {"maxfun": 10**5, "ftol": 1e-13, "gtol": 1e-9}
            x = minimize(loss, x, method="L-BFGS-B", bounds=bounds, options=options).x
            x = matrix_of(x)[inside]
        found.append(x)
    best = min(found, key=loss)
    return loss(best), matrix_of(best)


def duality_gap(matrix: Array, factor: Array, free: npt.NDArray[np.bool_]) -> float:
    """Bound on how far ‖F C^-1‖_F² is from its least value for the norms and zeros of CᵀC.

    With X = CᵀC and N = X^-1 M X^-1 with the free entries set to 0 (they are 0 at an optimum),
    2 tr (N^{1/2} M N^{1/2})^{1/2} - tr N X bounds the loss of every feasible X from below.

    Args:
        matrix: C, shape (n, n), columns of norm 1.
        factor: F.
        free: symmetric, which entries of X may be varied; others, the diagonal included, are fixed.

    Returns:
        The relative gap, or infinity where N is not positive definite (too far from an optimum).
    """
    inverse = np.linalg.inv(matrix)
    error = factor @ inverse
    loss = float(np.sum(error**2))
    product = error @ inverse.T
    multipliers = np.where(free, 0.0, product.T @ product)
    values = np.linalg.eigvalsh(factor @ multipliers @ factor.T)
    if values[0] < -1e-12 * values[-1]:
        return float("inf")
    fixed = np.sum(multipliers * (matrix.T @ matrix))
    bound = 2 * np.sum(np.sqrt(np.maximum(values, 0.0))) - fixed
    return float((loss - bound) / loss)
