"""Weighted samples whose mean is δ(ε) of b-min-sep sampling, none larger than a proven bound."""

from __future__ import annotations

import math

import numpy as np
from scipy.signal import lfilter

from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.min_sep import engine_compiled as compiled
from dptrain.accounting.min_sep.linear_loss import best_linear_loss
from dptrain.accounting.min_sep.losses import log_ratio, sample_losses
from dptrain.accounting.min_sep.moments import affordable
from dptrain.accounting.min_sep.moments.tilted import ORDERS, TiltedPatterns, engine, states
from dptrain.accounting.min_sep.renyi import MinSepRenyiCurve
from dptrain.accounting.min_sep.replicas import ROUNDING, Replicas, largest_order
from dptrain.accounting.simulation.weighted.terms import WeightedTerms, below_linear_loss
from dptrain.core import Array

# Losses err by less than 1e-10 (``min_sep_loss``); the terms are evaluated on the safe side of it.
_SLACK = 1e-9
_CHUNK_BYTES = 64 << 20
# A larger order shrinks the terms a little further and makes each draw dearer by more: states of
# ``Replicas``, and messages of ``TiltedPatterns`` (it takes some 8 b steps until they settle).
_MOST_STATES = 16_000
_MOST_MESSAGES = 2 * 10**7


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
    rounded up by as much, which also covers the rounding of the probabilities drawn with. Where
    they are drawn by compiled code, it is by the bound on its own rounding, and what its patterns
    are off in total variation is added to every term.
    """

    def __init__(self, curve: MinSepRenyiCurve, sigma: float) -> None:
        self._curve, self._law, self._sigma = curve, curve.law, sigma
        # Of A, and of the probabilities drawn with: some 1e-14 a step.
        self._pad = 2 * max(ROUNDING, 3e-14 * self._law.steps)
        self._engine = engine(self._law)
        self._patterns: dict[int, TiltedPatterns] = {}
        self._replicas: dict[int, Replicas] = {}
        self.lanes = max(64, min(4096, _CHUNK_BYTES // (8 * self._law.steps)))
        numpy_largest = largest_order(self._law, sigma)
        self._orders = [
            order
            for order in range(2, affordable(self._law, sigma).largest + 1)
            if self._pays(order, numpy_largest)
        ]

    def _pays(self, order: int, numpy_largest: int) -> bool:
        b = self._law.min_sep
        if self._engine == "numba" and order in ORDERS:
            messages = states(self._law, order) * min(8 * b, self._law.steps)
            return order == 2 or messages <= _MOST_MESSAGES
        few = order == 2 or math.comb(b + order - 1, order) <= _MOST_STATES
        return few and order <= numpy_largest

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
        log_moment = self._curve.log_moment(self._sigma, order)
        if self._engine == "numba" and order in ORDERS:
            return self._compiled(order, epsilon, log_moment, min(ranges))
        if order not in self._replicas:
            self._replicas = {order: Replicas(self._law, self._sigma, order)}
        replicas = self._replicas[order]

        def draw(rng: np.random.Generator, size: int) -> Array:
            shift = lfilter(self._law.coefficients, [1.0], replicas.draw(rng, size), axis=0)
            outputs = shift + self._sigma * rng.standard_normal((self._law.steps, size))
            loss = log_ratio(self._law, self._sigma, outputs)
            return _terms(loss, order, epsilon, log_moment + self._pad, _SLACK)

        ceiling = math.exp(min(ranges) + self._pad + 2 * order * _SLACK)
        return WeightedTerms(ceiling, self.lanes, draw)

    def _compiled(
        self, order: int, epsilon: float, log_moment: float, log_range: float
    ) -> WeightedTerms:
        if order not in self._patterns:
            try:
                self._patterns = {order: TiltedPatterns(self._law, self._sigma, order)}
            except MemoryError:  # messages that settle late: without this order, then
                self._orders.remove(order)
                return self.remove(epsilon)
        patterns = self._patterns[order]
        slack = max(_SLACK, patterns.rounding)
        largest = math.exp(log_range + self._pad + 2 * order * slack)
        ceiling = largest * (1.0 + patterns.variation)

        def draw(rng: np.random.Generator, size: int) -> Array:
            losses = patterns.losses(rng, size)
            terms = _terms(losses, order, epsilon, log_moment + self._pad, slack)
            terms += largest * patterns.variation
            return np.where(np.isnan(terms), ceiling, terms)  # spoiled

        return WeightedTerms(ceiling, compiled.LANES, draw)

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


def _terms(loss: Array, order: int, epsilon: float, log_moment: float, slack: float) -> Array:
    """A e^{-(α-1)L} (1 - e^{ε-L})_+ of losses known within ``slack``, rounded up."""
    weight = np.exp(log_moment + order * slack - (order - 1) * np.maximum(loss, epsilon - 1.0))
    return np.asarray(weight * hockey_stick(loss, epsilon - slack))
