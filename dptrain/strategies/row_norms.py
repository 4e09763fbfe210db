"""The error of every query, for a Toeplitz C^-1 and a workload that is not Toeplitz."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.fft import irfft, next_fast_len, rfft

Array = npt.NDArray[np.float64]

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
        return np.einsum("ti,ti->t", self._product, self._product)

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
