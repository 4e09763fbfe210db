"""Weighted samples whose mean is δ(ε) of b-min-sep sampling, none larger than a proven bound."""

from __future__ import annotations

import math

import numpy as np
from scipy.signal import lfilter

from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.min_sep.linear_loss import best_linear_loss
from dptrain.accounting.min_sep.losses import log_ratio, sample_losses
from dptrain.accounting.min_sep.renyi import MinSepRenyiCurve
from dptrain.accounting.min_sep.replicas import ROUNDING, Replicas, largest_order
from dptrain.accounting.simulation.weighted.terms import WeightedTerms, below_linear_loss
from dptrain.core import Array

# Losses err by less than 1e-10 (``min_sep_loss``); the terms are evaluated on the safe side of it.
_SLACK = 1e-9
_CHUNK_BYTES = 64 << 20
# A larger order shrinks the terms a little further and makes each draw dearer by more.
_MOST_STATES = 16_000


class TiltedMinSep:
    """Importance sampling of both directions of a b-min-sep law at one σ.

    *Remove*: y is drawn from R = (P/Q)^α Q/A, A = E_Q[(P/Q)^α], a mixture of Gaussians
    (``Replicas``). δ is the mean of terms that do not exceed the bound on δ that the Rényi
    divergence of order α gives, so that sampling refines that bound
    (docs/theory/certification.md#thm-weighted-remove;
    ``test_terms_average_to_a_known_delta_and_stay_below_their_ceiling``).

    *Add*: the loss is below a Gaussian variable (``LinearLoss``), along whose direction alone y is
    drawn otherwise (docs/theory/certification.md#thm-weighted-add;
    ``test_deep_delta_is_seen_by_a_few_samples``).

    Terms in [0, M] need about M times the samples that terms in [0, 1] do, and nothing is assumed
    about their variance or how the tilt fits (docs/theory/certification.md#thm-weighted-verdict).

    Rounding: losses are taken 1e-9 to the side that makes terms larger, A and the ceilings are
    rounded up by as much, which also covers the rounding of the probabilities drawn with.
    """

    def __init__(self, curve: MinSepRenyiCurve, sigma: float) -> None:
        self._curve, self._law, self._sigma = curve, curve.law, sigma
        self._replicas: dict[int, Replicas] = {}
        self.lanes = max(64, min(4096, _CHUNK_BYTES // (8 * self._law.steps)))
        self._orders = [
            order
            for order in range(2, largest_order(self._law, sigma) + 1)
            if math.comb(self._law.min_sep + order - 1, order) <= _MOST_STATES or order == 2
        ]

    def _log_range(self, order: int, epsilon: float) -> float:
        conversion = order * math.log1p(-1.0 / order) - math.log(order - 1.0)
        return self._curve.log_moment(self._sigma, order) - (order - 1) * epsilon + conversion

    def _plain(self, epsilon: float) -> WeightedTerms:
        """Terms in [0, 1] of the remove direction, drawn from P itself."""

        def draw(rng: np.random.Generator, size: int) -> Array:
            losses = sample_losses(self._law, [self._sigma], "remove", rng, size)
            return hockey_stick(losses[0], epsilon - _SLACK)

        return WeightedTerms(1.0, self.lanes, draw)

    def remove(self, epsilon: float) -> WeightedTerms:
        """Terms of the remove direction at ε ≥ 0: plain ones if no order is affordable."""
        if not self._orders:
            return self._plain(epsilon)
        ranges = [self._log_range(order, epsilon) for order in self._orders]
        if min(ranges) > 0.0:
            return self._plain(epsilon)
        order = self._orders[int(np.argmin(ranges))]
        if order not in self._replicas:
            self._replicas = {order: Replicas(self._law, self._sigma, order)}
        replicas = self._replicas[order]
        log_moment = self._curve.log_moment(self._sigma, order)
        pad = 2 * ROUNDING + order * _SLACK

        def draw(rng: np.random.Generator, size: int) -> Array:
            shift = lfilter(self._law.coefficients, [1.0], replicas.draw(rng, size), axis=0)
            outputs = shift + self._sigma * rng.standard_normal((self._law.steps, size))
            loss = log_ratio(self._law, self._sigma, outputs)
            weight = np.exp(log_moment + pad - (order - 1) * np.maximum(loss, epsilon - 1.0))
            return np.asarray(weight * hockey_stick(loss, epsilon - _SLACK))

        ceiling = math.exp(min(ranges) + pad + order * _SLACK)
        return WeightedTerms(ceiling, self.lanes, draw)

    def add(self, epsilon: float) -> WeightedTerms:
        """Terms of the add direction at ε ≥ 0; none where no loss is as large."""
        if epsilon - _SLACK >= self._law.add_limit:
            return WeightedTerms(0.0, self.lanes, lambda _, size: np.zeros(size))
        linear = best_linear_loss(self._law, self._sigma, epsilon)

        def loss(noise: Array) -> Array:
            return -log_ratio(self._law, self._sigma, self._sigma * noise)

        return below_linear_loss(
            loss,
            epsilon,
            nu=linear.nu,
            direction=linear.direction,
            log_mean=float(linear.log_delta(np.array([epsilon]))[0]) + 2 * ROUNDING,
            slack=_SLACK,
            lanes=self.lanes,
        )

    def both(self, epsilon: float) -> dict[str, WeightedTerms]:
        """Terms of either direction at ε ≥ 0, by its name."""
        return {"remove": self.remove(epsilon), "add": self.add(epsilon)}
