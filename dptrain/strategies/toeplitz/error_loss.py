"""The error of a Toeplitz strategy as a differentiable function of C^-1, and its privacy cost.

The error of every query, for a Toeplitz C^-1 and a workload that is not Toeplitz.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import fftconvolve

from dptrain.core import Array, checks
from dptrain.strategies.workloads import Workload

_BLOCK_ENTRIES = 1 << 21  # of FFT work space: 16 MB of float64


class RowNorms:
    """Squared row norms of A C^-1 and smooth bounds on the largest, for any A and Toeplitz C^-1.

    Row t of A C^-1 is the cross-correlation of row t of A with g, so that all rows take
    O(n² log n) with the FFT. Memory: 24 n² bytes.

    Args:
        dense: A, shape (n, n).
    """

    def __init__(self, dense: Array) -> None:
        n = len(dense)
        self._length = next_fast_len(2 * n - 1, real=True)
        self._spectrum = rfft(dense, self._length, axis=1)
        block = max(1, _BLOCK_ENTRIES // self._length)
        self._blocks = [slice(start, min(start + block, n)) for start in range(0, n, block)]
        self._product = np.empty((n, n))

    def squared(self, g: Array) -> Array:
        """Squared row norms, shape (n,)."""
        conjugate = np.conj(rfft(g, self._length))
        for rows in self._blocks:
            correlated = irfft(self._spectrum[rows] * conjugate, self._length, axis=1)
            self._product[rows] = correlated[:, : g.size]
        norms: Array = np.einsum("ti,ti->t", self._product, self._product)
        return norms

    def power_norm(self, g: Array, *, power: float) -> tuple[float, Array]:
        """(Σ_t r_t^p)^(1/p) of the squared row norms r for p = ``power``, and its gradient in g."""
        r = self.squared(g)
        largest = float(r.max())
        if not 0 < largest < np.inf:
            return largest, np.zeros(g.size)
        norm = largest * float(np.sum((r / largest) ** power)) ** (1 / power)
        slope = (r / norm) ** (power - 1)  # of the norm in r_t
        total = np.zeros(self._spectrum.shape[1], dtype=np.complex128)
        for rows in self._blocks:
            weighted = slope[rows, None] * self._product[rows]
            spectrum = rfft(weighted, self._length, axis=1)
            total += np.einsum("tf,tf->f", self._spectrum[rows], np.conj(spectrum))
        return norm, 2 * irfft(total, self._length)[: g.size]


Loss = Callable[[Array], tuple[float, Array]]

OBJECTIVES = ("mean", "max")
_LARGEST_DENSE = 4000  # steps, where n×n matrices are needed: 128 MB each
_POWERS = (16.0, 64.0, 256.0, 1024.0, 4096.0)
_LOOP_UP_TO = 64  # participations; more of them are cheaper through the FFT


def checked_objective(objective: str) -> str:
    """``objective`` if it is known."""
    return checks.choice("objective", objective, OBJECTIVES)


def final_error_loss(workload: Workload, steps: int, objective: str) -> Loss:
    """The squared error of A C^-1 for a Toeplitz C^-1, as a function of its first column.

    ``"mean"``: ‖A C^-1‖_F², the sum of the variances of all n queries. ``"max"``: the variance of
    the worst query, the largest squared row norm of A C^-1. For a Toeplitz A with w = A g these are
    Σ_t (n - t) w_t² and Σ_t w_t² (the last row, whose entries are all of w), in O(n).

    For any other A, ``"mean"`` is a quadratic form of the n×n matrix of ``shifted_gram``, and
    ``"max"`` the last of the smooth upper bounds of ``error_losses``, at most 0.2 % (n = 4000)
    above the largest variance. Such an A is refused for n > 4000.

    Returns:
        A function of g, shape (n,), that returns the loss and its gradient in g, shape (n,).
    """
    return error_losses(workload, steps, objective)[-1]


def error_losses(workload: Workload, steps: int, objective: str) -> tuple[Loss, ...]:
    """Losses to minimize one after the other, each from the optimum of the one before.

    There is one, that of ``final_error_loss``, where it is smooth. The largest of n different row
    norms is not; in its place stand the p-norms of the n variances for p = 16, 64, …, 4096. A
    p-norm is at least the largest variance and at most n^(1/p) times that, hence its minimum is at
    most n^(1/p) times the least possible worst variance. Small p first: for large p the bound is
    nearly as hard to descend as the maximum itself.
    """
    workload.check(steps)
    checked_objective(objective)
    if workload.is_toeplitz:
        return (_toeplitz_loss(workload, steps, objective),)
    if steps > _LARGEST_DENSE:
        raise ValueError(
            f"steps={steps}: for a {type(workload).__name__} that is not Toeplitz, strategies can "
            f"be optimized for at most {_LARGEST_DENSE} steps, since that takes n×n matrices; "
            "optimize for a constant learning rate instead"
        )
    if objective == "max":
        rows = RowNorms(workload.matrix(steps))
        return tuple(functools.partial(rows.power_norm, power=p) for p in _POWERS)
    gram = shifted_gram(workload, steps)

    def loss(g: Array) -> tuple[float, Array]:
        product = gram @ g
        return float(g @ product), 2 * product

    return (loss,)


def _toeplitz_loss(workload: Workload, steps: int, objective: str) -> Loss:
    weights = error_weights(steps, objective)

    def loss(g: Array) -> tuple[float, Array]:
        w = workload.apply(g)
        weighted = weights * w
        return float(weighted @ w), 2 * workload.adjoint(weighted)

    return loss


def error_weights(steps: int, objective: str) -> Array:
    """Weights u such that the error of a Toeplitz A C^-1 with first column w is Σ_t u_t w_t².

    ``"mean"``: u_t = n - t, how many rows w_t is in. ``"max"``: u_t = 1, the last row.
    """
    if checked_objective(objective) == "mean":
        return np.arange(steps, 0, -1, dtype=np.float64)
    return np.ones(steps)


@functools.lru_cache(maxsize=1)
def shifted_gram(workload: Workload, steps: int) -> Array:
    """H such that ‖A C^-1‖_F² = gᵀ H g, where g is the first column of a Toeplitz C^-1.

    Column i of C^-1 is g moved down by i, so H_{jk} = Σ_i G_{i+j,i+k} with G = AᵀA: sums along the
    diagonals of G from the end.

    Returns:
        Shape (n, n), read-only; the last one is kept (8 n² bytes).
    """
    dense = workload.matrix(steps)
    h = dense.T @ dense
    for j in range(steps - 2, -1, -1):
        h[j, :-1] += h[j + 1, 1:]
    h.setflags(write=False)
    return h


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
