"""Square strategies that are not Toeplitz: any lower-triangular C, banded or not."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from dptrain.strategies.strategy import Strategy

Array = npt.NDArray[np.float64]


class LowerTriangular(Strategy, ABC):
    """C_{t,j} for t - bands < j ≤ t, different for every t; noise by back-substitution."""

    @abstractmethod
    def row(self, steps: int, t: int) -> Array:
        """The entries C_{t, max(0, t-bands+1)}, …, C_{t,t}: shape (min(bands, t + 1),)."""
