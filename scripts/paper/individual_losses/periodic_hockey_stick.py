"""δ(ε) from the Fourier transform of a tilted total loss, at finitely many frequencies.

With M = E[e^{λS}], E_λ the mean under the tilt and k(u) = (1 - e^{-u})₊ e^{-λu},

    g(ε) = δ(ε) e^{λε}/M = E_λ[k(S - ε)] = 1/2π ∫ E_λ[e^{iω(S-ε)}] / ((λ+iω)(λ+1+iω)) dω.

The trapezoid rule with step h gives the periodic Σ_m g(ε + 2πm/h) exactly (Poisson's summation
formula; compare Koskela, Tobaben & Honkela 2023, section 5, arXiv 2209.15596), and every term is ≥
0: wrapping around can only raise δ. No loss is put on a lattice, and the tilt keeps the relative
precision of the smallest δ (docs/theory/composition.md#thm-periodic;
``test_brute_force_of_two_steps``).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dptrain.core import Array

Complex = npt.NDArray[np.complex128]

# Multiplies δ: what the sums of a few thousand terms of a few hundred counts can err by.
_PAD = 1e-9
# Share of a term that rounding can make, besides what the transforms report: a hundred units for
# its own exponential, and for the k multiplications of Horner's rule that it goes through.
_ROUNDING, _ROUNDING_EACH = 5e-14, 5e-15
_ITERATIONS = 60


def log_kernel_maximum(tilt: npt.ArrayLike) -> Array:
    """log max k(u) = log[λ^λ/(1+λ)^{1+λ}]: δ(ε) ≤ M e^{-λε} times it.

    (Canonne, Kamath & Steinke 2020, Proposition 12, arXiv 2004.00010.)
    """
    order = np.asarray(tilt, float)
    return -np.log1p(order) - order * np.log1p(1.0 / order)


def kernel_transform(tilt: float, omega: npt.NDArray[np.floating]) -> Complex:
    """∫ k(u) e^{-iωu} du = 1/((λ+iω)(λ+1+iω))."""
    z = np.asarray(tilt + 1j * omega, complex)
    return np.asarray(1.0 / (z * (z + 1.0)))


class PeriodicHockeyStick:
    """Upper bounds of δ(ε) for n totals that share a tilt λ and a step h.

    Args:
        tilt: λ > 0.
        step: h.
        log_moment: log M, shape (n,).
        mean: of the total under the tilt, shape (n,).
        transform: E_λ[e^{iω(S - mean)}] at ω = 0, h, …, Kh, shape (K+1, n).
        tail: bound of Σ_{k>K} h/π |E_λ[e^{iωS}]| / |(λ+iω)(λ+1+iω)|, shape (n,).
        error: bound of the error of log M and of ``transform``, shape (n,).
    """

    def __init__(
        self, *, tilt: float, step: float, log_moment: Array, mean: Array, transform: Complex,
        tail: Array, error: Array,
    ) -> None:  # fmt: skip
        self._tilt, self._step, self._mean = tilt, step, mean
        self._constant = log_moment + error + _PAD
        omega = step * np.arange(transform.shape[0])
        kernel = kernel_transform(tilt, omega) * (step / math.pi)
        kernel[0] *= 0.5
        self._coefficients = transform * kernel[:, None]
        unit = _ROUNDING + _ROUNDING_EACH * np.arange(omega.size)
        self._extra = tail + unit @ np.abs(self._coefficients)
        self._extra += float(np.abs(kernel).sum()) * np.expm1(np.minimum(error, 50.0))

    def _value(self, epsilon: Array) -> Array:
        """Upper bound of g(ε), shape (n,)."""
        turn = np.exp(-1j * self._step * (epsilon - self._mean))
        total = self._coefficients[-1].copy()
        for row in self._coefficients[-2::-1]:  # Horner's rule
            total *= turn
            total += row
        return np.maximum(total.real + self._extra, 1e-300)

    def log_delta(self, epsilon: Array) -> Array:
        """Upper bound of log δ at one ε for each total, shape (n,)."""
        return np.asarray(self._constant - self._tilt * epsilon + np.log(self._value(epsilon)))

    def left_out(self, epsilon: Array) -> Array:
        """The share of the bound that is not the sum over frequencies, shape (n,)."""
        return np.asarray(self._extra / self._value(epsilon))

    def epsilon(
        self, log_delta: Array, low: Array, high: Array, *, tolerance: float = 1e-7
    ) -> Array:
        """An ε ≥ ``low`` for each total, at which the bound is at most δ.

        Secant steps that keep a bracket; the answer is its upper end, a point at which the bound
        was seen to hold, or ``high``.

        Args:
            log_delta: log δ, shape (n,).
            low: least ε of interest, shape (n,).
            high: an ε ≥ ``low`` known to suffice, shape (n,).
            tolerance: of ε, relative to ``high``.
        """
        top = high.copy()
        at_low, at_top = self.log_delta(low) - log_delta, self.log_delta(top) - log_delta
        done = at_low <= 0.0
        top[done] = low[done]
        # The bound need not hold at ``high``, which was found in another way.
        at_top = np.minimum(at_top, -1e-12)
        side = np.zeros(high.shape, int)
        for _ in range(_ITERATIONS):
            done |= top - low <= tolerance * high
            if done.all():
                break
            middle = low + (top - low) * np.clip(at_low / (at_low - at_top), 0.01, 0.99)
            value = self.log_delta(middle) - log_delta
            holds = (value <= 0.0) & ~done
            fails = (value > 0.0) & ~done
            # The Illinois rule: an end that stays twice counts half.
            at_low = np.where(holds & (side == 1), 0.5 * at_low, at_low)
            at_top = np.where(fails & (side == -1), 0.5 * at_top, at_top)
            top, at_top = np.where(holds, middle, top), np.where(holds, value, at_top)
            low, at_low = np.where(fails, middle, low), np.where(fails, value, at_low)
            side = np.where(holds, 1, np.where(fails, -1, side))
        return top
