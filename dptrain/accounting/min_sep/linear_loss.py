"""A Gaussian variable above the add-direction loss of b-min-sep sampling."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np
from scipy.signal import lfilter, oaconvolve

from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.renyi.curve import log_delta_gaussian_loss
from dptrain.core import Array, checks

# ψ's log-odds relative to those of the true law: where the loss is large few have taken part.
_LEAST_ODDS, _MOST_ODDS, _CHOICES = -3.0, 0.1, 63


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
    # free_t = released_t + (1-p) free_{t-1} + p free_{t-b}: all terms are non-negative. Of b steps
    # in a row the last term is known before.
    free, state = np.zeros(b + max(n, b)), np.zeros(1)
    for start in range(0, n, b):
        block = released[start : min(start + b, n)]
        given = block + probability * free[start : start + block.size]
        free[b + start : b + start + block.size], state = lfilter(
            [1.0], [1.0, probability - 1.0], given, zi=state
        )
    return free[b : b + n]


def linear_loss(law: MinSepLaw, sigma: float, probability: float) -> LinearLoss:
    """The bound for ψ with this probability in (0, 1]; p = 1 leaves no choice but 1."""
    p, own = law.probability, probability
    checks.invariant(0.0 < own <= 1.0, "the probability of a linear loss lies in (0, 1]")
    free = availability(law, own)
    taking = own * free
    divergence = own * math.log(own / p)
    if own < 1.0:
        checks.invariant(p < 1.0, "the probability left of a waiting example is below 1")
        divergence += (1.0 - own) * (math.log1p(-own) - math.log1p(-p))
    nu = float(taking @ law.squared_norms) / (2.0 * sigma**2) + float(free.sum()) * divergence
    direction = _through(law, taking) / sigma
    return LinearLoss(nu, direction)


def _through(law: MinSepLaw, pattern: Array) -> Array:
    """C times a vector; by Fourier transforms of pieces where there are many bands."""
    convolve = np.convolve if law.bands <= 64 else oaconvolve
    return np.asarray(convolve(pattern, law.coefficients)[: law.steps])


class _Family(NamedTuple):
    """ψ of several probabilities: ν = squares/σ² + divergence and ξ = spread/σ."""

    probability: Array
    squares: Array
    divergence: Array
    spread: Array


@functools.lru_cache(maxsize=8)
def _family(
    coefficients: bytes, probability: float, min_sep: int, steps: int, warm_start: bool
) -> _Family:
    law = MinSepLaw(
        coefficients=np.frombuffer(coefficients), probability=probability, min_sep=min_sep,
        steps=steps, warm_start=warm_start,
    )  # fmt: skip
    center = math.log(probability) - math.log1p(-probability)
    odds = center + np.linspace(_LEAST_ODDS, _MOST_ODDS, _CHOICES)
    chosen = 1.0 / (1.0 + np.exp(-odds))
    once = [linear_loss(law, 1.0, each) for each in chosen.tolist()]
    own = np.array(
        [each * float(availability(law, each) @ law.squared_norms) / 2.0 for each in chosen]
    )
    return _Family(
        probability=chosen,
        squares=own,
        divergence=np.array([found.nu for found in once]) - own,
        spread=np.array([found.xi for found in once]),
    )


def best_linear_loss(law: MinSepLaw, sigma: float, epsilon: float) -> LinearLoss:
    """The bound with the least δ at ε of several ψ (any is valid)."""
    if law.probability == 1.0:
        return linear_loss(law, sigma, 1.0)
    known = _family(
        law.coefficients.tobytes(), law.probability, law.min_sep, law.steps, law.warm_start
    )
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # σ² may be no number > 0
        nu, xi = known.squares / sigma**2 + known.divergence, known.spread / sigma
        values = log_delta_gaussian_loss(nu, xi, epsilon)
    return linear_loss(law, sigma, float(known.probability[int(np.argmin(values))]))
