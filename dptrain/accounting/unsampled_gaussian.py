"""The Gaussian bound that needs no randomness of the sampling."""

from __future__ import annotations

import dataclasses

import numpy as np

from dptrain.accounting import gaussian
from dptrain.accounting.deterministic import Array, Curve, DeterministicAccountant
from dptrain.guarantee import Kind
from dptrain.mechanism import MatrixMechanism


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


class UnsampledGaussian(DeterministicAccountant):
    """Gaussian mechanism with the sensitivity of C under the scheme's participation bound.

    Whatever batches a scheme draws, an example takes part at most ``max_participations`` times, at
    least ``min_sep`` steps apart; given the batches, the run is a Gaussian mechanism of
    sensitivity at most sens(C; m, b), and δ is jointly convex in the two distributions
    (Dong, Roth & Su 2022; Choquette-Choo et al. 2023 for the sensitivity). So the bound holds for
    every scheme; it ignores amplification by sampling and is offered by name.
    """

    name = "gaussian"
    kind = Kind.UPPER_BOUND

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Nothing is refused."""
        return None

    def curve(self, mechanism: MatrixMechanism) -> GaussianCurve:
        """The curve of sens(C; m, b)."""
        scheme = mechanism.scheme
        return GaussianCurve(
            mechanism.strategy.sensitivity(
                steps=scheme.steps,
                max_participations=scheme.max_participations,
                min_sep=scheme.min_sep,
            )
        )
