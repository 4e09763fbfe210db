"""Squared error of a banded, non-Toeplitz C and its gradient, in O(n·bands²)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.linalg import solve_triangular

from dptrain.core import Array
from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.workloads import PrefixSums, Workload

Loss = Callable[[Array], tuple[float, Array]]

_LEAST_BLOCK = 32  # rows; smaller blocks spend their time between the matrix products


def inverse_workload(workload: Workload, steps: int) -> Array | None:
    """The diagonals of A^-1 where it is known to be banded.

    Prefix sums are undone by differences. SGD with momentum β, rates η and weight decay λ
    (``MomentumSGD``, with u = A x): m_t = (u_t - u_{t-1})/η_t gives the gradients back as
    x_t = m_t - β m_{t-1} + λ u_{t-1}, which takes three of the u's.

    Returns:
        Shape (width, n) with ``[k, j]`` the entry (j + k, j) of A^-1 (zero beyond row n), or
        ``None`` if A^-1 is not known to be banded.
    """
    workload.check(steps)
    if isinstance(workload, PrefixSums):
        diagonals = np.ones((2, steps))
        diagonals[1] = -1.0
    elif isinstance(workload, MomentumSGD):
        rates = np.broadcast_to(np.asarray(workload.learning_rates), (steps,))
        if not np.all(rates > 1e-6 * rates.max()):
            return None
        inverse = 1 / rates
        diagonals = np.zeros((3, steps))
        diagonals[0] = inverse
        # u_{t-1} occurs in m_t and, times -β, in m_{t-1}; u_{t-2} in m_{t-1} only.
        diagonals[1, :-1] = -inverse[1:] - workload.momentum * inverse[:-1] + workload.weight_decay
        diagonals[2, :-2] = workload.momentum * inverse[1:-1]
    else:
        return None
    for k in range(1, min(len(diagonals), steps)):
        diagonals[k, steps - k :] = 0.0
    return diagonals[:steps]


class BandedError:
    """‖A C^-1‖_F² as a function of the diagonals of C, for an A with a banded inverse.

    L = C A^-1 is banded too, and K = A C^-1 = L^-1. In blocks at least as large as its bandwidth
    L is block bidiagonal, with T_i on the diagonal and B_i to the left of it, and the diagonal
    blocks of K Kᵀ follow a recursion:

        R_i = T_i^-1 (I + B_i R_{i-1} B_iᵀ) T_i^-T,    ‖K‖_F² = Σ_i tr R_i,

    because rows i of K are T_i^-1 (E_i - B_i K_{i-1}). Its adjoint runs backwards: with
    S_i = T_i^-T R̄_i T_i^-1, R̄_{i-1} = I + B_iᵀ S_i B_i, ∂B_i = 2 S_i B_i R_{i-1} and
    ∂T_i = -2 T_i^-T R̄_i R_i.

    Args:
        bands: rows of the array of diagonals that the methods take.
        inverse: diagonals of A^-1, shape (width, n); the identity's (``np.ones((1, n))``) makes K
            the noise matrix C^-1 itself.
    """

    def __init__(self, bands: int, inverse: Array) -> None:
        self.bands = bands
        self.steps = inverse.shape[1]
        self._inverse = inverse
        self._width = bands + len(inverse) - 1  # diagonals of L
        self._block = max(self._width - 1, min(_LEAST_BLOCK, self.steps))
        self._count = -(-self.steps // self._block)
        # Entry (j + k, j) of L sits in row (j + k) of the blocks: its own or the next one.
        size = self._block
        j = np.arange(self.steps)[None, :]
        row = j + np.arange(self._width)[:, None]
        inside = row < self.steps
        own = inside & (row // size == j // size)
        self._own = own, (row // size, row % size, np.broadcast_to(j % size, row.shape))
        self._next = inside & ~own, self._own[1]

    def squared_rows(self, diagonals: Array) -> Array:
        """Squared row norms of A C^-1, shape (n,). Infinite or NaN where it leaves the range."""
        with np.errstate(all="ignore"):
            *_, r = self._forward(diagonals)
        rows = np.diagonal(r, axis1=1, axis2=2).reshape(-1)
        return np.asarray(rows[: self.steps])

    def __call__(self, diagonals: Array) -> tuple[float, Array]:
        """Loss and its gradient in ``diagonals``, shape (bands, n); needs a positive diagonal."""
        own, left, inverse, r = self._forward(diagonals)
        size = self._block
        own_bar = np.empty_like(own)
        left_bar = np.zeros_like(left)
        bar = np.eye(size)
        for i in range(self._count - 1, -1, -1):
            half = inverse[i].T @ bar
            own_bar[i] = -2 * half @ r[i]
            if i:
                product = (half @ inverse[i]) @ left[i]
                left_bar[i] = 2 * product @ r[i - 1]
                bar = np.eye(size) + left[i].T @ product
        slope = np.zeros((self._width, self.steps))
        for (mask, place), blocks in ((self._own, own_bar), (self._next, left_bar)):
            slope[mask] = blocks[tuple(index[mask] for index in place)]
        rows = np.trace(r, axis1=1, axis2=2).sum() - (self._count * size - self.steps)
        return float(rows), self._adjoint_product(slope)

    def _forward(self, diagonals: Array) -> tuple[Array, Array, Array, Array]:
        """Blocks T, B, T^-1 and R, each of shape (count, block, block); identity as padding."""
        size = self._block
        product = self._product(diagonals)
        own = np.zeros((self._count, size, size))
        left = np.zeros_like(own)
        for (mask, place), blocks in ((self._own, own), (self._next, left)):
            blocks[tuple(index[mask] for index in place)] = product[mask]
        padding = self._count * size - self.steps
        own[-1, range(size - padding, size), range(size - padding, size)] = 1.0
        inverse = np.empty_like(own)
        r = np.empty_like(own)
        eye = np.eye(size)
        for i in range(self._count):
            inverse[i] = solve_triangular(own[i], eye, lower=True, check_finite=False)
            inner = eye + left[i] @ r[i - 1] @ left[i].T if i else eye
            r[i] = inverse[i] @ inner @ inverse[i].T
        return own, left, inverse, r

    def _product(self, diagonals: Array) -> Array:
        """Diagonals of C A^-1: (j + a, j) of A^-1 meets (j + a + k, j + a) of C."""
        product = np.zeros((self._width, self.steps))
        for a, weights in enumerate(self._inverse):
            product[a : a + self.bands, : self.steps - a] += (
                diagonals[:, a:] * weights[: self.steps - a]
            )
        return product

    def _adjoint_product(self, slope: Array) -> Array:
        """The adjoint of ``_product``."""
        gradient = np.zeros((self.bands, self.steps))
        for a, weights in enumerate(self._inverse):
            gradient[:, a:] += (
                slope[a : a + self.bands, : self.steps - a] * weights[: self.steps - a]
            )
        return gradient
