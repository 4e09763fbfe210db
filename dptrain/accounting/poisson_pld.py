"""Poisson sampling with independent noise: privacy loss distribution of the subsampled Gaussian."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod

from dptrain.accounting.accountant import varying_noise
from dptrain.accounting.deterministic import Array, Curve, DeterministicAccountant
from dptrain.accounting.pld import Composition
from dptrain.accounting.subsampled_gaussian import subsampled_gaussian
from dptrain.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep, Poisson


class ComposedCurve(Curve):
    """Independent copies of one step's pair of laws, composed numerically."""

    @abstractmethod
    def _composition(self, sigma: float, *, remove: bool) -> Composition:
        """The composed losses of (P, Q) (remove) or (Q, P) (add)."""

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ(ε) of the composed losses in both directions."""
        return (
            self._composition(sigma, remove=True).delta(epsilon),
            self._composition(sigma, remove=False).delta(epsilon),
        )

    def epsilon(self, sigma: float, delta: float) -> float:
        """The larger ε(δ) of the two directions."""
        return max(
            self._composition(sigma, remove=True).epsilon(delta),
            self._composition(sigma, remove=False).epsilon(delta),
        )

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """What was rounded."""
        return (
            "privacy losses were rounded pessimistically to a grid (connect the dots), "
            "normal tails beyond 13.5 standard deviations count as δ",
        )


@dataclasses.dataclass(frozen=True)
class SubsampledGaussianCurve(ComposedCurve):
    """``steps`` Gaussians of the given sensitivity, each subsampled with ``probability``."""

    probability: float
    steps: int
    sensitivity: float

    def _composition(self, sigma: float, *, remove: bool) -> Composition:
        single = subsampled_gaussian(
            probability=self.probability,
            sigma=sigma / self.sensitivity,
            count=self.steps,
            remove=remove,
        )
        return Composition(single, self.steps)


class PoissonPLD(DeterministicAccountant):
    """PLD of n Poisson-subsampled Gaussians, remove and add, for C = c·I.

    One step is dominated by ((1-p) N(0, σ²) + p N(c, σ²), N(0, σ²)) and its reverse, and the steps
    compose independently (Zhu, Dong & Wang 2022). ``MinSep`` with ``min_sep=1`` is the same law.
    """

    name = "poisson PLD"
    kind = Kind.EXACT

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuses other schemes, correlated noise and noise that varies from step to step."""
        scheme = mechanism.scheme
        if not (
            isinstance(scheme, Poisson) or (isinstance(scheme, MinSep) and scheme.min_sep == 1)
        ):
            return "it needs Poisson sampling (or MinSep with min_sep=1)"
        if mechanism.strategy.bands != 1:
            return (
                f"it needs independent noise (bands=1), the strategy has "
                f"bands={mechanism.strategy.bands}"
            )
        return varying_noise(mechanism)

    def curve(self, mechanism: MatrixMechanism) -> SubsampledGaussianCurve:
        """The curve; a diagonal C only scales the sensitivity."""
        scheme = mechanism.scheme
        assert isinstance(scheme, Poisson | MinSep)
        norms = mechanism.strategy.column_norms(scheme.steps)
        return SubsampledGaussianCurve(scheme.probability, scheme.steps, float(norms.max()))
