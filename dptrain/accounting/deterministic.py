"""What every accountant without simulation shares: from a privacy curve to guarantees."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from dptrain.accounting.accountant import Accountant, Profile
from dptrain.accounting.convex_envelope import convex_envelope
from dptrain.accounting.search import least_scale
from dptrain.accounting.statement import (
    SMALLEST_SIGMA,
    check_delta,
    check_epsilon,
    checked_grid,
    checked_sigma,
    statement,
    without_noise,
)
from dptrain.guarantee import Guarantee
from dptrain.mechanism import MatrixMechanism

Array = npt.NDArray[np.float64]

RELATIVE_TOLERANCE = 1e-4
LARGEST_SIGMA = 1e6


class Curve(ABC):
    """Privacy of one (scheme, strategy) as a function of σ > 0; holds all that σ cannot change."""

    @abstractmethod
    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ (remove, add) at every ε, rounded up."""

    @abstractmethod
    def epsilon(self, sigma: float, delta: float) -> float:
        """Least ε for both directions at δ, rounded up."""

    def epsilons(self, sigma: float, delta: float) -> tuple[float, float]:
        """ε (remove, add) at δ, rounded up; their maximum is :meth:`epsilon`.

        Here the larger one for both, which is always a bound.
        """
        value = self.epsilon(sigma, delta)
        return value, value

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """Remarks that belong to the statement at (σ, δ)."""
        return ()


class DeterministicAccountant(Accountant):
    """An accountant that needs nothing but a :class:`Curve`."""

    @abstractmethod
    def curve(self, mechanism: MatrixMechanism) -> Curve:
        """The curve of the mechanism's scheme and strategy (never called on a refused one)."""

    def _checked(self, mechanism: MatrixMechanism) -> Curve:
        self.check_covers(mechanism)
        return self.curve(mechanism)

    def guarantee(self, mechanism: MatrixMechanism, *, delta: float) -> Guarantee:
        """The least ε at δ, the larger of both directions, rounded up; ∞ without noise."""
        check_delta(delta, mechanism.scheme)
        curve, sigma = self._checked(mechanism), checked_sigma(mechanism)
        if sigma == 0.0:
            return without_noise(mechanism, self, delta)
        value = curve.epsilon(sigma, delta)
        notes = curve.notes(sigma, delta)
        return statement(mechanism, self, epsilon=value, delta=delta, notes=notes)

    def profile(self, mechanism: MatrixMechanism, epsilon: npt.ArrayLike) -> Profile:
        """δ(ε) in both directions on a grid of ε ≥ 0: falling, and convex in e^ε as the truth is.

        Raises:
            ValueError: if the grid is empty, not ascending, negative or not finite.
        """
        grid = checked_grid(epsilon)
        curve, sigma = self._checked(mechanism), checked_sigma(mechanism)
        if sigma == 0.0:
            remove, add = np.ones_like(grid), np.ones_like(grid)
        else:
            remove, add = (convex_envelope(grid, each) for each in curve.delta(sigma, grid))
        kind = self.kind_of(mechanism)
        return Profile(grid, np.clip(remove, 0, 1), np.clip(add, 0, 1), kind, self.name)

    def calibrate(self, mechanism: MatrixMechanism, *, epsilon: float, delta: float) -> Guarantee:
        """The guarantee of the least σ that meets (ε, δ), to a relative 1e-4, rounded up.

        Raises:
            ValueError: if even σ = 1e6 does not reach ε, saying what it does reach.
        """
        check_epsilon(epsilon)
        check_delta(delta, mechanism.scheme)
        curve = self._checked(mechanism)

        # Shown after two seconds only: most accountants are done by then.
        with tqdm(desc=f"calibrating ({self.name})", unit="σ", delay=2.0, leave=False) as bar:

            def excess(sigma: float) -> float:
                value = curve.epsilon(sigma, delta)
                bar.set_postfix(sigma=f"{sigma:.5g}", epsilon=f"{value:.5g}", refresh=False)
                bar.update()
                return math.log(value / epsilon) if value > 0 else -math.inf

            sigma = least_scale(
                excess,
                start=1.0,
                relative_tolerance=RELATIVE_TOLERANCE,
                smallest=SMALLEST_SIGMA,
                largest=LARGEST_SIGMA,
            )
        if sigma is None:
            reached = curve.epsilon(LARGEST_SIGMA, delta)
            raise ValueError(
                f"epsilon={epsilon} is out of reach of the {self.name} accountant at "
                f"delta={delta}: σ = {LARGEST_SIGMA:g} gives ε = {reached:.6g}; ask for a larger "
                f"epsilon or delta, or use fewer steps"
            )
        return self.guarantee(mechanism.with_noise(sigma), delta=delta)
