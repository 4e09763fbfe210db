"""Privacy curves of independent steps, composed numerically, and their averages and maxima."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import assert_never

import numpy as np

from dptrain.accounting.base.curve import Curve
from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.composition import Composition
from dptrain.accounting.losses.public_coin import public_mixture, public_spread
from dptrain.accounting.losses.subsampled_gaussian import subsampled_gaussian
from dptrain.accounting.poisson.truncated_step import Branches, full_pair, open_pair
from dptrain.core import Adjacency, Array

# A case of less probability than this is charged to δ, as the normal tails are.
NEGLIGIBLE = 1e-40
# From here on down the mass of cut tails of many steps may matter.
_RESOLVED = 1e-33
# Points at which averages of several curves are read at once.
_POINTS = 17

GRID_NOTE = (
    "privacy losses were rounded pessimistically to a grid (connect the dots), and normal tails "
    "beyond 13.5 standard deviations count as δ"
)


class ComposedCurve(Curve):
    """Independent copies of one step's pair of laws, composed numerically.

    ``symmetric`` is True if both directions have the same losses.
    """

    symmetric: bool = False

    @property
    def displaced(self) -> float:
        """Expected number of times that an example displaces another: 0, as no batch is cut."""
        return 0.0

    @property
    @abstractmethod
    def unsampled(self) -> float:
        """Distance by which all steps together can differ if every coin were published.

        The coins have the same law in both worlds, so a run is at least as private as the Gaussian
        mechanism of that sensitivity.
        """

    @abstractmethod
    def composition(self, sigma: float, *, remove: bool) -> Composition:
        """The composed losses of (P, Q) (remove) or (Q, P) (add)."""

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ(ε) of the composed losses in both directions, at most that without sampling."""
        most = gaussian.delta(epsilon, self.unsampled / sigma)
        found = np.minimum(self.composition(sigma, remove=True).delta(epsilon), most)
        if self.symmetric:
            return found, found
        return found, np.minimum(self.composition(sigma, remove=False).delta(epsilon), most)

    def epsilon(self, sigma: float, delta: float) -> float:
        """The larger ε(δ) of the two directions, at most that without sampling."""
        most = gaussian.epsilon(delta, self.unsampled / sigma)
        found = self.composition(sigma, remove=True).epsilon(delta)
        if self.symmetric or found >= most:
            return min(found, most)
        return min(max(found, self.composition(sigma, remove=False).epsilon(delta)), most)

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """Remarks on what was rounded, and on whether truncation costs privacy."""
        return (GRID_NOTE, *_far_tail(delta), *_cost_of_truncation(self.displaced, delta))


def _far_tail(delta: float) -> tuple[str, ...]:
    if delta > _RESOLVED:
        return ()
    return (
        f"δ is below {_RESOLVED:g}, where the cut normal tails matter: this is an upper bound, at "
        "most that without sampling",
    )


def _cost_of_truncation(displaced: float, delta: float) -> tuple[str, ...]:
    if displaced <= delta:
        return ()
    return (
        f"truncation costs privacy: on average an example displaces another {displaced:.3g} times "
        "in a run, at twice the sensitivity; a larger max_batch_size makes this rarer",
    )


@dataclasses.dataclass(frozen=True)
class SubsampledGaussianCurve(ComposedCurve):
    """``steps`` Gaussians of the given sensitivity, each subsampled with ``probability``."""

    probability: float
    steps: int
    sensitivity: float

    @property
    def unsampled(self) -> float:
        """√n times the sensitivity of a step."""
        return math.sqrt(self.steps) * self.sensitivity

    def composition(self, sigma: float, *, remove: bool) -> Composition:
        """n times the losses of one subsampled Gaussian."""
        single = subsampled_gaussian(
            probability=self.probability,
            sigma=sigma / self.sensitivity,
            count=self.steps,
            remove=remove,
        )
        return Composition(single, self.steps)


