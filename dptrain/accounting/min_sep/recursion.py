"""Backward recursion for P/Q of b-min-sep sampling, over many samples at once.

(docs/theory/min-sep.md#thm-min-sep-recursion; ``test_log_ratio_is_the_sum_over_patterns``; without
logarithms docs/theory/min-sep.md#thm-min-sep-rescaling;
``test_linear_recursion_equals_logarithmic``.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from dptrain.core import Array, checks

# exp() of anything below this neither overflows nor underflows in float64, with room to spare.
SAFE_EXPONENT = 300.0


class Recursion(ABC):
    """State of ``f_i = (1-p) f_{i+1} + p exp(u_i - h_i) f_{i+b}``, with f_i = 1 for i ≥ n.

    Here ``u_i = <c_i, y>/σ²`` and ``h_i = ‖c_i‖²/(2σ²)`` (Dong & Ganesh 2026, Theorem 5.1, arXiv
    2602.09338; rows are counted from 0). Rows are consumed from i = n-1 down to 0; only f_i, …,
    f_{i+b-1} are kept, row i at position i mod b.

    ``lanes`` samples are advanced together.
    """

    def __init__(self, *, probability: float, min_sep: int, lanes: int) -> None:
        self.probability = probability
        self.min_sep = min_sep
        self.lanes = lanes

    @abstractmethod
    def consume(self, first_row: int, exponents: torch.Tensor, half_norms: Sequence[float]) -> None:
        """Compute f_i for rows first_row, …, first_row+k-1, the last of them first.

        ``exponents`` holds u, shape (k, lanes), contiguous, and is overwritten; ``half_norms``
        holds the k values h.
        """

    @abstractmethod
    def log_ratio(self, warm_start: bool) -> Array:
        """log P/Q, shape (lanes,), once row 0 has been consumed."""


class LinearRecursion(Recursion):
    """The recursion on f itself, with a logarithmic scale per sample that is renewed now and then.

    One exponential and one fused multiplication an element: kept is g_i = f_i / r^{n-i}, for which
    the recursion reads ``g_i = ((1-p)/r) g_{i+1} + (p/r^b) exp(u_i - h_i) g_{i+b}``, and r = 1-p
    spares the first product. (Where 1-p is small its powers are not: then r = 1.) Equal to
    ``LogRecursion`` as long as nothing overflows or vanishes between two renewals, which
    ``rescale_interval`` decides.
    """

    def __init__(self, *, probability: float, min_sep: int, lanes: int, rescale_every: int) -> None:
        super().__init__(probability=probability, min_sep=min_sep, lanes=lanes)
        self._every = rescale_every
        self._since = 0
        self._consumed = 0
        self._log_gauge = log_gauge(probability)
        self._window = torch.ones((min_sep, lanes), dtype=torch.float64)
        self._rows = list(self._window)
        self._kept = torch.empty(lanes, dtype=torch.float64)
        self._log_scale = torch.zeros(lanes, dtype=torch.float64)

    def consume(self, first_row: int, exponents: torch.Tensor, half_norms: Sequence[float]) -> None:
        """Take in rows of exponents, the last row first."""
        if self._consumed == 0 and self._log_gauge != 0.0:
            # g_{n+j} = r^j: row n is the one after the last row consumed first.
            n = first_row + len(half_norms)
            for j in range(self.min_sep):
                self._rows[(n + j) % self.min_sep].fill_(math.exp(j * self._log_gauge))
        # numpy's exponential takes half the time of torch's, and one call does the whole block.
        block = exponents.numpy()
        np.exp(block, out=block)
        factors = exponents.unbind()
        weight = self.probability * math.exp(-self.min_sep * self._log_gauge)
        for position in range(len(half_norms) - 1, -1, -1):
            row = first_row + position
            after = self._rows[(row + 1) % self.min_sep]
            current = self._rows[row % self.min_sep]
            if self._log_gauge == 0.0:
                after = torch.mul(after, 1.0 - self.probability, out=self._kept)
            value = weight * math.exp(-half_norms[position])
            torch.addcmul(after, factors[position], current, value=value, out=current)
            self._since += 1
            if self._since == self._every:
                self._rescale()
        self._consumed += len(half_norms)

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
        """log P/Q of every lane, once all rows are taken in."""
        total = self._rows[0].clone()
        if warm_start:
            for j, row in enumerate(self._rows[1:], start=1):
                weight = self.probability * math.exp(-j * self._log_gauge)
                torch.add(total, row, alpha=weight, out=total)
            total /= 1.0 + (self.min_sep - 1) * self.probability
        log_scale = self._log_scale + self._consumed * self._log_gauge
        result: Array = (torch.log(total) + log_scale).numpy()
        checks.invariant(
            np.isfinite(result).all(), "the linear recursion left the range of float64"
        )
        return result


class LogRecursion(Recursion):
    """The same recursion on log f: several times slower, for any exponent (tiny σ)."""

    def __init__(self, *, probability: float, min_sep: int, lanes: int) -> None:
        super().__init__(probability=probability, min_sep=min_sep, lanes=lanes)
        self._window = np.zeros((min_sep, lanes))
        self._log_p = math.log(probability)
        self._log_not_p = math.log1p(-probability) if probability < 1 else -math.inf

    def consume(self, first_row: int, exponents: torch.Tensor, half_norms: Sequence[float]) -> None:
        """Take in rows of exponents, the last row first."""
        block = exponents.numpy()
        for position in range(len(half_norms) - 1, -1, -1):
            row = first_row + position
            current = self._window[row % self.min_sep]
            after = self._window[(row + 1) % self.min_sep]
            taken = block[position] + (self._log_p - half_norms[position]) + current
            np.logaddexp(after + self._log_not_p, taken, out=current)

    def log_ratio(self, warm_start: bool) -> Array:
        """log P/Q of every lane, once all rows are taken in."""
        if not warm_start:
            return self._window[0].copy()
        weights = np.full((self.min_sep, 1), self.probability)
        weights[0] = 1.0
        weighted = self._window + np.log(weights)
        total: Array = np.logaddexp.reduce(weighted, axis=0)
        return total - math.log1p((self.min_sep - 1) * self.probability)


def log_gauge(probability: float) -> float:
    """log r of ``LinearRecursion``: r = 1-p, or 1 where p is above one half."""
    return math.log1p(-probability) if probability <= 0.5 else 0.0


def rescale_interval(
    *,
    probability: float,
    min_sep: int,
    warm_start: bool,
    norm: float,
    sigma: float,
    copies: int = 1,
) -> int | None:
    """Rows between two renewals of the scale, or ``None`` if only log space is safe.

    Any pattern takes part at most once in b rows, so R = kb rows multiply f by at most k factors of
    size exp(±U), U bounding the exponents: noise within 12 standard deviations (a breach has
    probability 4e-33 an element and would be caught) plus a signal of at most 2‖c‖²/σ² for each of
    the ``copies`` of an example's participations that the outputs hold and the half norm, and the
    gauge adds r^{-b} a factor. Within the window, entries differ by (1-p)^b at worst and by the
    gauge once more; for p = 1 the b chains are separate and one that vanishes beside the others
    counts nothing, unless it is the only one asked for.
    """
    gauge = -min_sep * log_gauge(probability)
    bound = 12.0 * norm / sigma + (2.0 * copies + 0.5) * (norm / sigma) ** 2 + gauge
    spread = 0.0
    if probability < 1.0:
        spread = gauge - min_sep * math.log1p(-probability)
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
