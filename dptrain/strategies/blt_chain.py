"""Interlacing poles of a buffered linear Toeplitz strategy as a smooth image of ℝ^{2d}."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_LEAST_GAP = 1e-6  # share of the logarithmic range that two neighbouring poles keep apart
# Least 1 - θ: slower buffers cannot be told from constant ones within n steps. The second bound
# keeps neighbouring poles further apart than the rounding of θ, and thus interlacing.
_SLOWEST_PER_RUN = 1e-6
_SLOWEST = 1e-10


@dataclasses.dataclass(frozen=True)
class Chain:
    """Map from ℝ^{2d} onto interlacing poles, with its adjoint.

    The distances from one, p_1 < q_1 < p_2 < … < p_d < q_d of θ_1, θ̂_1, …, come from 2d - 1 points
    in a logarithmic range that starts far below 1/n and ends at 1, spaced by a softmax of the first
    2d - 1 variables (and a fixed one for the space above p_d). The last variable places q_d such
    that Σω = Σ(q_j - p_j) stays below 1. Interlacing is ω > 0 and ω̂ > 0, and Σω < 1 gives
    θ̂_d > -1, a stable C^-1, so that every point of ℝ^{2d} is an admissible strategy.
    """

    buffers: int
    steps: int
    box: float = 20.0  # bound on |x|: e^-20 of a gap is below _LEAST_GAP

    @property
    def range(self) -> float:
        """Length of the logarithmic range."""
        return -float(np.log(max(_SLOWEST_PER_RUN / self.steps, _SLOWEST)))

    def poles(self, x: Array) -> tuple[Array, Array]:
        """p and q, shape (d,) each."""
        chain = np.exp(self._places(x))
        p, q = chain[::2].copy(), np.empty(self.buffers)
        q[:-1] = chain[1::2]
        q[-1] = p[-1] + (1 - np.sum(q[:-1] - p[:-1])) * _sigmoid(x[-1])
        return p, q

    def adjoint(self, x: Array, to_p: Array, to_q: Array) -> Array:
        """Gradient in x, given those in p and q."""
        p, q = self.poles(x)
        share = _sigmoid(x[-1])
        room = 1 - np.sum(q[:-1] - p[:-1])
        to_chain = np.empty(2 * self.buffers - 1)
        to_chain[::2], to_chain[1::2] = to_p, to_q[:-1] - to_q[-1] * share
        to_chain[:-1:2] += to_q[-1] * share
        to_chain[-1] += to_q[-1]
        to_chain *= np.exp(self._places(x))
        softmax = _softmax(x)
        to_gaps = np.append(np.cumsum(to_chain[::-1])[::-1], 0.0)
        to_gaps *= self._free
        gradient = np.empty(2 * self.buffers)
        gradient[:-1] = (softmax * (to_gaps - softmax @ to_gaps))[:-1]
        gradient[-1] = to_q[-1] * room * share * (1 - share)
        return gradient

    def spaced(self, slowest: float) -> tuple[Array, Array]:
        """p and q with equally spaced logarithms from ``slowest`` < 1 on."""
        logs = np.log(slowest) * (1 - np.arange(2 * self.buffers) / (2 * self.buffers))
        return np.exp(logs[::2]), np.exp(logs[1::2])

    def variables(self, p: Array, q: Array) -> Array:
        """An x with about these :meth:`poles`: exact up to the limits of the map."""
        chain = np.stack([p, q], axis=1).ravel()[:-1]
        gaps = np.diff(np.log(chain), prepend=-self.range, append=0.0)
        x = np.empty(2 * self.buffers)
        free = np.log(np.maximum(gaps - _LEAST_GAP * self.range, 1e-8))
        x[:-1] = (free - free[-1])[:-1]
        share = (q[-1] - p[-1]) / (1 - np.sum(q[:-1] - p[:-1]))
        x[-1] = np.log(share / (1 - share)) if 0 < share < 1 else np.copysign(self.box, share - 0.5)
        return np.clip(x, -self.box, self.box)

    @property
    def _free(self) -> float:
        """What is left of the range after the least gaps; the softmax shares it out."""
        return self.range * (1 - 2 * self.buffers * _LEAST_GAP)

    def _places(self, x: Array) -> Array:
        """Logarithms of p_1, q_1, …, p_d."""
        gaps = self._free * _softmax(x) + _LEAST_GAP * self.range
        return -self.range + np.cumsum(gaps)[:-1]


def _softmax(x: Array) -> Array:
    """Of all variables but the last, and a zero: positive, sum 1."""
    powers = np.exp(np.append(x[:-1], 0.0))
    return powers / powers.sum()


def _sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))