@dataclasses.dataclass(frozen=True)
class CasesCurve(ComposedCurve):
    """``steps`` steps of a (truncated) Poisson draw, whose case is public (``truncated_step``)."""

    probability: float
    branches: Branches
    steps: int
    sensitivity: float
    adjacency: Adjacency

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """True if no side is empty: replacing x by x' is the same as replacing x' by x."""
        return not self.adjacency.one_side_empty

    @property
    def unsampled(self) -> float:
        """√n times the largest distance between gradients of a step, which ``full_pair`` says."""
        cases = self.branches
        cut = max(cases.full, cases.either) > 0.0
        match self.adjacency:
            case Adjacency.ZERO_OUT:
                apart = 1.0
            case Adjacency.ADD_REMOVE:
                apart = 2.0 if cut else 1.0
            case Adjacency.REPLACE_ONE:
                apart = 2.0
            case _:
                assert_never(self.adjacency)
        return math.sqrt(self.steps) * self.sensitivity * apart

    @property
    def displaced(self) -> float:
        """Expected number of times that an example displaces another in a run (an upper bound)."""
        cases = self.branches
        return self.steps * (cases.full * cases.kept + cases.either * self.probability)

    def composition(self, sigma: float, *, remove: bool) -> Composition:
        """n times the losses of one step, whose case is public."""
        p, cases, scaled = self.probability, self.branches, sigma / self.sensitivity
        possible = [
            (cases.open, open_pair(self.adjacency, p, scaled)),
            (cases.full, full_pair(self.adjacency, cases.kept, scaled)),
            # In this pair either of the others occurs with lengths below the greatest, q ≤ p.
            (cases.either, full_pair(self.adjacency, p, scaled)),
        ]
        taken = [(weight, pair) for weight, pair in possible if weight > NEGLIGIBLE]
        spreads = [(weight, pair.spread(remove=remove)) for weight, pair in taken]
        h = public_spread(spreads).spacing(self.steps)
        mixed = public_mixture(
            [(weight, pair.discretized(spacing=h, remove=remove)) for weight, pair in taken]
        )
        left_out = sum(weight for weight, _ in possible if weight <= NEGLIGIBLE)
        mixed = dataclasses.replace(mixed, infinity=mixed.infinity + left_out)
        return Composition(mixed, self.steps)


@dataclasses.dataclass(frozen=True)
class AverageCurve(Curve):
    """A public coin, the same in both worlds, is tossed once a run: δ is the mean of the curves'.

    ``parts`` are probabilities (rounded up) and curves.
    """

    parts: tuple[tuple[float, ComposedCurve], ...]

    @property
    def displaced(self) -> float:
        """Expected number of times that an example displaces another in a run."""
        return sum(weight * curve.displaced for weight, curve in self.parts)

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """The weighted means."""
        remove, add = np.zeros_like(epsilon), np.zeros_like(epsilon)
        for weight, curve in self.parts:
            found = curve.delta(sigma, epsilon)
            remove, add = remove + weight * found[0], add + weight * found[1]
        return np.minimum(remove, 1.0), np.minimum(add, 1.0)

    def epsilon(self, sigma: float, delta: float) -> float:
        """The least ε at which neither mean is above δ, to a relative 1e-6, rounded up."""
        if len(self.parts) == 1 and self.parts[0][0] <= 1.0:
            return self.parts[0][1].epsilon(sigma, delta)
        most = max(curve.unsampled for _, curve in self.parts) / sigma
        found = max(self._epsilon(sigma, delta, remove=remove) for remove in self._directions)
        return min(found, gaussian.epsilon(delta, most))

    @property
    def _directions(self) -> tuple[bool, ...]:
        return (True,) if all(curve.symmetric for _, curve in self.parts) else (True, False)

    def _epsilon(self, sigma: float, delta: float, *, remove: bool) -> float:
        # Curves of a vanishing share count in full: a thousandth of δ at most in all.
        charged, composed, parts = 0.0, [], sorted(self.parts, key=lambda part: part[0])
        for weight, curve in parts:
            if charged + weight <= 1e-3 * delta:
                charged += weight
            else:
                composed.append((weight, curve.composition(sigma, remove=remove)))

        def totals(epsilon: Array) -> Array:
            found = np.full(epsilon.shape, charged)
            for weight, each in composed:
                found = found + weight * each.delta(epsilon)
            return found

        if totals(np.array([math.inf]))[0] >= delta:
            return math.inf
        likely = composed[-1][1].epsilon(delta)
        return _crossing(totals, delta, likely if 0.0 < likely < math.inf else 1.0)

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """Remarks on what was rounded, and on whether truncation costs privacy."""
        return (GRID_NOTE, *_cost_of_truncation(self.displaced, delta))


def _crossing(delta_of: Callable[[Array], Array], delta: float, likely: float) -> float:
    """Least ε ≥ 0 with δ(ε) ≤ δ, rounded up; δ(ε) falls, is asked for many ε at once, and ends ≤ δ.

    Near the answer δ(ε) is read from a chord: it is convex in e^ε, hence below.
    """
    grid = likely * np.linspace(0.9, 1.3, _POINTS)
    values = delta_of(grid)
    if values[0] <= delta:
        grid = grid[0] * np.linspace(0.0, 1.0, _POINTS)
        values = delta_of(grid)
        if values[0] <= delta:
            return 0.0
    while values[-1] > delta:
        grid = grid[-1] * np.geomspace(1.0, 4.0, _POINTS)
        values = delta_of(grid)
    for _ in range(2):
        cell = int(np.flatnonzero(values > delta)[-1])
        grid = np.linspace(grid[cell], grid[cell + 1], _POINTS)
        values = delta_of(grid)
    cell = int(np.flatnonzero(values > delta)[-1])
    part = (values[cell] - delta) / (values[cell] - values[cell + 1])
    return float(grid[cell] + math.log1p(part * math.expm1(grid[cell + 1] - grid[cell])))
