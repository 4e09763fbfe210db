"""Frequency of full batches in truncated b-min-sep sampling, and their cost at most."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.stats import binom

from dptrain.accounting.min_sep.linear_loss import availability
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.core import Array
from dptrain.sampling import MinSep

# Binomial tails are computed to a relative 1e-12 or so, sums of them to less.
_SLACK = 1e-9
# Tails below this lose digits to underflow.
_UNDERFLOW = 1e-290


@dataclasses.dataclass(frozen=True)
class FullBatches:
    """Bounds on what happens at *full* steps: those at which B or more other examples are drawn.

    At all other steps an example that is drawn comes on top of the others, as without a cap. The
    numbers r_t of others drawn are public and independent of the example's own draws, so every
    expectation follows from the law of one r_t, Bin(N-1, Pr[x_t = 1]), although those of different
    steps depend on each other (docs/theory/min-sep.md#thm-min-sep-cut;
    ``test_bounds_are_above_brute_force_over_everybodys_draws``).

    Attributes:
        steps: expected number of full steps, rounded up.
        drawn: expected number of full steps at which the example is drawn, rounded up.
        odds: ρ = p (1-p)^{-min(b, n)}, at most how many times as likely a pattern is as the one
            without one of its participations, rounded up; ∞ for p = 1.
    """

    steps: float
    drawn: float
    odds: float

    @classmethod
    def of(cls, scheme: MinSep) -> FullBatches:
        """The bounds of a scheme with a largest batch; 0 where it holds all N examples.

        Raises:
            ValueError: if the scheme cuts no batch.
        """
        if scheme.max_batch_size is None:
            raise ValueError("scheme: max_batch_size=None, so that no batch is ever full")
        p, b, n = scheme.probability, min(scheme.min_sep, scheme.steps), scheme.steps
        odds = math.inf
        if p < 1.0:
            exponent = math.log(p) - b * math.log1p(-p)
            odds = math.exp(exponent) * (1.0 + _SLACK) if exponent < 700.0 else math.inf
        if scheme.max_batch_size >= scheme.dataset_size:
            return cls(0.0, 0.0, odds)
        taking, times = np.unique(_taking(scheme), return_counts=True)
        tail = binom.sf(scheme.max_batch_size - 1, scheme.dataset_size - 1, taking)
        tail = np.minimum(tail * (1.0 + _SLACK) + _UNDERFLOW, 1.0)
        pad = 1.0 + 4.0 * n * np.finfo(float).eps
        return cls(float(tail @ times) * pad, float(tail @ (times * taking)) * pad, odds)

    def worst_loss(self, law: MinSepLaw, epsilon: float) -> float:
        """The larger loss of both directions at any σ, for whoever chooses a cap."""
        at, certain = np.array([epsilon]), np.ones(1)
        remove = self.loss_of_removing(law, math.inf, at, certain)
        return float(np.maximum(remove, self.loss_of_adding(law, at, certain))[0])

    def loss_of_removing(
        self, law: MinSepLaw, log_second_moment: float, epsilon: Array, unamplified: Array
    ) -> Array:
        """Upper bound on δ(ε) of (P, Q) minus that of whole batches, rounded up.

        Args:
            law: of one example's draws.
            log_second_moment: log A_2, or ∞ if it is not known.
            epsilon: ε ≥ 0, shape (k,).
            unamplified: δ(ε) if all coins were published, shape (k,).
        """
        present = law.participation
        crossing = np.ones(epsilon.shape)
        if present < 1.0 and math.isfinite(log_second_moment):
            exponent = log_second_moment - epsilon - 2.0 * math.log1p(-present)
            crossing = np.minimum(np.exp(np.minimum(exponent, 0.0)) * (1.0 + _SLACK), 1.0)
        return np.asarray(self.drawn * (unamplified + crossing) * (1.0 + 1e-14))

    def loss_of_adding(self, law: MinSepLaw, epsilon: Array, unamplified: Array) -> Array:
        """The same of (Q, P); from -log Pr[x = 0] on no full step matters if it is not drawn."""
        share = np.ones(epsilon.shape)
        if math.isfinite(self.odds):
            grows = np.log1p(np.maximum(unamplified, _UNDERFLOW))
            share = np.minimum(math.log1p(self.odds) / grows * (1.0 + 1e-12), 1.0)
        avoided = np.where(epsilon < law.add_limit, self.steps * share, 0.0)
        return np.asarray((avoided + self.drawn) * unamplified * (1.0 + 1e-14))


def _taking(scheme: MinSep) -> Array:
    """Pr[x_t = 1] of every step, rounded up, shape (steps,)."""
    p, b, n = scheme.probability, scheme.min_sep, scheme.steps
    if scheme.warm_start:
        return np.full(n, min(p / (1.0 + (b - 1) * p) * (1.0 + 1e-14), 1.0))
    law = MinSepLaw(coefficients=np.ones(1), probability=p, min_sep=b, steps=n, warm_start=False)
    # Sums and products of non-negative numbers: n roundings of a few units each.
    pad = 1.0 + 8.0 * (n + b) * np.finfo(float).eps
    return np.minimum(p * availability(law, p) * pad, 1.0)
