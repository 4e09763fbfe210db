"""Discretised privacy loss distributions, composed with itself at any depth of tail.

Discretisation follows "Connect the Dots" (Doroshenko et al. 2022): the mass of every interval of
losses is split between the two ends so that both distributions keep their mass, which can only
raise δ(ε). Composition is one FFT of the exponentially tilted masses: the tilt puts the bulk of
the numbers where δ is wanted, so values of 1e-12 and far below keep their relative precision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import lfilter

Array = npt.NDArray[np.float64]

# Multiplies δ: covers the rounding of interval masses over up to 1e6 compositions.
_DELTA_PAD = 1e-8
# Tilted mass that may fall outside the FFT window; what lies above it is charged to δ.
_OUTSIDE = 1e-13
# Cells of the coarse copy on which tilts are chosen (any tilt is valid, a good one is precise).
_COARSE = 4096


@dataclasses.dataclass(frozen=True)
class LossDistribution:
    """Masses ``exp(log_mass)`` at the losses ``spacing * (lowest + i)`` and ``infinity`` at ∞."""

    spacing: float
    lowest: int
    log_mass: Array
    infinity: float

    @property
    def losses(self) -> Array:
        """The finite losses, ascending."""
        return np.asarray(self.spacing * (self.lowest + np.arange(self.log_mass.size)), float)


def connect_the_dots(
    *, spacing: float, lowest: int, upper: Array, lower: Array, below: float, above: float
) -> LossDistribution:
    """Discretise the loss log(dP/dQ) pessimistically.

    Args:
        spacing: distance h of the grid of losses.
        lowest: index of the first grid point.
        upper: P-mass of the losses between grid points i and i+1, shape (m,).
        lower: Q-mass of the same intervals, shape (m,).
        below: P-mass of losses under the grid; it is moved up to the first point.
        above: P-mass of losses over the grid; it is moved to infinity.
    """
    m = upper.size
    top = spacing * (lowest + 1 + np.arange(m))
    with np.errstate(divide="ignore", invalid="ignore"):
        # E_P[e^{top - L}] of the interval lies in [1, e^h]; the share that goes to its lower end.
        ratio = np.exp(np.log(lower) - np.log(upper) + top)
    share = np.clip(np.nan_to_num((ratio - 1.0) / math.expm1(spacing), nan=0.0), 0.0, 1.0)
    mass = np.zeros(m + 1)
    mass[:-1] += upper * share
    mass[1:] += upper * (1.0 - share)
    mass[0] += below
    with np.errstate(divide="ignore"):
        log_mass = np.log(mass)
    return LossDistribution(spacing, lowest, log_mass, above)


class Composition:
    """δ(ε) and ε(δ) of ``count`` independent copies of a loss distribution, rounded up."""

    def __init__(self, single: LossDistribution, count: int) -> None:
        self._single = single
        self._count = count
        self._losses = single.losses
        self._top = count * float(self._losses[-1])
        self._infinity = -math.expm1(count * math.log1p(-single.infinity))
        starts = np.arange(0, self._losses.size, -(-self._losses.size // _COARSE))
        mass = np.exp(single.log_mass)
        coarse = np.add.reduceat(mass, starts)
        centre = np.add.reduceat(mass * self._losses, starts)
        centre = np.where(coarse > 0, centre / np.maximum(coarse, 1e-320), self._losses[starts])
        self._coarse_losses = centre
        with np.errstate(divide="ignore"):
            self._coarse_mass = np.log(coarse)
        # A steeper tilt would only look at the topmost grid point.
        self._steepest = 5.0 / single.spacing

    def _cumulant(self, tilt: float) -> float:
        weight = self._single.log_mass + tilt * self._losses
        top = float(weight.max())
        return top + math.log(float(np.exp(weight - top).sum()))

    def _moments(self, tilt: float) -> tuple[float, float, float]:
        """Cumulant, mean and standard deviation of one tilted loss, on the coarse copy."""
        weight = self._coarse_mass + tilt * self._coarse_losses
        top = float(weight.max())
        weight = np.exp(weight - top)
        total = float(weight.sum())
        mean = float(weight @ self._coarse_losses) / total
        variance = float(weight @ (self._coarse_losses - mean) ** 2) / total
        return top + math.log(total), mean, math.sqrt(variance)

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
        return self._bisect_tilt(lambda t: self._count * self._moments(t)[1] < target)

    def _tilt_for_delta(self, delta: float) -> float:
        """The order of the best Chernoff bound at δ: d/dt [(n K(t) - log δ)/t] changes sign."""

        def before(tilt: float) -> bool:
            cumulant, mean, _ = self._moments(tilt)
            return self._count * (tilt * mean - cumulant) < -math.log(delta)

        return self._bisect_tilt(before)

    def _window(self, tilt: float, base: float) -> tuple[float, float]:
        """Chernoff limits of the tilted total loss: mass ≤ ``_OUTSIDE`` beyond either."""
        low, high = self._count * float(self._losses[0]), self._top
        need = -math.log(_OUTSIDE)
        # Where the total is nearly normal the best step is sqrt(2 need)/deviation; rare large
        # losses want one that is smaller by orders of magnitude, a bounded end a larger one. Any
        # step is valid: it is chosen on the coarse copy.
        deviation = max(self._moments(tilt)[2] * math.sqrt(self._count), self._single.spacing)
        steps = np.geomspace(1e-5, 10.0, 49) * math.sqrt(2.0 * need) / deviation

        def limit(step: float, cumulant: float) -> float:
            return (self._count * (cumulant - base) + need) / abs(step)

        for sign in (1.0, -1.0):
            rough = [limit(step, self._moments(tilt + sign * step)[0]) for step in steps]
            step = float(steps[int(np.argmin(rough))])
            end = limit(step, self._cumulant(tilt + sign * step))
            low, high = (low, min(high, end)) if sign > 0 else (max(low, -end), high)
        return low, high

    def _tail(self, tilt: float) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
        """Grid of ε, log δ there (finite losses, padded), and where padding was immaterial."""
        h, n = self._single.spacing, self._count
        base = self._cumulant(tilt)
        low, high = self._window(tilt, base)
        first, last = math.floor(low / h), math.ceil(high / h)
        size = next_fast_len(last - first + 2, real=True)
        tilted = np.exp(self._single.log_mass + tilt * self._losses - base)
        folded = np.bincount(np.arange(tilted.size) % size, weights=tilted, minlength=size)
        spectrum = rfft(folded)
        magnitude = np.abs(spectrum)
        composed = np.roll(irfft(spectrum**n, size), n * self._single.lowest - first)
        # Rounding of the FFTs and of the power, per entry (absolute).
        unit = 4.0 * np.finfo(float).eps * math.log2(size + 2)
        amplified = 2.0 * float(np.sum(magnitude ** (n - 1))) * n / size
        error = unit * (amplified + float(np.max(composed)))
        clean = self._hockey_stick(np.maximum(composed, 0.0), tilt)
        padded = self._hockey_stick(np.maximum(composed, 0.0) + error, tilt)
        epsilons = h * (first + np.arange(size))
        with np.errstate(divide="ignore"):
            # Mass above the window counts in full: e^{nK - tL} ≤ its tilted mass at the top.
            beyond = math.log(_OUTSIDE) - tilt * (high - epsilons)
            beyond = np.where(high >= self._top, -np.inf, beyond)
            log_padded = np.logaddexp(np.log(padded), beyond)
            good = log_padded <= np.log(clean) + 1e-5
        return epsilons, log_padded - tilt * epsilons + n * base, good

    def _hockey_stick(self, mass: Array, tilt: float) -> Array:
        """Σ_{j>k} p_j (1 - e^{ε_k - L_j}) e^{t ε_k} by two recursions of positive terms."""
        h = self._single.spacing
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
            grid, log_delta, good = self._tail(self._tilt_for_epsilon(at))
            cell = np.clip(np.searchsorted(grid, wanted, side="right") - 1, 0, grid.size - 2)
            inside = (wanted >= grid[0]) & (wanted <= grid[-2]) & good[cell] & good[cell + 1]
            ready = np.isnan(result) & (inside | (wanted == at))
            cell, values = cell[ready], self._finish(log_delta)
            # Between grid points δ is linear in e^ε.
            part = np.expm1(np.maximum(wanted[ready] - grid[cell], 0.0))
            part = np.clip(part / math.expm1(self._single.spacing), 0.0, 1.0)
            result[ready] = values[cell] * (1.0 - part) + values[cell + 1] * part
        return result.reshape(np.shape(epsilon))

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
        step = math.log1p(part * math.expm1(self._single.spacing))
        return max(0.0, float(grid[cell]) + step), bool(good[cell])
