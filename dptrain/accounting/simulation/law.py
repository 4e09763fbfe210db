"""The basis of an accountant that simulates: a law, its bounds without samples, and its terms."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dptrain.accounting.base.curve import LARGEST_SIGMA, Curve, GaussianCurve
from dptrain.accounting.base.statement import SMALLEST_SIGMA
from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.losses.search import least_scale
from dptrain.accounting.simulation.simulation import DIRECTIONS, Direction, Simulation
from dptrain.accounting.simulation.terms import Both, WeightedTerms
from dptrain.core import Array

TermsAtEpsilon = Callable[[float], Both]
"""Terms of both directions at an ε."""


class SimulatedLaw(ABC):
    """The pair of a mechanism at an open σ: how its losses are drawn, and what bounds its δ."""

    @property
    def losses(self) -> Simulation:
        """The pair's losses, drawn without weights, which quick estimates rest on.

        Raises:
            NotImplementedError: if the law has none; b-min-sep sampling has ``TiltedEstimate``.
        """
        raise NotImplementedError(f"{type(self).__name__} draws no losses without weights")

    @property
    @abstractmethod
    def curve(self) -> Curve:
        """δ and ε that need no samples."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value of everything that the pair depends on, except σ."""

    @abstractmethod
    def terms(self, sigma: float) -> TermsAtEpsilon:
        """Both directions' terms at an ε, for one σ."""

    @property
    def most_samples(self) -> int:
        """Samples a direction that are worth their time: by default all that are asked for."""
        return sys.maxsize

    def least_sigma(self, epsilon: float, delta: float, *, progress: bool) -> float | None:
        """The least σ at which the bounds show (ε, δ), to a relative 1e-3; ``None`` if none.

        It may leave out bounds that take long: see ``better_sigma``.
        """
        return least_shown(self.curve, epsilon, delta, progress=progress)

    def better_sigma(
        self, sigma: float, epsilon: float, delta: float, *, progress: bool
    ) -> float | None:
        """A σ of at most this one that bounds show which ``least_sigma`` left out, if any."""
        return None


class PlainLaw(SimulatedLaw):
    """A law whose samples have no weights: terms (1 - e^{ε-L})_+, whose ceiling is 1.

    So many samples are needed as 1/δ says, and one sample of the losses serves every ε.

    Args:
        losses: what draws them.
    """

    def __init__(self, losses: Simulation) -> None:
        self._losses = losses

    @property
    def losses(self) -> Simulation:
        """The pair's losses."""
        return self._losses

    @property
    def curve(self) -> Curve:
        """The curve of the unamplified Gaussian mechanism."""
        return GaussianCurve(self._losses.sensitivity)

    def to_dict(self) -> dict[str, Any]:
        """The value of the losses."""
        return self.losses.to_dict()

    def terms(self, sigma: float) -> TermsAtEpsilon:
        """Hockey-stick terms of the losses."""
        losses = self.losses

        def one(direction: Direction, epsilon: float) -> WeightedTerms:
            def draw(rng: np.random.Generator, size: int) -> Array:
                return hockey_stick(losses.draw([sigma], direction, rng, size)[0], epsilon)

            return WeightedTerms(1.0, losses.lanes, draw)

        return lambda epsilon: {side: one(side, epsilon - losses.slack) for side in DIRECTIONS}


def least_shown(
    curve: Curve, epsilon: float, delta: float, *, progress: bool, start: float = 1.0
) -> float | None:
    """The least σ at which a curve shows (ε, δ), to a relative 1e-3; ``None`` if none."""
    with tqdm(
        desc="deterministic bounds", unit="σ", disable=not progress, delay=2.0, leave=False
    ) as bar:

        def excess(sigma: float) -> float:
            bar.update()
            return math.log(max(curve.epsilon(sigma, delta), 1e-300) / epsilon)

        return least_scale(
            excess,
            start=start,
            relative_tolerance=1e-3,
            smallest=SMALLEST_SIGMA,
            largest=LARGEST_SIGMA,
        )
