"""Least error of banded Toeplitz strategies, with an exact gradient in O(n·bands) or less.

Error times privacy cost of a banded Toeplitz strategy, with its gradient.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize
from scipy.signal import fftconvolve, lfilter
from tqdm.auto import tqdm

from dptrain.core import Array
from dptrain.strategies.toeplitz.bsr import square_root_coefficients
from dptrain.strategies.toeplitz.error_loss import Loss, error_losses, error_weights
from dptrain.strategies.workloads import PREFIX_SUMS, Workload

# Relative distance to its limit at which a filter counts as settled. The error needs all digits,
# its gradient fewer; rounding alone leaves about 10^-13 in w and 10^-11 in h at a thousand bands.
_TOLERANCES = (1e-12, 1e-9)  # of w and h
_SHORTEST = 1024  # steps, which cost no more than finding out that fewer would do
_DIRECT_UP_TO = 256  # lags of a correlation; more of them go through the FFT
_OUT_OF_RANGE = 1e4  # stands for the logarithm of an error that overflowed


def banded_errors(workload: Workload, steps: int, bands: int, objective: str) -> tuple[Loss, ...]:
    """The squared error of A C^-1 as a function of the coefficients c, with its gradient.

    There are several, to minimize one after the other, where
    ``error_losses`` has several.

    Returns:
        Functions of c, shape (bands,), c_0 > 0.
    """
    workload.check(steps)
    if workload.is_toeplitz:
        return (SettledError(workload, steps, bands, objective),)
    losses = error_losses(workload, steps, objective)
    return tuple(_through_inverse(loss, steps) for loss in losses)


def overlap_cost(c: Array, overlap: float, decay: float) -> tuple[float, Array]:
    """r_0 + 2κ Σ_{d≥1} ρ^d r_d for the autocorrelation r of c, and its gradient, in O(bands).

    κ = ``overlap``, ρ = ``decay``. κ = 0 is ‖c‖₂², κ = ρ = 1 is (Σc)².
    """
    before = np.asarray(lfilter([0.0, decay], [1.0, -decay], c))  # Σ_{j<k} ρ^{k-j} c_j
    after = np.asarray(lfilter([0.0, decay], [1.0, -decay], c[::-1]))[::-1]
    value = float(c @ c) + 2 * overlap * float(c @ before)
    return value, 2 * c + 2 * overlap * (before + after)


def log_with_norm(error: Loss, overlap: float = 0.0, decay: float = 1.0) -> Loss:
    """log(``overlap_cost(c)`` · ``error(c)``) and its gradient: log(‖c‖₂² · error) at overlap 0.

    ``_OUT_OF_RANGE`` where it overflows.
    """

    def loss(c: Array) -> tuple[float, Array]:
        # A line search may try c whose inverse grows beyond float64; it is told to come back.
        with np.errstate(over="ignore", invalid="ignore"):
            value, slope = error(c)
        if not (0 < value < np.inf and np.all(np.isfinite(slope))):
            return _OUT_OF_RANGE, np.zeros(c.size)
        cost, rise = overlap_cost(c, overlap, decay)
        return np.log(value) + np.log(cost), slope / value + rise / cost

    return loss


def _correlate(x: Array, y: Array, lags: int) -> Array:
    """Σ_t x_{t+k} y_t for k = 0, …, lags - 1, for x and y of one length."""
    if lags > _DIRECT_UP_TO:
        return np.asarray(fftconvolve(x, y[::-1])[y.size - 1 :][:lags])
    return np.array([x[k:] @ y[: y.size - k] for k in range(lags)])


def _through_inverse(loss_of_inverse: Loss, steps: int) -> Loss:
    """The error as a function of c, given as one of the first column g of C^-1.

    dg = -C^-1 (dC) g, so that ∂/∂c_k = -Σ_t v_t g_{t-k}, where Cᵀ v is the gradient in g: the same
    filter run backwards in time.
    """
    impulse = np.eye(1, steps)[0]

    def loss(c: Array) -> tuple[float, Array]:
        g = lfilter([1.0], c, impulse)
        value, gradient = loss_of_inverse(g)
        v = lfilter([1.0], c, gradient[::-1])[::-1]
        return value, -_correlate(v, g, c.size)

    return loss


class SettledError:
    """Σ_t u_t w_t² with C w = a, the first column of a Toeplitz A, and its gradient in c.

    C and A commute, so that w = A C^-1 e_0 is one filter run over a; u is as in
    ``error_weights``. The derivative of w in c_k is -h moved
    down by k, with C h = w, hence ∂/∂c_k = -2 Σ_t u_t w_t h_{t-k}: one more run, and ``bands``
    inner products, O(n·bands).

    Most of that is saved where a becomes constant, as for prefix sums and momentum: both filters
    forget their start, w → a_∞/c(1) and h → w_∞/c(1) with c(1) = Σ c_k, and once ``bands``
    successive values of both are close to it the recursion stays there, if C^-1 is stable. The
    rest of the sums is then Σ u_t times a constant. If they never settle, the sums are whole.

    Args:
        workload: a Toeplitz workload.
        steps: n.
        bands: number of coefficients of every c.
        objective: ``"mean"`` or ``"max"``.
    """

    def __init__(self, workload: Workload, steps: int, bands: int, objective: str) -> None:
        self._bands = bands
        self._column = workload.apply(np.eye(1, steps)[0])
        self._weights = error_weights(steps, objective)
        self._after = np.append(np.cumsum(self._weights[::-1])[::-1], 0.0)  # Σ_{s≥t} u_s
        self._limit = float(self._column[-1])
        moving = np.flatnonzero(np.abs(self._column - self._limit) > 1e-15 * abs(self._limit))
        self._constant_from = int(moving[-1]) + 1 if moving.size else 0
        self._shortest = min(steps, max(_SHORTEST, 16 * bands, self._constant_from + bands))
        self._length = self._shortest

    @property
    def length(self) -> int:
        """Number of steps that the filters ran over the last time."""
        return self._length

    def __call__(self, c: Array) -> tuple[float, Array]:
        """The error and its gradient for c, shape (bands,)."""
        total = c.sum()
        limits = self._limit / total, self._limit / total**2
        length = self._length  # that was enough the last time
        while True:
            w = lfilter([1.0], c, self._column[:length])
            h = lfilter([1.0], c, w)
            if self._settled(w, h, length, limits):
                break
            if length == self._column.size:
                # Nothing to learn for the next c: a line search tries unstable ones too.
                return self._sums(w, h, 0.0, 0.0)
            length = min(2 * length, self._column.size)
        self._length = length
        while self._length > self._shortest and self._settled(w, h, self._length // 2, limits):
            self._length = max(self._length // 2, self._shortest)
        return self._sums(w, h, *limits)

    def full(self, c: Array) -> float:
        """The error from the whole sum, which takes a settled C^-1 for granted no more."""
        w = lfilter([1.0], c, self._column)
        return float((self._weights * w) @ w)

    def run_in_full(self) -> None:
        """Sum over all n steps from now on."""
        self._length = self._shortest = self._column.size

    def _settled(self, w: Array, h: Array, length: int, limits: tuple[float, float]) -> bool:
        """True if the ``bands`` values before ``length`` are at their limits."""
        window = slice(max(length, self._shortest) - self._bands, max(length, self._shortest))
        return all(
            bool(np.abs(values[window] - limit).max() <= tolerance * abs(limit))
            for values, limit, tolerance in zip((w, h), limits, _TOLERANCES, strict=True)
        )

    def _sums(self, w: Array, h: Array, w_limit: float, h_limit: float) -> tuple[float, Array]:
        after = self._after[w.size]
        weighted = self._weights[: w.size] * w
        value = float(weighted @ w) + after * w_limit**2
        correlation = _correlate(weighted, h, self._bands)
        return value, -2 * (correlation + after * w_limit * h_limit)


_SHORTER = 16  # how many times shorter the run is whose optimum a long one starts from
_SHORTEST_WARM = 4096  # steps of such a run
_OPTIONS = {"gtol": 1e-8, "ftol": 1e-13, "maxcor": 20, "maxiter": 500}


def optimal_coefficients(
    steps: int,
    bands: int,
    objective: str = "mean",
    workload: Workload = PREFIX_SUMS,
    overlap: float = 0.0,
    overlap_decay: float = 1.0,
) -> Array:
    """Coefficients c ≥ 0 with ‖c‖₂ = 1 that minimize the error of A C^-1 times a cost of c.

    At ``overlap`` κ = 0 the cost is ‖c‖₂. It is what one participation costs, and with bands ≤
    min-sep participations are orthogonal, so this is the least error at fixed privacy (up to m,
    which is constant) without amplification. In general the squared cost is
    that of ``overlap_cost``: sampling hides when an example took part, and hides it the better the
    less the columns of different steps overlap.

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
        overlap: κ in [0, 1].
        overlap_decay: ρ in (0, 1].

    Returns:
        Shape (bands,), float64.
    """
    errors = banded_errors(workload, steps, bands, objective)
    if bands == 1:
        return np.ones(1)
    c = _start(steps, bands, objective, workload, (overlap, overlap_decay))
    label = f"optimizing {bands} bands for {steps} steps"
    # Shown after two seconds only; up to 10^6 steps it is done by then.
    with tqdm(desc=label, unit="it", delay=2.0, leave=False) as bar:
        for error in errors:
            start = c
            loss = log_with_norm(error, overlap, overlap_decay)
            c = _minimized(loss, start, bar)
            if isinstance(error, SettledError) and not _holds(error, c):
                error.run_in_full()
                c = _minimized(loss, start, bar)
    return np.asarray(c / np.linalg.norm(c))


def _start(
    steps: int, bands: int, objective: str, workload: Workload, overlap: tuple[float, float]
) -> Array:
    """Coefficients to start from, c_0 = 1: the square root's, or a shorter run's optimum.

    The optimum moves slowly with n. From nearby, line searches stay away from unstable C^-1, for
    which all n steps count.
    """
    shorter = steps // _SHORTER
    if not workload.is_toeplitz or shorter < max(bands, _SHORTEST_WARM):
        return square_root_coefficients(bands)
    c = optimal_coefficients(shorter, bands, objective, workload, *overlap)
    return np.asarray(c / c[0])


def _holds(error: SettledError, c: Array) -> bool:
    """True if the shortened sum is the whole one, which is certain only for a stable C^-1."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isclose(error.full(c), error(c)[0], rtol=1e-9, atol=0))


def _minimized(loss: Loss, start: Array, bar: tqdm) -> Array:
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
