"""Composition of different privacy loss distributions at any depth of tail.

Composition is a product of FFTs of the exponentially tilted masses: the tilt puts the bulk of the
numbers where δ is wanted, so values of 1e-12 and far below keep their relative precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import lfilter

from dptrain.accounting.loss_distribution import Array, Indices, LossDistribution

# Multiplies δ: covers the rounding of interval masses over up to 1e6 compositions.
_DELTA_PAD = 1e-8
# Tilted mass that may fall outside the FFT window; what lies above it is charged to δ.
_OUTSIDE = 1e-13
# Cells of the coarse copies on which tilts are chosen (any tilt is valid, a good one is precise).
_COARSE = 4096
_MOST_COARSE = 1 << 17
_LEAST_COARSE = 64


class _Part:
    """The non-zero masses of one distribution, which is composed ``count`` times."""

    def __init__(self, single: LossDistribution, count: int) -> None:
        self.indices: Indices = np.flatnonzero(single.log_mass > -np.inf)
        self.log_mass = single.log_mass[self.indices]
        self.lowest, self.count, self.infinity = single.lowest, count, single.infinity
        self.losses = single.spacing * (single.lowest + self.indices)

    def cumulant(self, tilt: float) -> float:
        weight = self.log_mass + tilt * self.losses
        top = float(weight.max())
        return top + math.log(float(np.exp(weight - top).sum()))

    def coarse(self, cells: int) -> tuple[Array, Array]:
        """Masses of at most ``cells`` groups of neighbours and their mean losses."""
        starts = np.arange(0, self.losses.size, -(-self.losses.size // cells))
        mass = np.exp(self.log_mass)
        total = np.add.reduceat(mass, starts)
        centre = np.add.reduceat(mass * self.losses, starts)
        centre = np.where(total > 0, centre / np.maximum(total, 1e-320), self.losses[starts])
        return total, centre


class HeterogeneousComposition:
    """δ(ε) and ε(δ) of independent losses, each so many times, rounded up.

    Keeps the non-zero masses of each part only; every FFT is one part's, so that a thousand of
    them need little memory. ``parts`` may be an iterator.

    Args:
        parts: loss distributions of equal spacing, and how often each occurs (≥ 1).

    Raises:
        ValueError: if there are no parts, or they differ in spacing, or a count is not positive.
    """

    def __init__(self, parts: Iterable[tuple[LossDistribution, int]]) -> None:
        self._parts: list[_Part] = []
        spacing = math.nan
        for single, count in parts:
            if self._parts and single.spacing != spacing:
                raise ValueError(
                    f"parts: spacings {spacing} and {single.spacing} differ; discretise all losses "
                    f"on one grid"
                )
            if count < 1:
                raise ValueError(f"parts: a count is {count}; leave out what does not occur")
            spacing = single.spacing
            self._parts.append(_Part(single, count))
        if not self._parts:
            raise ValueError("parts: there are none; give at least one loss distribution")
        self._spacing = spacing
        self._count = sum(part.count for part in self._parts)
        self._bottom = math.fsum(part.count * float(part.losses[0]) for part in self._parts)
        self._top = math.fsum(part.count * float(part.losses[-1]) for part in self._parts)
        with np.errstate(divide="ignore"):
            logs = [p.count * float(np.log1p(-p.infinity)) for p in self._parts]
        self._infinity = max(0.0, -math.expm1(math.fsum(logs)))  # not -0.0
        self._coarsen()
        # A steeper tilt would only look at the topmost grid point.
        self._steepest = 5.0 / spacing

    def _coarsen(self) -> None:
        cells = min(_COARSE, max(_LEAST_COARSE, _MOST_COARSE // len(self._parts)))
        coarse = [part.coarse(cells) for part in self._parts]
        self._starts = np.cumsum([0, *(mass.size for mass, _ in coarse[:-1])])
        self._sizes = np.array([mass.size for mass, _ in coarse])
        self._counts = np.array([float(part.count) for part in self._parts])
        self._coarse_losses = np.concatenate([losses for _, losses in coarse])
        with np.errstate(divide="ignore"):
            self._coarse_mass = np.log(np.concatenate([mass for mass, _ in coarse]))

    def _cumulant(self, tilt: float) -> float:
        """Of the total loss."""
        return math.fsum(part.count * part.cumulant(tilt) for part in self._parts)

    def _moments(self, tilt: float) -> tuple[float, float, float]:
        """Cumulant, mean and standard deviation of the tilted total, on the coarse copies."""
        weight = self._coarse_mass + tilt * self._coarse_losses
        top = np.maximum.reduceat(weight, self._starts)
        weight = np.exp(weight - np.repeat(top, self._sizes))
        total = np.add.reduceat(weight, self._starts)
        mean = np.add.reduceat(weight * self._coarse_losses, self._starts) / total
        squares = (self._coarse_losses - np.repeat(mean, self._sizes)) ** 2
        variance = np.add.reduceat(weight * squares, self._starts) / total
        cumulant = float(self._counts @ (top + np.log(total)))
        return cumulant, float(self._counts @ mean), math.sqrt(float(self._counts @ variance))

    def _bisect_tilt(self, too_low: Callable[[float], bool]) -> float:
        low, high = 0.0, min(1.0, self._steepest)
        while too_low(high) and high < self._steepest:
            low, high = high, min(2.0 * high, self._steepest)
        while high - low > 0.01 * high and high > 1e-6:
            middle = 0.5 * (low + high)
            low, high = (middle, high) if too_low(middle) else (low, middle)
        return low

    def _tilt_for_epsilon(self, epsilon: float) -> float:
        """The saddle point: the tilt under which the total loss averages ε (0 if above already)."""
        target = min(epsilon, 0.999 * self._top if self._top > 0 else self._top)
        return self._bisect_tilt(lambda t: self._moments(t)[1] < target)

    def _tilt_for_delta(self, delta: float) -> float:
        """The order of the best Chernoff bound at δ: d/dt [(K(t) - log δ)/t] changes sign."""

        def before(tilt: float) -> bool:
            cumulant, mean, _ = self._moments(tilt)
            return tilt * mean - cumulant < -math.log(delta)

        return self._bisect_tilt(before)

    def _window(self, tilt: float, base: float) -> tuple[float, float]:
        """Chernoff limits of the tilted total loss: mass ≤ ``_OUTSIDE`` beyond either."""
        low, high = self._bottom, self._top
        need = -math.log(_OUTSIDE)
        # Where the total is nearly normal the best step is sqrt(2 need)/deviation; rare large
        # losses want one that is smaller by orders of magnitude, a bounded end a larger one. Any
        # step is valid: it is chosen on the coarse copy.
        deviation = max(self._moments(tilt)[2], self._spacing)
        steps = np.geomspace(1e-5, 10.0, 49) * math.sqrt(2.0 * need) / deviation

        def limit(step: float, cumulant: float) -> float:
            return (cumulant - base + need) / abs(step)

        for sign in (1.0, -1.0):
            rough = [limit(step, self._moments(tilt + sign * step)[0]) for step in steps]
            step = float(steps[int(np.argmin(rough))])
            end = limit(step, self._cumulant(tilt + sign * step))
            low, high = (low, min(high, end)) if sign > 0 else (max(low, -end), high)
        return low, high

    def _composed(self, tilt: float, first: int, size: int) -> tuple[Array, float]:
        """Tilted masses at the grid points from ``first`` on, wrapped around, and their error.

        The error, absolute and per entry, is that of the FFTs, of the powers and of the products.
        """
        unit = 4.0 * np.finfo(float).eps * math.log2(size + 2)
        product, error, shift = None, None, 0
        for part in self._parts:
            n = part.count
            tilted = np.exp(part.log_mass + tilt * part.losses - part.cumulant(tilt))
            spectrum = rfft(np.bincount(part.indices % size, weights=tilted, minlength=size))
            magnitude = np.abs(spectrum)
            amplified = n * magnitude ** (n - 1)
            power = spectrum if n == 1 else spectrum**n
            if product is None or error is None:
                product, error = power, amplified
            else:
                size_of_power = magnitude**n
                # In units of ``unit``: |AB| errs by |A| db + |B| da + da db, and by the product.
                error *= size_of_power + unit * amplified
                error += np.abs(product) * (amplified + size_of_power)
                product *= power
            shift += n * part.lowest
        assert product is not None
        assert error is not None
        composed = np.roll(irfft(product, size), shift - first)
        return composed, unit * (2.0 * float(np.sum(error)) / size + float(np.max(composed)))

    def _tail(self, tilt: float) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
        """Grid of ε, log δ there (finite losses, padded), and where padding was immaterial."""
        h = self._spacing
        base = self._cumulant(tilt)
        low, high = self._window(tilt, base)
        first, last = math.floor(low / h), math.ceil(high / h)
        size = next_fast_len(last - first + 2, real=True)
        composed, error = self._composed(tilt, first, size)
        clean = self._hockey_stick(np.maximum(composed, 0.0), tilt)
        padded = self._hockey_stick(np.maximum(composed, 0.0) + error, tilt)
        epsilons = h * (first + np.arange(size))
        with np.errstate(divide="ignore"):
            # Mass above the window counts in full: e^{K - tL} ≤ its tilted mass at the top.
            beyond = math.log(_OUTSIDE) - tilt * (high - epsilons)
            beyond = np.where(high >= self._top, -np.inf, beyond)
            log_padded = np.logaddexp(np.log(padded), beyond)
            good = log_padded <= np.log(clean) + 1e-5
        return epsilons, log_padded - tilt * epsilons + base, good

    def _hockey_stick(self, mass: Array, tilt: float) -> Array:
        """Σ_{j>k} p_j (1 - e^{ε_k - L_j}) e^{t ε_k} by two recursions of positive terms."""
        h = self._spacing
        decay = math.exp(-tilt * h)
        above = lfilter([0.0, decay], [1.0, -decay], mass[::-1])
        result = lfilter([-math.expm1(-h)], [1.0, -math.exp(-(1.0 + tilt) * h)], above)
        return np.asarray(result[::-1])

    def _finish(self, log_delta: Array) -> Array:
        return np.minimum(
            np.exp(np.minimum(log_delta, 0.0)) * (1.0 + _DELTA_PAD) + self._infinity, 1.0
        )

    def delta(self, epsilon: npt.ArrayLike) -> Array:
        """δ at every ε ≥ 0, rounded up."""
        wanted = np.atleast_1d(np.asarray(epsilon, float))
        result = np.full(wanted.shape, np.nan)
        result[wanted >= self._top] = self._infinity
        while np.isnan(result).any():
            at = float(np.min(wanted[np.isnan(result)]))
            tilt = self._tilt_for_epsilon(at)
            grid, log_delta, good = self._tail(tilt)
            cell = np.clip(np.searchsorted(grid, wanted, side="right") - 1, 0, grid.size - 2)
            inside = (wanted >= grid[0]) & (wanted <= grid[-2]) & good[cell] & good[cell + 1]
            ready = np.isnan(result) & (inside | (wanted == at))
            cell, values = cell[ready], self._finish(log_delta)
            # Between grid points δ is linear in e^ε.
            part = np.expm1(np.maximum(wanted[ready] - grid[cell], 0.0))
            part = np.clip(part / math.expm1(self._spacing), 0.0, 1.0)
            result[ready] = values[cell] * (1.0 - part) + values[cell + 1] * part
            if at < grid[0]:
                result[wanted == at] = self._below(at, float(grid[0]), float(values[0]), tilt)
        return result.reshape(np.shape(epsilon))

    def _below(self, epsilon: float, start: float, value: float, tilt: float) -> float:
        """δ at an ε below the window of ``tilt``, which begins at ``start`` with δ = ``value``.

        A loss L ≥ start adds at most e^{-L} (e^{start} - e^ε), and Σ e^{-L} is at most that of all
        losses; those between ε and the window have a tilted mass of at most ``_OUTSIDE``.
        """
        gap = start + self._cumulant(-1.0) + math.log(-math.expm1(epsilon - start))
        outside = math.log(_OUTSIDE) + self._cumulant(tilt) - tilt * epsilon
        # Both at most 1: δ is.
        more = math.exp(min(gap, 0.0)) + math.exp(min(outside, 0.0))
        return min(value + more * (1.0 + _DELTA_PAD), 1.0)

    def epsilon(self, delta: float) -> float:
        """Least ε ≥ 0 at δ, rounded up to the grid cell's linear interpolation."""
        if self._infinity >= delta:
            return math.inf
        tilt, least = self._tilt_for_delta(delta), math.inf
        while True:
            found, settled = self._crossing(tilt, delta)
            least = min(least, found)
            if settled or tilt == 0.0:
                return least
            # Away from its own ε a tilt shows rounding only: a flatter one sees smaller ε.
            tilt = 0.25 * tilt if tilt > 1e-3 else 0.0

    def _crossing(self, tilt: float, delta: float) -> tuple[float, bool]:
        """An ε ≥ 0 that suffices for δ by the window of this tilt, and if the window was apt."""
        grid, log_delta, good = self._tail(tilt)
        failing = np.flatnonzero(self._finish(log_delta) > delta)
        if failing.size == 0:
            return max(0.0, float(grid[0])), bool(grid[0] <= 0.0)
        cell = int(failing[-1])
        if cell + 1 >= grid.size:
            return max(0.0, self._top), False
        # Between grid points δ is linear in e^ε.
        before, after = self._finish(log_delta[cell : cell + 2])
        part = (before - delta) / (before - after)
        step = math.log1p(part * math.expm1(self._spacing))
        return max(0.0, float(grid[cell]) + step), bool(good[cell])
