"""Privacy curves of a user whose draws are revealed: means of Gaussian δ over ‖C x‖."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.special import logsumexp

from dptrain.accounting.base.curve import Curve
from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.search import least_true
from dptrain.accounting.users.revealed_law import revealed_law, worst_blocking
from dptrain.accounting.users.squared_norm_grid import SquaredNormGrid
from dptrain.core import Array

# Below this, lost underflows could matter; the unamplified Gaussian bound still applies.
_SMALLEST = 1e-300
_AT_ONCE = 24  # ε values of one backward program


@dataclasses.dataclass(frozen=True)
class Draws:
    """The parameters that the user's draws depend on: k, p, b and the grid of squared norms."""

    grid: SquaredNormGrid
    examples: int
    probability: float
    min_sep: int

    @property
    def rounding(self) -> float:
        """Relative error of a probability that is a sum of products of up to n factors.

        Each factor carries at most k + 800 ulp (the exponential in ``binomial``), each step a few
        additions.
        """
        factors = len(self.grid.added) * (self.examples + 800)
        return 4.0 * factors * float(np.finfo(np.float64).eps)

    def notes(self) -> tuple[str, ...]:
        """Remarks on what was rounded."""
        return (
            f"Squared norms of C x were rounded up to multiples of {self.grid.unit:.3g}, "
            f"probabilities by a relative {self.rounding:.1g}",
        )

    def unamplified(self, sigma: float, epsilon: Array) -> Array:
        """log δ at the largest norm that any draws reach."""
        return gaussian.log_delta(epsilon, math.sqrt(self.grid.squared()[-1]) / sigma)

    def ceiling(self, sigma: float, delta: float) -> float:
        """ε(δ) at the largest norm."""
        return gaussian.epsilon(delta, math.sqrt(self.grid.squared()[-1]) / sigma)

    def log_deltas(self, sigma: float, epsilon: Array) -> Array:
        """log δ_Gauss(ε; ‖C x‖/σ) at every level: shape (len(epsilon), size + 1)."""
        norms = np.sqrt(self.grid.squared())
        return gaussian.log_delta(epsilon[:, None], norms[None, :] / sigma)

    def rounded_up(self, sigma: float, epsilon: Array, log_delta: Array) -> Array:
        """δ from its computed logarithm, never above the unamplified bound."""
        padded = np.exp(log_delta + math.log1p(self.rounding)) + _SMALLEST
        return np.minimum(padded, np.exp(self.unamplified(sigma, epsilon)))


class OwnDrawsCurve(Curve):
    """max over k' ≤ k of E_x[δ_Gauss(ε; ‖C x‖/σ)], exclusion by the user's own draws."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        with np.errstate(divide="ignore"):
            self._log_laws = [
                np.log(
                    revealed_law(
                        draws.grid,
                        examples=examples,
                        probability=draws.probability,
                        min_sep=draws.min_sep,
                    )
                )
                for examples in range(1, draws.examples + 1)
            ]

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ(ε), the same in both directions."""
        given = self._draws.log_deltas(sigma, epsilon)
        log_delta = np.max([logsumexp(given + law, axis=1) for law in self._log_laws], axis=0)
        value = self._draws.rounded_up(sigma, epsilon, log_delta)
        return value, value

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """Remarks on what was rounded."""
        return self._draws.notes()

    def epsilon(self, sigma: float, delta: float) -> float:
        """ε(δ) by bisection."""
        top = self._draws.ceiling(sigma, delta)
        return least_true(
            lambda e: float(self.delta(sigma, np.array([e]))[0][0]) <= delta,
            low=0.0,
            high=top,
            tolerance=1e-9 * top,
        )


class AnyBlockingCurve(Curve):
    """E_x[δ_Gauss(ε; ‖C x‖/σ)] under the worst blocking by others, for every ε anew."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ(ε), the same in both directions."""
        value = np.concatenate(
            [
                self._some(sigma, part)
                for part in np.array_split(epsilon, -(-epsilon.size // _AT_ONCE))
            ]
        )
        return value, value

    def _some(self, sigma: float, epsilon: Array) -> Array:
        draws = self._draws
        log_final = draws.log_deltas(sigma, epsilon)
        # Scaled by the largest value so that no δ underflows on the way.
        scale = log_final[:, -1:]
        with np.errstate(divide="ignore", invalid="ignore"):
            final = np.where(np.isfinite(scale), np.exp(log_final - scale), 0.0)
            worst = worst_blocking(
                draws.grid,
                final,
                examples=draws.examples,
                probability=draws.probability,
                min_sep=draws.min_sep,
            )
            log_delta = np.log(worst) + scale[:, 0]
        return draws.rounded_up(sigma, epsilon, log_delta)

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """A remark that nothing is conjectured."""
        return (
            *self._draws.notes(),
            "This bound on exclusion by participation is proven for any rule by which others "
            "exclude and does not use Conjecture 6.2 of Dong & Ganesh 2026 (arXiv 2602.09338)",
        )

    def epsilon(self, sigma: float, delta: float) -> float:
        """ε(δ) by cutting the interval into many parts at once."""
        low, high = 0.0, self._draws.ceiling(sigma, delta)
        tolerance = 1e-9 * high
        while high - low > tolerance:
            trials = np.linspace(low, high, _AT_ONCE + 1)[:-1]
            fits = np.flatnonzero(self.delta(sigma, trials)[0] <= delta)
            if fits.size and fits[0] == 0:
                return float(trials[0])
            first = int(fits[0]) if fits.size else _AT_ONCE
            low = float(trials[first - 1])
            high = float(trials[first]) if fits.size else high
        return high
