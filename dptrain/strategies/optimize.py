"""Least error of banded Toeplitz strategies, with an exact gradient in O(n·bands) or less."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from tqdm.auto import tqdm

from dptrain.strategies.banded_loss import SettledError, banded_errors, log_with_norm
from dptrain.strategies.bsr import square_root_coefficients
from dptrain.strategies.error_loss import Loss
from dptrain.strategies.workload import PREFIX_SUMS, Workload

Array = npt.NDArray[np.float64]

_SHORTER = 16  # how many times shorter the run is whose optimum a long one starts from
_SHORTEST_WARM = 4096  # steps of such a run
_OPTIONS = {"gtol": 1e-8, "ftol": 1e-13, "maxcor": 20, "maxiter": 500}


def optimal_coefficients(
    steps: int, bands: int, objective: str = "mean", workload: Workload = PREFIX_SUMS
) -> Array:
    """Coefficients c ≥ 0 with ‖c‖₂ = 1 that minimise the error of A C^-1 times ‖c‖₂.

    ‖c‖₂ is what one participation costs, and with bands ≤ min-sep participations are orthogonal, so
    this is the least error at fixed privacy (up to m, which is constant).

    Quasi-Newton (L-BFGS-B) on the logarithm from the banded square root, or from the optimum of a
    shorter run for a long one, with c_0 held at 1 while the others move in [0, ∞): the product is
    invariant to scale. For ``"max"`` and a workload that
    is not Toeplitz the optimum is that of a p-norm of the queries' variances and within a factor
    n^(1/8192) of the least worst error: 0.1 % at n = 4000.

    Args:
        steps: n.
        bands: number of coefficients, at most n.
        objective: ``"mean"``, ‖A C^-1‖_F, or ``"max"``, the largest row norm of A C^-1.
        workload: A.

    Returns:
        Shape (bands,), float64.

    Raises:
        ValueError: if the workload is made for another n or too large (see
            :func:`~dptrain.strategies.error_loss.error_losses`), or the objective is unknown.
        RuntimeError: if the optimiser ends above its start or without a finite result.
    """
    errors = banded_errors(workload, steps, bands, objective)
    if bands == 1:
        return np.ones(1)
    c = _start(steps, bands, objective, workload)
    label = f"optimising {bands} bands for {steps} steps"
    # Shown after two seconds only; up to 10^6 steps it is done by then.
    with tqdm(desc=label, unit="it", delay=2.0, leave=False) as bar:
        for error in errors:
            start = c
            c = _minimised(log_with_norm(error), start, bar)
            if isinstance(error, SettledError) and not _holds(error, c):
                error.run_in_full()
                c = _minimised(log_with_norm(error), start, bar)
    return np.asarray(c / np.linalg.norm(c))


def _start(steps: int, bands: int, objective: str, workload: Workload) -> Array:
    """Coefficients to start from, c_0 = 1: the square root's, or a shorter run's optimum.

    The optimum moves slowly with n. From nearby, line searches stay away from unstable C^-1, for
    which all n steps count.
    """
    shorter = steps // _SHORTER
    if not workload.is_toeplitz or shorter < max(bands, _SHORTEST_WARM):
        return square_root_coefficients(bands)
    c = optimal_coefficients(shorter, bands, objective, workload)
    return np.asarray(c / c[0])


def _holds(error: SettledError, c: Array) -> bool:
    """Whether the shortened sum is the whole one, which is certain only for a stable C^-1."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isclose(error.full(c), error(c)[0], rtol=1e-9, atol=0))


def _minimised(loss: Loss, start: Array, bar: tqdm) -> Array:
    """The c with c_0 = 1 that L-BFGS-B finds from ``start``, whose c_0 is 1."""

    def of_tail(tail: Array) -> tuple[float, Array]:
        value, gradient = loss(np.concatenate([[1.0], tail]))
        return value, gradient[1:]

    result = minimize(
        of_tail,
        start[1:],
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, None)] * (start.size - 1),
        callback=lambda _: bar.update() and None,
        options=_OPTIONS,
    )
    if not np.isfinite(result.fun) or result.fun > loss(start)[0]:
        raise RuntimeError(
            f"no optimum found ({bar.desc}): {result.message}; use BSR(bands={start.size})"
        )
    return np.concatenate([[1.0], np.maximum(result.x, 0.0)])
