"""δ(ε) of a sum of independent discretized losses, by FFTs of exponentially tilted masses.

The tilt puts the bulk of the numbers where δ is wanted, so values of 1e-12 and far below keep their
relative precision (docs/theory/composition.md#thm-tilted;
``test_far_tails_lie_between_brackets``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import lfilter

from dptrain.accounting.losses.loss_distribution import Indices, LossDistribution
from dptrain.accounting.losses.tilt_ladder import RoughLosses, Rung, rungs
from dptrain.core import Array

Spectrum = npt.NDArray[np.complex128]

# Relative, on δ: covers the rounding of what is not a mass, and of each mass per composition.
_DELTA_PAD, _MASS_PAD = 1e-8, 1e-13
# Tilted mass that may fall outside the FFT window; what lies above it is charged to δ.
_OUTSIDE = 1e-13
_NEED = -math.log(_OUTSIDE)
# A window of more cells is computed on a grid of twice the spacing: bounds memory and time.
_MOST_CELLS = 1 << 19
# Logarithm of δ below which Chernoff bounds do, and the least δ that is stated above 0.
_LOWEST = -280.0
_TINY = float(np.finfo(float).tiny)
# Relative: how much further than the curve's own ε an answer goes, so that δ is met there.
_EPSILON_PAD = 1e-12
# What δ lies below its best Chernoff bound, in nats, where little is known.
_BELOW_CHERNOFF = 3.0
# Of the mass at infinity: finite losses of less matter to nobody.
_BESIDE_INFINITY = math.log(1e-6)


class Masses:
    """The non-zero masses of one distribution, which is composed ``count`` times."""

    def __init__(self, single: LossDistribution, count: int) -> None:
        self.indices: Indices = np.flatnonzero(single.log_mass > -np.inf)
        self.log_mass = single.log_mass[self.indices]
        self.lowest, self.count, self.infinity = single.lowest, count, single.infinity
        self.spacing = single.spacing
        self.losses = np.asarray(single.spacing * (single.lowest + self.indices), np.float64)

    def cut(self, most: float) -> Masses:
        """The masses with the greatest losses, of mass ``most`` together or less, at infinity."""
        beyond = np.cumsum(np.exp(self.log_mass)[::-1])[::-1]
        kept = max(int(np.count_nonzero(beyond > most)), 1)
        if kept == beyond.size:
            return self
        log_mass = np.full(int(self.indices[kept - 1]) + 1, -np.inf)
        log_mass[self.indices[:kept]] = self.log_mass[:kept]
        infinity = self.infinity + float(beyond[kept])
        return Masses(LossDistribution(self.spacing, self.lowest, log_mass, infinity), self.count)

    def cumulant(self, tilt: float) -> float:
        """K(t) = log E[e^{tL}] of the finite losses."""
        weight = self.log_mass + tilt * self.losses
        top = float(weight.max())
        return top + math.log(float(np.exp(weight - top).sum()))

    def doubled(self) -> Masses:
        """The losses on every other point of the grid, rounded up (``split_cells``)."""
        index, h = self.lowest + self.indices, self.spacing
        low = index // 2
        odd = (index % 2).astype(bool)
        # E[e^{top - L}] of a loss in the middle; the share that goes down keeps it.
        share = np.where(odd, math.expm1(h) / math.expm1(2.0 * h), 1.0)
        mass, first = np.exp(self.log_mass), int(low[0])
        size = int(low[-1]) - first + 2
        total = np.bincount(low - first, weights=mass * share, minlength=size)
        total += np.bincount(low + 1 - first, weights=mass * (1.0 - share), minlength=size)
        with np.errstate(divide="ignore"):
            log_mass = np.log(total)
        return Masses(LossDistribution(2.0 * h, first, log_mass, self.infinity), self.count)


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """δ on the grid points around a rung's ε, rounded up; between them it is linear in e^ε.

    Attributes:
        first: grid index of ``delta[0]``.
        delta: δ at the grid points, shape (m,), m ≥ 2.
        spacing: of the grid, the composition's or a multiple.
        cumulant: K(t) of the rung's tilt.
    """

    rung: Rung
    first: int
    delta: Array
    spacing: float
    cumulant: float

    @property
    def low(self) -> float:
        """Least ε of the grid."""
        return self.spacing * self.first

    def at(self, epsilon: Array) -> Array:
        """δ at ε ≥ ``low``."""
        cell = np.floor(epsilon / self.spacing).astype(np.int64) - self.first
        cell = np.clip(cell, 0, self.delta.size - 2)
        part = np.expm1(np.maximum(epsilon - self.spacing * (self.first + cell), 0.0))
        part = np.clip(part / math.expm1(self.spacing), 0.0, 1.0)
        return np.asarray(self.delta[cell] * (1.0 - part) + self.delta[cell + 1] * part)

    def where(self, delta: float) -> float:
        """Least ε of the grid from which on δ is met; it is at the last grid point."""
        failing = np.flatnonzero(self.delta > delta)
        if failing.size == 0:
            return self.low
        cell = min(int(failing[-1]), self.delta.size - 2)
        before, after = self.delta[cell : cell + 2]
        part = min((before - delta) / (before - after), 1.0)
        step = math.log1p(part * math.expm1(self.spacing))
        return self.spacing * (self.first + cell) + step


def _power(spectrum: Spectrum, n: int, unit: float) -> tuple[Spectrum, Array]:
    """The n-th power of numbers of magnitude at most 1, and its error in units of theirs.

    What is below e^-60, as most of a high power is, is dropped and counts as an error.
    """
    magnitude = np.abs(spectrum)
    if n == 1:
        return spectrum, np.ones_like(magnitude)
    kept = magnitude > math.exp(-60.0 / n)
    power, error = np.zeros_like(spectrum), np.full(magnitude.shape, 2.0 * math.exp(-60.0) / unit)
    power[kept] = spectrum[kept] ** n
    error[kept] = n * magnitude[kept] ** (n - 1)
    return power, error


class TiltedCurve:
    """δ(ε) and ε(δ) of independent losses, each so many times, rounded up.

    Both are read from one curve. It consists of stretches, each from an FFT of its own, computed
    when they are asked for (``tilt_ladder`` says at which tilt, and from where to where).

    Keeps the non-zero masses of each part only; every FFT is one part's, so that a thousand of
    them need little memory.

    Args:
        parts: at least one, of equal spacing.
    """

    def __init__(self, parts: Sequence[Masses]) -> None:
        self._parts, self._spacing = parts, parts[0].spacing
        self._pad = _DELTA_PAD + _MASS_PAD * sum(part.count for part in parts)
        self._bottom = math.fsum(part.count * float(part.losses[0]) for part in parts)
        self._top = math.fsum(part.count * float(part.losses[-1]) for part in parts)
        with np.errstate(divide="ignore"):
            logs = [p.count * float(np.log1p(-p.infinity)) for p in parts]
        self._infinity = max(0.0, -math.expm1(math.fsum(logs)))  # not -0.0
        self._rough = RoughLosses([(p.losses, p.log_mass, p.count) for p in parts])
        lowest = _LOWEST
        if self._infinity > 0.0:
            lowest = max(lowest, math.log(self._infinity) + _BESIDE_INFINITY)
        h, rough, bottom, top = self._spacing, self._rough, self._bottom, self._top

        def fits(tilt: float) -> bool:
            """True if the window has few enough cells. (``self`` here would make a cycle.)"""
            (_, high), (_, low) = rough.steps(tilt, _NEED, h)
            return min(high, top) - max(low, bottom) <= _MOST_CELLS * h

        # A steeper tilt would only look at the topmost grid point.
        self._ladder = rungs(rough, steepest=5.0 / h, lowest=lowest, fits=fits)
        self._rungs: list[Rung] = []
        self._stretches: dict[int, _Stretch] = {}
        self._coarser: TiltedCurve | None = None

    @property
    def infinity(self) -> float:
        """Mass of infinite losses of the total."""
        return self._infinity

    def _rung(self, number: int) -> Rung | None:
        """A rung by its number; they are found in their order, once."""
        while len(self._rungs) <= number:
            following = next(self._ladder, None)
            if following is None:
                return None
            self._rungs.append(following)
        return self._rungs[number]

    def _cumulant(self, tilt: float) -> float:
        """K(t) of the total loss."""
        return math.fsum(part.count * part.cumulant(tilt) for part in self._parts)

    def _window(self, tilt: float, base: float) -> tuple[float, float]:
        """Chernoff limits of the tilted total loss: mass ≤ ``_OUTSIDE`` beyond either."""
        low, high = self._bottom, self._top
        # Any step is valid: it is chosen on the rough copy.
        for step, _ in self._rough.steps(tilt, _NEED, self._spacing):
            end = (self._cumulant(tilt + step) - base + _NEED) / step
            low, high = (low, min(high, end)) if step > 0 else (max(low, end), high)
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
            power, amplified = _power(spectrum, n, unit)
            if product is None or error is None:
                product, error = power, amplified
            else:
                size_of_power = np.abs(power)
                # In units of ``unit``: |AB| errs by |A| db + |B| da + da db, and by the product.
                error *= size_of_power + unit * amplified
                error += np.abs(product) * (amplified + size_of_power)
                product *= power
            shift += n * part.lowest
        assert product is not None
        assert error is not None
        composed = np.roll(irfft(product, size), shift - first)
        return composed, unit * (2.0 * float(np.sum(error)) / size + float(np.max(composed)))

    def _stretch(self, number: int) -> _Stretch:
        """δ around the ε of a rung; computed once."""
        if number not in self._stretches:
            self._stretches[number] = self._resolved(self._rungs[number])
        return self._stretches[number]

    def _resolved(self, rung: Rung) -> _Stretch:
        h, tilt = self._spacing, rung.tilt
        base = self._cumulant(tilt)
        low, high = self._window(tilt, base)
        first, last = math.floor(low / h), math.ceil(high / h)
        if last - first > _MOST_CELLS:
            if self._coarser is None:
                self._coarser = TiltedCurve([part.doubled() for part in self._parts])
            return self._coarser._resolved(rung)
        size = next_fast_len(last - first + 2, real=True)
        composed, error = self._composed(tilt, first, size)
        np.maximum(composed, 0.0, out=composed)
        # Σ_{j>k} p_j (1 - e^{ε_k - L_j}) e^{t ε_k} by two recursions of positive terms.
        decay = math.exp(-tilt * h)
        above = lfilter([0.0, decay], [1.0, -decay], (composed + error)[::-1])
        summed = lfilter([-math.expm1(-h)], [1.0, -math.exp(-(1.0 + tilt) * h)], above)[::-1]
        # Of these, the cells of the rung's ε and their neighbors.
        begin = min(max(math.floor(rung.start / h) - first, 0), size - 2)
        end = min(max(math.ceil(rung.end / h) - first + 2, begin + 2), size)
        epsilons = h * (first + np.arange(begin, end))
        with np.errstate(divide="ignore"):
            # Mass above the window counts in full: e^{K - tL} ≤ its tilted mass at the top.
            beyond = -_NEED - tilt * (high - epsilons)
            beyond = np.where(high >= self._top, -np.inf, beyond)
            log_delta = np.logaddexp(np.log(summed[begin:end]), beyond) - tilt * epsilons + base
        return _Stretch(rung, first + begin, self._finish(log_delta), h, base)

    def _finish(self, log_delta: Array) -> Array:
        delta = np.exp(np.minimum(log_delta, 0.0)) * (1.0 + self._pad) + self._infinity
        return np.clip(delta, _TINY, 1.0)

    def delta(self, epsilon: npt.ArrayLike) -> Array:
        """δ at every ε ≥ 0, rounded up."""
        wanted = np.atleast_1d(np.asarray(epsilon, float))
        result = np.full(wanted.shape, self._infinity)
        left, number = wanted < self._top, 0
        while left.any() and (rung := self._rung(number)) is not None:
            here = left & (wanted <= rung.end)
            if here.any():
                result[here] = self._read(number, wanted[here])
            left, number = left & ~here, number + 1
        if left.any():
            result[left] = self._past(wanted[left])
        return result.reshape(np.shape(epsilon))

    def _read(self, number: int, epsilon: Array) -> Array:
        """δ at ε of a rung."""
        stretch = self._stretch(number)
        result = stretch.at(epsilon)
        below = epsilon < stretch.low
        if below.any():
            result[below] = self._below(epsilon[below], stretch)
        return result

    def _below(self, epsilon: Array, stretch: _Stretch) -> Array:
        """δ at ε below the window of a tilt.

        It begins at ``start``, with δ = ``value``. A loss L ≥ start adds at most
        e^{-L} (e^{start} - e^ε), and Σ e^{-L} is at most that of all losses; those between ε and
        the window have a tilted mass of at most ``_OUTSIDE``.
        """
        start, tilt = stretch.low, stretch.rung.tilt
        gap = start + self._cumulant(-1.0) + np.log(-np.expm1(epsilon - start))
        outside = -_NEED + stretch.cumulant - tilt * epsilon
        # Both at most 1: δ is.
        more = np.exp(np.minimum(gap, 0.0)) + np.exp(np.minimum(outside, 0.0))
        delta: Array = np.minimum(stretch.delta[0] + more * (1.0 + self._pad), 1.0)
        return delta

    def _past(self, epsilon: Array) -> Array:
        """δ at ε past the last rung: what its tilt's Chernoff bound says."""
        tilt = self._rungs[-1].tilt
        return self._finish(self._cumulant(tilt) - tilt * epsilon)

    def epsilon(self, delta: float) -> float:
        """Least ε ≥ 0 at δ, rounded up, on the curve of ``delta``."""
        if self._infinity >= delta:
            return math.inf

        def met(number: int, epsilon: float) -> bool:
            return bool(self._read(number, np.array([epsilon]))[0] <= delta)

        number = self._likely(math.log(delta))
        while met(number, self._rungs[number].start):
            if number == 0:
                return 0.0
            number -= 1
        # Now δ is not met where the rung starts.
        while not met(number, self._rungs[number].end):
            number += 1
            following = self._rung(number)
            if following is None:
                return self._past_at(delta)
            if met(number, following.start):
                return math.nextafter(following.start, math.inf)
        rung, found = self._rungs[number], self._stretch(number).where(delta)
        return min(max(found * (1.0 + _EPSILON_PAD), rung.start), rung.end)

    def _likely(self, log_delta: float) -> int:
        """The rung on which δ is, if it is as far below its best Chernoff bound as usual."""
        number = 0
        while (rung := self._rung(number)) and rung.bound > log_delta + _BELOW_CHERNOFF:
            number += 1
        return min(number, len(self._rungs) - 1)

    def _past_at(self, delta: float) -> float:
        """The ε of ``_past`` at δ."""
        tilt = self._rungs[-1].tilt
        if tilt == 0.0:
            return self._top
        exponent = self._cumulant(tilt) + math.log1p(self._pad) - math.log(delta - self._infinity)
        return min(exponent / tilt, self._top)
