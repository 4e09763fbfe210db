"""The sum over pairs of grid points behind the mean of two independent variables."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Pairs:
    """Where (1-w)·e^{jh} + w·e^{(j+d)h} falls on a grid of spacing h/refine, for d ≥ 0.

    The value is e^{jh}·v_d with v_d free of j: a shift of log v_d on the grid. It is split between
    two grid points around it such that the mean is kept. Beyond a certain d the smaller variable
    no longer reaches the next point; as the split is linear in the value, only the mass and the
    mean of all those small values matter, with the mass at 0 among them. On a grid so narrow that
    w·e^{jh} is always below it, a pair with 0 is split between 0 and the lowest point.

    Attributes:
        below: results start so many points lower than the variables.
    """

    def __init__(self, weight: float, spacing: float, refine: int, size: int) -> None:
        """For the weight w of the larger variable, and grids of ``size`` points."""
        self._weight, self._spacing, self._refine = weight, spacing, refine
        fine, log_weight = spacing / refine, math.log(weight)
        # Points around w·e^{jh}, the upper one at least half a cell away.
        self._under = math.floor(log_weight / fine + 1e-9)
        self._over = self._under + (1 if (self._under + 1) * fine - log_weight > 0.5 * fine else 2)
        room = math.expm1(self._over * fine - log_weight)
        far = max(math.ceil(math.log((1.0 - weight) / (weight * room)) / spacing), 1)
        self._narrow = log_weight + (size - 1) * spacing <= 0.0
        self._near = size if self._narrow else min(far, size)
        self.below = 0 if self._narrow else -self._under

    def add(
        self,
        out: Array,
        small: Array,
        big: Array,
        logs: Array,
        *,
        zero: float,
        equal: float,
        apart: float,
    ) -> float:
        """Add ``small[j] · big[j+d]`` for all j and d ≥ 0 to ``out``.

        Args:
            out: masses of the result, changed in place; its lowest point is :attr:`below` points
                under the lowest one of the variables.
            small: masses of the smaller variable, shape (m,).
            big: masses of the larger variable, shape (m,).
            logs: logarithms of the points, shape (m,).
            zero: mass of the smaller variable at 0.
            equal: multiplies the pairs with d = 0.
            apart: multiplies those with d > 0, and with 0.

        Returns:
            the mass of the result at 0.
        """
        fine = self._spacing / self._refine
        shift = np.log(
            (1.0 - self._weight) + self._weight * np.exp(self._spacing * np.arange(self._near))
        )
        cell = np.floor(shift / fine).astype(np.int64)
        share = np.clip(np.expm1(shift - cell * fine) / math.expm1(fine), 0.0, 1.0)
        times = np.full(self._near, apart)
        times[0] = equal
        product, scaled = np.empty(small.size), np.empty(small.size)
        for d in range(0 if equal else 1, self._near):
            n = small.size - d
            np.multiply(small[:n], big[d:], out=product[:n])
            at, up = self.below + int(cell[d]), float(times[d] * share[d])
            for offset, factor in ((at, times[d] - up), (at + 1, up)):
                # Not BLAS's axpy: its threads wait for each other wherever a core is busy.
                np.multiply(product[:n], factor, out=scaled[:n])
                out[offset : offset + n * self._refine : self._refine] += scaled[:n]
        if self._narrow:
            share = self._weight * np.exp(logs - logs[0])
            out[0] += apart * zero * float(big @ share)
            return apart * zero * float(big @ np.maximum(1.0 - share, 0.0))
        self._add_far(out, small, apart * big, logs, zero)
        return 0.0

    def _add_far(self, out: Array, small: Array, big: Array, logs: Array, zero: float) -> None:
        fine, near = self._spacing / self._refine, self._near
        mass, mean = np.full(small.size, zero), np.zeros(small.size)
        mass[near:] += np.cumsum(small[: small.size - near])
        mean[near:] = np.cumsum((small * np.exp(logs))[: small.size - near])
        mean *= np.exp(-logs)
        lower = math.exp(self._under * fine)
        excess = max(self._weight - lower, 0.0) * mass + (1.0 - self._weight) * mean
        up = np.minimum(excess / (math.exp(self._over * fine) - lower), mass)
        stop = self._refine * small.size
        at = self.below + self._under
        out[at : at + stop : self._refine] += big * (mass - up)
        at = self.below + self._over
        out[at : at + stop : self._refine] += big * up
