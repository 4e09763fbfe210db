"""Least error of banded Toeplitz strategies, with an exact gradient in O(n·bands)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.signal import lfilter

from dptrain.strategies.bsr import square_root_coefficients

Array = npt.NDArray[np.float64]


def error_weights(steps: int, objective: str) -> Array:
    """Weights u such that the error is Σ_t u_t w_t², with C w = (1, …, 1), for prefix sums.

    ``"mean"``: u_t = n - t, the sum of the variances of all n prefix sums, ‖A C^-1‖_F².
    ``"max"``: u_t = 1, the variance of the last (and worst) prefix sum, the largest row of A C^-1.
    """
    if objective == "mean":
        return np.arange(steps, 0, -1, dtype=np.float64)
    assert objective == "max", objective
    return np.ones(steps)


def log_loss_and_gradient(coefficients: Array, weights: Array) -> tuple[float, Array]:
    """log(‖c‖₂² · Σ_t u_t w_t²) with C w = (1, …, 1), and its gradient in c.

    ‖c‖₂ is what one participation costs, and with bands ≤ min-sep participations are orthogonal,
    so this is the logarithm of the squared error at fixed privacy (up to m, which is constant). It
    does not change when c is scaled.

    With F = Σ u_t w_t² and dw = -C^-1 (dC) w: ∂F/∂c_k = -2 Σ_t v_t w_{t-k}, where Cᵀ v = u ∘ w is
    the adjoint filter (the same filter run backwards in time).

    Args:
        coefficients: c, shape (bands,), c_0 > 0.
        weights: u, shape (n,), n ≥ bands.
    """
    n = weights.size
    w = lfilter([1.0], coefficients, np.ones(n))
    weighted = weights * w
    v = np.ascontiguousarray(lfilter([1.0], coefficients, weighted[::-1])[::-1])
    error = float(weighted @ w)
    norm = float(coefficients @ coefficients)
    slope = np.array([v[k:] @ w[: n - k] for k in range(coefficients.size)])
    return np.log(error) + np.log(norm), 2 * coefficients / norm - 2 * slope / error


def optimal_coefficients(steps: int, bands: int, objective: str) -> Array:
    """Coefficients c ≥ 0 with ‖c‖₂ = 1 that minimise :func:`log_loss_and_gradient`.

    Quasi-Newton (L-BFGS-B) from the banded square root, with c_0 held at 1 while the others move
    in [0, ∞): the loss is invariant to scale.

    Args:
        steps: n.
        bands: number of coefficients, at most n.
        objective: ``"mean"`` or ``"max"`` (see :func:`error_weights`).

    Returns:
        Shape (bands,), float64.

    Raises:
        RuntimeError: if the optimiser ends above its start or without a finite result.
    """
    start = square_root_coefficients(bands)
    if bands == 1:
        return start
    weights = error_weights(steps, objective)

    def loss(tail: Array) -> tuple[float, Array]:
        value, gradient = log_loss_and_gradient(np.concatenate([[1.0], tail]), weights)
        return value, gradient[1:]

    result = minimize(
        loss,
        start[1:],
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, None)] * (bands - 1),
        options={"gtol": 1e-8, "ftol": 1e-13, "maxcor": 20, "maxiter": 500},
    )
    if not np.isfinite(result.fun) or result.fun > loss(start[1:])[0]:
        raise RuntimeError(
            f"no optimum found for steps={steps}, bands={bands}: {result.message}; use BSR"
        )
    c = np.concatenate([[1.0], np.maximum(result.x, 0.0)])
    return np.asarray(c / np.linalg.norm(c))
