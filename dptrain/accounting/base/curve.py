"""The base of all accountants without simulation: from a privacy curve to guarantees."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from dptrain.accounting.base.accountant import Accountant, Profile
from dptrain.accounting.base.statement import (
    SMALLEST_DELTA,
    SMALLEST_SIGMA,
    check_delta,
    check_epsilon,
    checked_grid,
    checked_sigma,
    statement,
    without_noise,
)
from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.search import least_scale
from dptrain.core import Array, Guarantee
from dptrain.mechanism import MatrixMechanism


def convex_envelope(epsilon: Array, delta: Array) -> Array:
    """The least of the bounds and of the chords between them, as functions of e^ε.

    δ(ε) is the greatest P[S] - e^ε Q[S] of all events (and worlds, where there are several): a
    supremum of falling straight lines in e^ε. So it falls and is convex there, and whatever bounds
    it from above at two ε does so, by their chord, between them. Bounds of different proofs, or
    numbers that were rounded up to different extents, need not look like that: this makes them.

    Args:
        epsilon: ascending, shape (n,).
        delta: upper bounds on δ at these, ``inf`` where none is known, shape (n,).

    Returns:
        Upper bounds that are no greater, fall, and are convex in e^ε up to rounding, shape (n,).
    """
    at, place = np.unique(epsilon, return_inverse=True)
    least = np.full(at.shape, np.inf)
    np.minimum.at(least, place, delta)
    least = np.minimum.accumulate(least)
    hull: list[int] = []
    for new in range(at.size):
        # A corner above the chord of its neighbors goes: the steeper part must come first.
        while len(hull) > 1 and _steepness(at, least, hull[-2], hull[-1]) <= _steepness(
            at, least, hull[-1], new
        ):
            hull.pop()
        hull.append(new)
    cell = np.clip(np.searchsorted(hull, np.arange(at.size), side="right") - 1, 0, None)
    left = np.array(hull)[cell]
    right = np.array([*hull[1:], hull[-1]])[cell]
    with np.errstate(divide="ignore", invalid="ignore"):
        # (e^ε - e^a)/(e^b - e^a), which neither overflows nor cancels.
        share = np.exp(at - at[right]) * np.expm1(at[left] - at) / np.expm1(at[left] - at[right])
    share = np.where(left == right, 0.0, share)
    chord = least[left] * (1.0 - share) + least[right] * share
    # The chord's own rounding: a few parts of its greater end.
    chord += 4.0 * np.finfo(float).eps * least[left]
    return np.asarray(np.minimum(least, chord)[place])


def _steepness(epsilon: Array, delta: Array, left: int, right: int) -> float:
    """Logarithm of the fall per unit of e^ε."""
    fall, gap = delta[left] - delta[right], epsilon[right] - epsilon[left]
    if fall <= 0.0:
        return -math.inf
    return float(math.log(fall) - epsilon[right] - math.log(-math.expm1(-gap)))


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
        """ε (remove, add) at δ, rounded up; their maximum is ``epsilon``.

        Here the larger one for both, which is always a bound.
        """
        value = self.epsilon(sigma, delta)
        return value, value

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """Remarks that belong to the statement at (σ, δ)."""
        return ()


@dataclasses.dataclass(frozen=True)
class GaussianCurve(Curve):
    """μ-GDP with μ = sensitivity/σ; both directions are the same."""

    sensitivity: float

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ(ε) of the Gaussian mechanism, twice."""
        value = np.exp(gaussian.log_delta(epsilon, self.sensitivity / sigma))
        return value, value

    def epsilon(self, sigma: float, delta: float) -> float:
        """ε(δ) of the Gaussian mechanism."""
        return gaussian.epsilon(delta, self.sensitivity / sigma)


class DeterministicAccountant(Accountant):
    """An accountant that needs nothing but a ``Curve``."""

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

    def restate(self, mechanism: MatrixMechanism, stated: Guarantee) -> Guarantee:
        """The least ε at the stated δ; the least δ at the stated ε if that ε is the larger one."""
        found = self.guarantee(mechanism, delta=stated.delta)
        if found.epsilon <= stated.epsilon:
            return found
        least = self.profile(mechanism, [stated.epsilon]).delta[0]
        delta = max(float(least), SMALLEST_DELTA)
        return dataclasses.replace(found, epsilon=stated.epsilon, delta=delta)

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
        with tqdm(desc=f"calibrating ({self.display})", unit="σ", delay=2.0, leave=False) as bar:

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
                f"epsilon={epsilon} is unreachable for the {self.display} accountant at "
                f"delta={delta}: even σ = {LARGEST_SIGMA:g} gives ε = {reached:.6g}; choose a "
                "larger epsilon or delta, or fewer steps"
            )
        return self.guarantee(mechanism.with_noise(sigma), delta=delta)
