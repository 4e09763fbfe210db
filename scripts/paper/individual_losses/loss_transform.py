"""Fourier transforms of the tilted privacy loss of one Poisson-sampled Gaussian step, many norms.

P = (1-q) N(0, 1) + q N(a, 1) and Q = N(0, 1) with a = r/σ (r the norm over the clipping norm). The
loss is L = log dP/dQ under P (remove) or log dQ/dP under Q (add). A tilt λ > 0 replaces its law by
the one of density e^{λL}/E[e^{λL}].
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from dptrain.accounting.simulation import default_threads
from dptrain.core import Array

Complex = npt.NDArray[np.complex128]

_EPS = float(np.finfo(float).eps)
# Normal tails cut here: what is cut is under 1e-17 of the tilted mass (see ``_ends``).
_TAIL = 9.0
_FEWEST, _MOST = 64, 1 << 14
_ROWS = 64  # norms at a time
_CELLS = 1 << 19  # of a product at a time
# Accepted gap between the trapezoid rule and that of every other node; the error is its square.
_GAP = 1e-11
# Half-widths of the intervals of x that bound the transform, and Gauss-Legendre nodes on each.
_HALF_WIDTHS = 4.0 * 2.0 ** (-0.6 * np.arange(10))
_LEGENDRE = np.polynomial.legendre.leggauss(32)


def log_ratio(x: Array, shift: Array, probability: float) -> Array:
    """log dP/dQ = log(1 - q + q e^{ax - a²/2}) at x; ``shift`` is a and broadcasts."""
    exponent = shift * (x - 0.5 * shift)
    small = np.log1p(probability * np.expm1(np.minimum(exponent, 30.0)))
    rest = np.exp(-np.maximum(exponent, 30.0))
    large = exponent + np.log(probability + (1.0 - probability) * rest)
    return np.where(exponent > 30.0, large, small)


class TiltedLosses:
    """One step's loss under the tilt λ, for J norms.

    Integrals over x are trapezoid sums of integrands that are analytic in a strip around the real
    line (the branch points of the loss are π/a away): they converge exponentially in the number of
    nodes. That number is doubled until the sums over the even and over the odd nodes agree to 1e-11
    of the mass; that difference, of which the error is about the square, is what is reported as the
    error.

    Args:
        shifts: a = r/σ > 0, shape (J,).
        probability: Poisson rate q in (0, 1).
        tilt: λ > 0.
        remove: L = log dP/dQ under P; otherwise log dQ/dP under Q.
    """

    def __init__(self, shifts: Array, *, probability: float, tilt: float, remove: bool) -> None:
        self.shifts = np.asarray(shifts, float)
        self._q, self._tilt, self._sign = probability, tilt, 1.0 if remove else -1.0
        # E[e^{λL}] is the mean of (dP/dQ)^power under Q.
        self._power = 1.0 + tilt if remove else -tilt
        parts = [self._settled(rows) for rows in self._blocks()]
        self.cumulant = np.concatenate([part[2] for part in parts])  # log E[e^{λL}], (J,)
        self.mean = np.concatenate([part[3] for part in parts])  # of L under the tilt, (J,)
        self.variance = np.concatenate(  # of L under the tilt, (J,)
            [np.sum(part[0] * part[1] ** 2, axis=1) for part in parts]
        )
        self.error = np.concatenate([part[4] for part in parts])  # absolute, of the cumulant, (J,)

    def _blocks(self) -> list[slice]:
        return [slice(at, at + _ROWS) for at in range(0, self.shifts.size, _ROWS)]

    def _ends(self, shifts: Array) -> tuple[Array, Array]:
        """The points at which x is cut, each (J, 1).

        The slope of power·log dP/dQ lies between 0 and power·a, so the tilted density falls at
        least as fast as a normal one beyond 0 on one side and beyond power·a on the other: at most
        2 e^{1/2} √(2π) Φ(-9) < 1e-17 of its mass is outside.
        """
        far = (self._power * shifts)[:, None]
        return np.minimum(far, 0.0) - _TAIL, np.maximum(far, 0.0) + _TAIL

    def _density(self, x: Array, shifts: Array) -> tuple[Array, Array]:
        """Log of the tilted density before normalization, and L, at x of shape (J, n)."""
        ratio = log_ratio(x, shifts[:, None], self._q)
        return self._power * ratio - 0.5 * x * x - 0.5 * np.log(2.0 * np.pi), self._sign * ratio

    def _discretized(self, rows: slice, nodes: int) -> tuple[Array, Array, Array, Array, Array]:
        """Weights and centered losses (J, n); cumulant, mean and error of the cumulant (J,)."""
        shifts = self.shifts[rows]
        low, high = self._ends(shifts)
        spacing = (high - low) / nodes
        x = low + spacing * (np.arange(nodes) + 0.5)
        log_density, losses = self._density(x, shifts)
        top = log_density.max(axis=1, keepdims=True)
        weights = np.exp(log_density - top)
        total = weights.sum(axis=1, keepdims=True)
        weights /= total
        size = np.sum(weights * np.abs(log_density), axis=1)
        cumulant = (top + np.log(total * spacing))[:, 0]
        mean = np.sum(weights * losses, axis=1)
        error = _gap(weights) + 8.0 * _EPS * (8.0 + size + np.abs(top[:, 0]))
        return weights, losses - mean[:, None], cumulant, mean, error

    def _settled(self, rows: slice) -> tuple[Array, Array, Array, Array, Array]:
        """``_discretized`` with nodes enough for the moments."""
        nodes = _FEWEST
        while True:
            found = self._discretized(rows, nodes)
            if nodes >= _MOST or _gap(found[0]).max() <= _GAP:
                return found
            nodes *= 2

    def log_transform(self, step: float, count: int) -> tuple[Complex, Array]:
        """log E_λ[e^{iω(L - mean)}] at ω = 0, step, …, count·step, and the errors of E_λ.

        Returns:
            Shapes (J, count + 1), any branch of the logarithm, and (J,), absolute errors that hold
            for all frequencies.
        """
        result = np.empty((self.shifts.size, count + 1), complex)
        errors = np.empty(self.shifts.size)

        def work(rows: slice) -> None:
            nodes = _FEWEST
            while not self._fine(rows, nodes, step, count) and nodes < _MOST:
                nodes *= 2
            result[rows], gap = self._transform(rows, nodes, step, count)
            while gap.max() > _GAP and nodes < _MOST:
                nodes *= 2
                result[rows], gap = self._transform(rows, nodes, step, count)
            errors[rows] = gap + self._discretized(rows, nodes)[-1]

        with ThreadPoolExecutor(default_threads()) as pool:
            list(pool.map(work, self._blocks()))
        size = np.maximum(np.abs(result), 1e-18)
        return np.log(size) + 1j * np.angle(result), errors

    def _fine(self, rows: slice, nodes: int, step: float, count: int) -> bool:
        """True if this number of nodes may suffice.

        From one frequency to the next the phase between neighboring nodes must grow by little:
        then it cannot pass π, which the even and the odd nodes show, unseen.
        """
        weights, losses = self._discretized(rows, nodes)[:2]
        leap = step * np.abs(np.diff(losses, axis=1)) * (weights[:, 1:] > 1e-15)
        if leap.max() > 0.25 * np.pi:
            return False
        turned = (
            weights * np.exp(1j * share * count * step * losses) for share in (1.0, 0.9, 0.7, 0.5)
        )
        return all(_gap(each).max() <= _GAP for each in turned)

    def _transform(self, rows: slice, nodes: int, step: float, count: int) -> tuple[Complex, Array]:
        """E_λ[e^{iω(L - mean)}] of some norms, and the gaps between even and odd nodes."""
        weights, losses, _, mean, _ = self._discretized(rows, nodes)
        losses += (mean - self.mean[rows])[:, None]
        result = np.empty((weights.shape[0], count + 1), complex)
        gap = np.empty(weights.shape[0])
        # e^{i(aB + b)hL} = e^{iaBhL} e^{ibhL}: a matrix product over the nodes for each norm.
        width = math.isqrt(count) + 1
        height = -(-(count + 1) // width)
        few = max(1, _CELLS // (nodes * width))
        for at in range(0, weights.shape[0], few):
            some = slice(at, at + few)
            halves = []
            for parity in (0, 1):
                turn = np.exp(1j * step * losses[some, parity::2])
                right = _powers(np.ones_like(turn), turn, width)
                left = _powers(weights[some, parity::2], right[:, -1] * turn, height)
                # Not BLAS, whose threads wait for each other wherever a core is busy.
                halves.append(np.einsum("jan,jbn->jab", left, right))
            even, odd = halves
            size = np.sum(weights[some] * np.abs(losses[some]), axis=1)
            rounding = 8.0 * _EPS * (width + height + step * count * size)
            gap[some] = np.abs(even - odd).max(axis=(1, 2)) + rounding
            result[some] = (even + odd).reshape(len(even), -1)[:, : count + 1]
        return result, gap

    def log_envelope(self, low: Array, high: Array) -> Array:
        """Upper bounds of log|E_λ[e^{iωL}]| for all ω in [low, high], shape (J, len(low)).

        With D = L - L' for an independent copy L', 1 - |E e^{iωL}|² = 2 E[sin²(ωD/2)], and
        sin²t ≥ t² (sin θ/θ)² for |t| ≤ θ ≤ π. Keeping only pairs of losses from an interval of x
        over which L varies by at most d, and θ = ωd/2, it is at least ω² (sin θ/θ)² (m₀m₂ - m₁²)
        with the moments m of the losses in the interval. The best of several intervals is taken.
        """
        center = np.concatenate([self._center(rows) for rows in self._blocks()])
        nodes, weights = _LEGENDRE
        bounds = np.zeros((self.shifts.size, low.size))
        for half in _HALF_WIDTHS:
            x = np.concatenate([center[:, None] + half * nodes, center[:, None] - half], axis=1)
            x = np.concatenate([x, center[:, None] + half], axis=1)
            log_density, losses = self._density(x, self.shifts)
            mass = half * weights * np.exp(log_density[:, :-2] - self.cumulant[:, None])
            moved = losses[:, :-2] - self.mean[:, None]
            zeroth, first = mass.sum(axis=1), np.sum(mass * moved, axis=1)
            kept = np.maximum(zeroth * np.sum(mass * moved**2, axis=1) - first**2, 0.0)
            width = np.abs(losses[:, -1] - losses[:, -2])
            theta = np.minimum(0.5 * width[:, None] * high, np.pi)
            # A hundredth: far above the error of the 32 nodes.
            drop = 0.99 * kept[:, None] * (low * np.sinc(theta / np.pi)) ** 2
            bounds = np.minimum(bounds, 0.5 * np.log1p(-np.minimum(drop, 1.0 - 1e-12)))
        return bounds

    def _center(self, rows: slice) -> Array:
        """Median of x under the tilt, roughly."""
        shifts = self.shifts[rows]
        weights = self._discretized(rows, 4 * _FEWEST)[0]
        low, high = self._ends(shifts)
        middle = np.argmax(np.cumsum(weights, axis=1) >= 0.5, axis=1)
        return low[:, 0] + (high - low)[:, 0] * (middle + 0.5) / weights.shape[1]


def _gap(weights: Array) -> Array:
    """Between the sums over even and over odd nodes, shape (J,)."""
    return np.abs(weights[:, ::2].sum(axis=1) - weights[:, 1::2].sum(axis=1))


def _powers(first: npt.NDArray[np.inexact], factor: Complex, count: int) -> Complex:
    """first·factor^k for k < count along a new axis 1."""
    result = np.empty((factor.shape[0], count, factor.shape[1]), complex)
    result[:, 0] = first
    for k in range(1, count):
        np.multiply(result[:, k - 1], factor, out=result[:, k])
    return result
