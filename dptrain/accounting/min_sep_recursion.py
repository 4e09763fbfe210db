"""Backward recursion for P/Q of b-min-sep sampling, over many samples at once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]

# exp() of anything below this neither overflows nor underflows in float64, with room to spare.
SAFE_EXPONENT = 300.0


class Recursion(ABC):
    """State of ``f_i = (1-p) f_{i+1} + p exp(u_i - h_i) f_{i+b}``, with f_i = 1 for i ≥ n.

    Here ``u_i = <c_i, y>/σ²`` and ``h_i = ‖c_i‖²/(2σ²)`` (Dong & Ganesh 2026, Theorem 5.1; rows
    are counted from 0). Rows are consumed from i = n-1 down to 0; only f_i, …, f_{i+b-1} are kept,
    row i at position i mod b.

    Args:
        probability: p in (0, 1].
        min_sep: b ≥ 1.
        lanes: number of samples advanced together.
    """

    def __init__(self, *, probability: float, min_sep: int, lanes: int) -> None:
        self.probability = probability
        self.min_sep = min_sep
        self.lanes = lanes

    @abstractmethod
    def step(self, row: int, exponent: torch.Tensor, half_norm: float) -> None:
        """Compute f_row from u of shape (lanes,) and h; may overwrite ``exponent``."""

    @abstractmethod
    def log_ratio(self, warm_start: bool) -> Array:
        """log P/Q, shape (lanes,), once row 0 has been consumed."""


class LinearRecursion(Recursion):
    """The recursion on f itself, with a logarithmic scale per sample that is renewed now and then.

    One exponential and three multiplications an element; equal to :class:`LogRecursion` as long as
    nothing overflows or vanishes between two renewals, which :func:`rescale_interval` decides.
    """

    def __init__(self, *, probability: float, min_sep: int, lanes: int, rescale_every: int) -> None:
        super().__init__(probability=probability, min_sep=min_sep, lanes=lanes)
        self._every = rescale_every
        self._since = 0
        self._window = torch.ones((min_sep, lanes), dtype=torch.float64)
        self._rows = list(self._window)
        self._kept = torch.empty(lanes, dtype=torch.float64)
        self._log_scale = torch.zeros(lanes, dtype=torch.float64)

    def step(self, row: int, exponent: torch.Tensor, half_norm: float) -> None:
        """See :meth:`Recursion.step`."""
        after = self._rows[(row + 1) % self.min_sep]
        current = self._rows[row % self.min_sep]
        weight = self.probability * math.exp(-half_norm)
        torch.exp(exponent, out=exponent)
        torch.mul(after, 1.0 - self.probability, out=self._kept)
        torch.addcmul(self._kept, exponent, current, value=weight, out=current)
        self._since += 1
        if self._since == self._every:
            self._rescale()

    def _rescale(self) -> None:
        top = self._rows[0].clone()
        for row in self._rows[1:]:
            torch.maximum(top, row, out=top)
        self._log_scale += torch.log(top)
        torch.reciprocal(top, out=top)
        for row in self._rows:
            row *= top
        self._since = 0

    def log_ratio(self, warm_start: bool) -> Array:
        """See :meth:`Recursion.log_ratio`."""
        total = self._rows[0].clone()
        if warm_start:
            for row in self._rows[1:]:
                torch.add(total, row, alpha=self.probability, out=total)
            total /= 1.0 + (self.min_sep - 1) * self.probability
        result: Array = (torch.log(total) + self._log_scale).numpy()
        assert np.isfinite(result).all(), "linear recursion left the range of float64"
        return result


class LogRecursion(Recursion):
    """The same recursion on log f: several times slower, for any exponent (tiny σ)."""

    def __init__(self, *, probability: float, min_sep: int, lanes: int) -> None:
        super().__init__(probability=probability, min_sep=min_sep, lanes=lanes)
        self._window = np.zeros((min_sep, lanes))
        self._log_p = math.log(probability)
        self._log_not_p = math.log1p(-probability) if probability < 1 else -math.inf

    def step(self, row: int, exponent: torch.Tensor, half_norm: float) -> None:
        """See :meth:`Recursion.step`."""
        current = self._window[row % self.min_sep]
        after = self._window[(row + 1) % self.min_sep]
        taken = exponent.numpy() + (self._log_p - half_norm) + current
        np.logaddexp(after + self._log_not_p, taken, out=current)

    def log_ratio(self, warm_start: bool) -> Array:
        """See :meth:`Recursion.log_ratio`."""
        if not warm_start:
            return self._window[0].copy()
        weights = np.full((self.min_sep, 1), self.probability)
        weights[0] = 1.0
        weighted = self._window + np.log(weights)
        total: Array = np.logaddexp.reduce(weighted, axis=0)
        return total - math.log1p((self.min_sep - 1) * self.probability)


def rescale_interval(
    *, probability: float, min_sep: int, warm_start: bool, norm: float, sigma: float
) -> int | None:
    """Rows between two renewals of the scale, or ``None`` if only log space is safe.

    Any pattern takes part at most once in b rows, so R = kb rows multiply f by at most k factors of
    size exp(±U), U bounding the exponents: noise within 12 standard deviations (a breach has
    probability 4e-33 an element and would be caught) plus a signal of at most 2‖c‖²/σ² and the half
    norm. Within the window, entries differ by (1-p)^b at worst; for p = 1 the b chains are separate
    and one that vanishes beside the others counts nothing, unless it is the only one asked for.
    """
    bound = 12.0 * norm / sigma + 2.5 * (norm / sigma) ** 2
    spread = 0.0
    if probability < 1.0:
        spread = -min_sep * math.log1p(-probability)
    elif min_sep > 1 and not warm_start:
        return None
    factors = int((SAFE_EXPONENT - spread) / bound) - 1
    return min_sep * min(factors, 16) if factors >= 1 else None


def make_recursion(
    *,
    probability: float,
    min_sep: int,
    warm_start: bool,
    lanes: int,
    norm: float,
    sigma: float,
    log_space: bool | None = None,
) -> Recursion:
    """The linear recursion where it is safe, else the logarithmic one (``log_space`` overrides)."""
    every = rescale_interval(
        probability=probability,
        min_sep=min_sep,
        warm_start=warm_start,
        norm=norm,
        sigma=sigma,
    )
    if log_space is None:
        log_space = every is None
    if log_space:
        return LogRecursion(probability=probability, min_sep=min_sep, lanes=lanes)
    return LinearRecursion(
        probability=probability, min_sep=min_sep, lanes=lanes, rescale_every=every or min_sep
    )
