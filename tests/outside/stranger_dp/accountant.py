"""An accountant for ``Cohort``: one coin for the whole run amplifies one Gaussian mechanism."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr
from stranger_dp.cohort import Cohort

from dptrain import Kind, MatrixMechanism, register_accountant
from dptrain.accounting import Curve, DeterministicAccountant

_UP = 1e-9  # relative; what rounding and the root finder may be off by


def gaussian_delta(log_alpha: float, mu: float) -> float:
    """H_α(N(μ, 1) ‖ N(0, 1)) = Φ(μ/2 - log α/μ) - α Φ(-μ/2 - log α/μ) for any α > 0."""
    hit = float(np.exp(log_ndtr(mu / 2 - log_alpha / mu)))
    false = float(np.exp(log_alpha + log_ndtr(-mu / 2 - log_alpha / mu)))
    return max(0.0, hit - false)


@dataclasses.dataclass(frozen=True)
class CohortCurve(Curve):
    """δ(ε) of a Gaussian mechanism of shift ``sensitivity``/σ that one coin p switches on."""

    probability: float
    sensitivity: float

    def both(self, sigma: float, epsilon: float) -> tuple[float, float]:
        """δ of removing and of adding, by the identities of ``CohortAccountant``."""
        p, mu = self.probability, self.sensitivity / sigma
        remove = p * gaussian_delta(math.log1p(math.expm1(epsilon) / p), mu)
        rest = 1.0 - math.exp(epsilon) * (1.0 - p)
        add = 0.0
        if rest > 0.0:
            # N(0, 1) against N(μ, 1) is N(μ, 1) against N(0, 1), mirrored.
            add = rest * gaussian_delta(epsilon + math.log(p / rest), mu)
        return remove, add

    def delta(self, sigma: float, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both directions over a grid."""
        found = np.array([self.both(sigma, float(each)) for each in epsilon]).reshape(-1, 2)
        return found[:, 0] * (1 + _UP), found[:, 1] * (1 + _UP)

    def epsilon(self, sigma: float, delta: float) -> float:
        """Where the larger of both falls to δ."""

        def excess(epsilon: float) -> float:
            return max(self.both(sigma, epsilon)) * (1 + _UP) - delta

        if excess(0.0) <= 0.0:
            return 0.0
        top = 1.0
        while excess(top) > 0.0:
            top *= 2.0
        return float(brentq(excess, 0.0, top, xtol=1e-14, rtol=1e-12)) * (1 + _UP)


class CohortAccountant(DeterministicAccountant):
    """(ε, δ) of ``Cohort`` with any strategy, under zero-out; exact for C ≥ 0.

    Let P be the run with an example and Q the run where it is blank. Given everybody's coins, what
    the example adds is C v with ‖v_t‖ ≤ 1 if it is in the cohort, and nothing if not; whatever
    earlier releases made of v, the run is then as private as one Gaussian of shift μ = sens(C)/σ
    (Denisov et al. 2022, arXiv 2202.08312). So P = (1-p) Q + p P₁ with
    H_α(P₁ ‖ Q) and H_α(Q ‖ P₁) at most h(α) = H_α(N(μ, 1) ‖ N(0, 1)), for every α > 0. From

        P - e^ε Q = p (P₁ - α Q),          α = 1 + (e^ε - 1)/p,
        Q - e^ε P = a (Q - (e^ε p/a) P₁),  a = 1 - e^ε (1 - p),

    δ is p h(α) in one direction and a h(e^ε p/a), or 0 for a ≤ 0, in the other (Balle, Barthe &
    Gaboardi 2018, arXiv 1807.01647, Theorem 2). An example that adds 1 in every step attains it
    where C ≥ 0.
    """

    name = "stranger-cohort"
    kind = Kind.UPPER_BOUND

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Nothing but ``Cohort`` is covered."""
        return None if isinstance(mechanism.scheme, Cohort) else "it needs the scheme Cohort"

    def curve(self, mechanism: MatrixMechanism) -> CohortCurve:
        """The curve of p and the sensitivity to n participations."""
        scheme = mechanism.scheme
        assert isinstance(scheme, Cohort)
        sensitivity = mechanism.strategy.sensitivity(
            steps=scheme.steps, max_participations=scheme.steps, min_sep=1
        )
        return CohortCurve(scheme.probability, sensitivity)


register_accountant(CohortAccountant())
