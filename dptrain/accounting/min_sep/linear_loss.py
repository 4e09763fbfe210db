"""A Gaussian variable above the add-direction loss of b-min-sep sampling."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.signal import lfilter

from dptrain.accounting.min_sep.law import MinSepLaw
from dptrain.accounting.renyi.curve import log_delta_gaussian_loss
from dptrain.core import Array


@dataclasses.dataclass(frozen=True)
class LinearLoss:
    """Y(y) = ν - <direction, y>/σ ≥ log Q/P(y) for every y: under Q it is N(ν, ξ²).

    By Jensen's inequality with b-min-sep sampling of another probability in place of the true one
    (docs/theory/min-sep.md#thm-min-sep-linear; ``test_linear_loss_is_never_below_the_loss``). With
    the true one it is the step behind Lemma 3.4 of Schuchardt & Kalinin 2026 (arXiv 2601.21636);
    fewer participations (what is seen where the loss is large) make it sharper.

    Attributes:
        nu: ν.
        direction: C E_ψ[x]/σ, shape (steps,).
    """

    nu: float
    direction: Array

    @property
    def xi(self) -> float:
        """ξ, the norm of the direction."""
        return float(np.linalg.norm(self.direction))

    def log_delta(self, epsilon: Array) -> Array:
        """log E_Q[(1 - e^{ε-Y})_+] ≥ log δ(ε) of (Q, P), rounded up."""
        return log_delta_gaussian_loss(self.nu, self.xi, epsilon)


def availability(law: MinSepLaw, probability: float) -> Array:
    """Pr[available before step t] if available examples take part with ``probability``."""
    b, n = law.min_sep, law.steps
    released = np.zeros(max(n, b))
    released[0] = 1.0
    if law.warm_start:
        released[0] = 1.0 / (1.0 + (b - 1) * law.probability)
        released[1:b] = law.probability * released[0]
    # free_t = released_t + (1-p) free_{t-1} + p free_{t-b}: all terms are non-negative.
    feedback = np.zeros(b + 1)
    feedback[0] = 1.0
    feedback[1] -= 1.0 - probability
    feedback[b] -= probability
    return np.asarray(lfilter([1.0], feedback, released[:n]))


def linear_loss(law: MinSepLaw, sigma: float, probability: float) -> LinearLoss:
    """The bound for ψ with this probability in (0, 1]; p = 1 leaves no choice but 1."""
    p, own = law.probability, probability
    assert 0.0 < own <= 1.0, own
    free = availability(law, own)
    taking = own * free
    divergence = own * math.log(own / p)
    if own < 1.0:
        assert p < 1.0
        divergence += (1.0 - own) * (math.log1p(-own) - math.log1p(-p))
    nu = float(taking @ law.squared_norms) / (2.0 * sigma**2) + float(free.sum()) * divergence
    direction = np.convolve(taking, law.coefficients)[: law.steps] / sigma
    return LinearLoss(nu, direction)


def best_linear_loss(law: MinSepLaw, sigma: float, epsilon: float) -> LinearLoss:
    """The bound with the least δ at ε over ψ's probability (any is valid)."""
    if law.probability == 1.0:
        return linear_loss(law, sigma, 1.0)

    def value(log_odds: float) -> float:
        found = linear_loss(law, sigma, 1.0 / (1.0 + math.exp(-log_odds)))
        return float(found.log_delta(np.array([epsilon]))[0])

    center = math.log(law.probability) - math.log1p(-law.probability)
    result = minimize_scalar(
        value, bounds=(center - 3.0, center + 0.1), method="bounded", options={"xatol": 1e-3}
    )
    return linear_loss(law, sigma, 1.0 / (1.0 + math.exp(-float(result.x))))
