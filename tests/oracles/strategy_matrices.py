"""Strategy matrices C of tiny runs and their noise W (W C = I), straight from the definitions.

Nothing here imports the library; everything is a dense array, by recursions or by elimination.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.linalg import solve_triangular

from tests.oracles.strategy_workloads import momentum_and_decay

Array = npt.NDArray[np.float64]


def toeplitz(column: Sequence[float] | Array, steps: int) -> Array:
    """Lower triangular with ``column`` (padded with zeros, or cut) down every diagonal."""
    matrix = np.zeros((steps, steps))
    for offset, value in enumerate(column[:steps]):
        matrix += value * np.eye(steps, k=-offset)
    return matrix


def inverse(matrix: Array) -> Array:
    """Of a lower triangular matrix, by forward substitution."""
    return np.asarray(solve_triangular(matrix, np.eye(len(matrix)), lower=True))


def truncate(matrix: Array, bands: int) -> Array:
    """Only the main diagonal and the bands - 1 below it."""
    return np.triu(matrix, k=1 - bands)


def square_root(matrix: Array) -> Array:
    """The lower triangular S with positive diagonal and S S = A, diagonal after diagonal."""
    steps = len(matrix)
    root = np.diag(np.sqrt(np.diag(matrix)))
    for offset in range(1, steps):
        for j in range(steps - offset):
            i = j + offset
            inner = root[i, j + 1 : i] @ root[j + 1 : i, j]
            root[i, j] = (matrix[i, j] - inner) / (root[i, i] + root[j, j])
    return root


def bsr(steps: int, bands: int, alpha: float = 1.0, beta: float = 0.0) -> Array:
    """Banded square root of A_{α,β} (Kalinin & Lampert 2024)."""
    return truncate(square_root(momentum_and_decay(steps, alpha, beta)), bands)


def bisr(steps: int, bands: int, alpha: float = 1.0, beta: float = 0.0) -> Array:
    """Inverse of the banded inverse square root of A_{α,β}."""
    inverse_root = inverse(square_root(momentum_and_decay(steps, alpha, beta)))
    return inverse(truncate(inverse_root, bands))


def inverse_banded(coefficients: Sequence[float] | Array, steps: int) -> Array:
    """C whose inverse is Toeplitz with these first coefficients."""
    return inverse(toeplitz(coefficients, steps))


def blt(theta: Sequence[float] | Array, omega: Sequence[float] | Array, steps: int) -> Array:
    """c_0 = 1, c_t = Σ_j ω_j θ_j^{t-1}."""
    pairs = list(zip(theta, omega, strict=True))
    column = [1.0] + [sum(w * r ** (t - 1) for r, w in pairs) for t in range(1, steps)]
    return toeplitz(column, steps)


def blt_noise(theta: Sequence[float] | Array, omega: Sequence[float] | Array, z: Array) -> Array:
    """y_t = z_t - Σ_j ω_j s_j; s_j ← θ_j s_j + y_t."""
    theta, omega = np.asarray(theta), np.asarray(omega)
    buffers = np.zeros((len(theta), *z.shape[1:]))
    rows = []
    for row in z:
        y = row - np.tensordot(omega, buffers, axes=1)
        buffers = theta.reshape(-1, *[1] * (z.ndim - 1)) * buffers + y
        rows.append(y)
    return np.array(rows)


def normalize_columns(matrix: Array) -> Array:
    """Columns of norm 1."""
    return np.asarray(matrix / np.sqrt((matrix**2).sum(axis=0)))
