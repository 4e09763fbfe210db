"""Weighted samples whose mean is δ(ε) of b-min-sep sampling, none larger than a proven bound."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Literal

import numpy as np

from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.min_sep import engine_compiled as compiled
from dptrain.accounting.min_sep import engine_torch as on_device
from dptrain.accounting.min_sep.curve import MinSepRenyiCurve
from dptrain.accounting.min_sep.linear_loss import best_linear_loss
from dptrain.accounting.min_sep.moments import (
    affordable,
    foreseen,
    rough_large_moments,
    settles,
)
from dptrain.accounting.min_sep.moments.settled import Settled, settle
from dptrain.accounting.min_sep.moments.settled_draws import SettledPatterns
from dptrain.accounting.min_sep.moments.tilted import TiltedPatterns, fits, states
from dptrain.accounting.min_sep.shifted_terms import Shift, best_shift, shifted_draws
from dptrain.accounting.renyi.chords import log_delta_from_renyi
from dptrain.accounting.simulation.terms import OnDemand, WeightedTerms, below_linear_loss
from dptrain.core import Array

Asked = Literal["auto", "cuda"]

# Losses err by less than this, or by the engine's bound where it is larger; the terms are evaluated
# on the safe side of it.
_SLACK = 1e-9
_ROUNDING = 1e-9  # of A and of the ceilings, at least (relatively)
_LANES = 1024  # samples a chunk of compiled draws
_VARIATION = 1e-5  # of the ceiling: more than compiled draws are off in total variation
# A larger order shrinks the terms and makes each draw dearer: messages of ``TiltedPatterns`` (it
# takes some 8 b steps until they settle), which from order 5 on take ten times as long.
_MOST_MESSAGES, _DEAR_MESSAGES = 10**8, 10**7
_DEARER = 6.0  # a sample of a few copies than one of shifted noise
# Times a typical δ, above which a linear bound is no guide to it, and the largest shift then.
_LOOSE, _MOST_SHIFTED = 100.0, 12.0


class TiltedMinSep:
    """Importance sampling of both directions of a b-min-sep law at one σ.

    *Remove*: y is drawn from R = (P/Q)^α Q/A, A = E_Q[(P/Q)^α], a mixture of Gaussians
    (``TiltedPatterns``). δ is the mean of terms that do not exceed the bound on δ that the Rényi
    divergence of order α gives, so that sampling refines that bound
    (docs/theory/certification.md#thm-weighted-remove;
    ``test_terms_average_to_a_known_delta_and_stay_below_their_ceiling``). Where no order of 2 or
    more shows anything, α = 1: y is drawn from P itself, and the terms are 1 at most.

    *Add*: the loss is below a Gaussian variable (``LinearLoss``), along whose direction alone y is
    drawn otherwise (docs/theory/certification.md#thm-weighted-add;
    ``test_deep_delta_is_seen_by_a_few_samples``).

    Terms in [0, M] need about M times the samples that terms in [0, 1] do, and nothing is assumed
    about their variance or how the tilt fits (docs/theory/certification.md#thm-weighted-verdict).

    *Small ε.* Where the orders that show most are larger than can be drawn, y is drawn from noise
    that is shifted. No bound of those terms is known but one of the mean of their squares, which
    serves as well (docs/theory/certification.md#thm-weighted-shift).

    Rounding: losses are taken to the side that makes terms larger, by 1e-9 or the bound on the
    engine's rounding, whichever is larger; A and the ceilings are rounded up. What the patterns
    drawn are off in total variation is added to every term.

    ``asked="cuda"`` draws noise and losses on a GPU by torch, within the same bound; patterns are
    drawn by compiled code either way. In tests ``device`` is the CPU, which stands in for a GPU.
    """

    def __init__(
        self,
        curve: MinSepRenyiCurve,
        sigma: float,
        asked: Asked = "auto",
        *,
        device: str = "cuda",
    ) -> None:
        # Not only to draw: which orders are affordable, and so the ceilings of the terms that a
        # certificate is checked against, depends on it.
        compiled.check_available()
        self._curve, self._law, self._sigma = curve, curve.law, sigma
        # Of A, and of the probabilities drawn with: some 1e-14 a step.
        self._pad = 2 * max(_ROUNDING, 3e-14 * self._law.steps)
        self._device = device if asked == "cuda" else None
        self._patterns: dict[int, TiltedPatterns] = {}
        self._settled: dict[int, Settled] = {}
        self._settled_moments: dict[int, float] = {}
        self._orders = [
            order
            for order in range(2, affordable(self._law, sigma).largest + 1)
            if self._few_messages(order) or settles(self._law, order)
        ]

    def _messages(self, order: int) -> int:
        return states(self._law, order) * min(8 * self._law.min_sep, self._law.steps)

    def _few_messages(self, order: int) -> bool:
        most = _MOST_MESSAGES if order <= 4 else _DEAR_MESSAGES
        return order <= 2 or self._messages(order) <= most

    def _settles(self, order: int) -> bool:
        """True if an order is drawn by settled messages alone."""
        return not self._few_messages(order) and settles(self._law, order)

    def _log_moment(self, order: int) -> float:
        """log A from above; by the messages that draw, where these are settled ones."""
        if order == 1:
            return 0.0
        if not self._settles(order):
            return self._curve.log_moment(self._sigma, order)
        if order not in self._settled_moments:
            found = settle(self._law, self._sigma, order)
            self._settled, self._settled_moments[order] = {order: found}, found.log_moment
        return self._settled_moments[order]

    def _log_range(self, order: int, epsilon: float) -> float:
        return self._from_moment(self._log_moment(order), order, epsilon)

    @staticmethod
    def _from_moment(log_moment: float, order: int, epsilon: float) -> float:
        conversion = order * math.log1p(-1.0 / order) - math.log(order - 1.0)
        return log_moment - (order - 1) * epsilon + conversion

    def _best_order(self, epsilon: float) -> tuple[int, float]:
        """An order, and the logarithm of the largest of its terms: 1 where no other's are below 1.

        A larger one has to halve the terms, a dear one to make a tenth of them, and has to promise
        that by the orders below.
        """
        if not self._orders:
            return 1, 0.0
        best, least = self._orders[0], self._log_range(self._orders[0], epsilon)
        moments = [0.0, self._log_moment(best)]  # of α = 1, 2
        for order in self._orders[1:]:
            dear = not self._settles(order) and self._messages(order) > _DEAR_MESSAGES
            wanted = least - math.log(10.0 if dear else 2.0)
            if self._from_moment(foreseen(moments), order, epsilon) > wanted:
                break
            moments.append(self._log_moment(order))
            found = self._from_moment(moments[-1], order, epsilon)
            if found > wanted:
                break
            best, least = order, found
        return (best, least) if least <= 0.0 else (1, 0.0)

    def _patterns_of(self, order: int) -> TiltedPatterns:
        if order not in self._patterns:
            if self._settles(order):
                known = self._settled.get(order)
                found: TiltedPatterns = SettledPatterns(self._law, self._sigma, order, known)
            else:
                found = TiltedPatterns(self._law, self._sigma, order)
            self._patterns = {order: found}
        return self._patterns[order]

    def remove(self, epsilon: float) -> WeightedTerms:
        """Terms of the remove direction at ε ≥ 0: of copies, or of a shift if that takes less time.

        Where a larger order than is drawn promises more, estimates rest on samples of a shift.
        """
        order, log_range = self._best_order(epsilon)
        shift = self._shift(epsilon, order, log_range)
        if shift is None:
            return self._tilted(epsilon, order, log_range)
        draw = shifted_draws(self._raised_losses, self._law, epsilon - _SLACK, shift.tau)
        if 2.0 * shift.log_root < shift.worth:
            return WeightedTerms(math.exp(shift.log_root), self._lanes(1), draw, bounded=False)
        return dataclasses.replace(self._tilted(epsilon, order, log_range), rough=draw)

    def _shift(self, epsilon: float, drawn: int, log_range: float) -> Shift | None:
        """A shift, if a larger order than the one that is drawn promises more."""
        if not self._orders:
            return None
        second = self._curve.log_moment(self._sigma, 2)
        rough = rough_large_moments(self._law, self._sigma, second)
        divergence = [math.inf, math.inf, *(log / (order - 1) for order, log in rough.items())]
        order = log_delta_from_renyi(np.array(divergence), epsilon)[1]
        if order <= drawn:
            return None
        mu = math.sqrt(second)
        # V/δ² samples and M/δ of those that are dearer, at about the δ that there is.
        worth = log_range + float(gaussian.log_delta(epsilon, mu)) + math.log(_DEARER)
        return best_shift(self._law, self._sigma, epsilon, order=order, mu=mu, worth=worth)

    def _raised_losses(self, unit: Array, rng: np.random.Generator, along: Array) -> Array:
        """log P/Q from above, ∞ where a sample is spoiled."""
        bound = compiled.rounding_bound(self._law, self._sigma, held=compiled.held_error(unit))
        raised = self._losses_along(unit, rng, along)  # log Q/P, by as much as the bound
        return np.where(np.isinf(raised), np.inf, 2.0 * bound - raised)

    def _tilted(self, epsilon: float, order: int, log_range: float) -> WeightedTerms:
        """Terms of α copies."""
        if not fits(self._law, order) and not self._settles(order):
            try:
                self._patterns_of(order)
            except MemoryError:  # messages that settle late: without this order, then
                self._orders.remove(order)
                return self.remove(epsilon)
        # Else messages are computed when the first sample is drawn, if one is.
        log_moment = self._log_moment(order) + self._pad
        slack = max(_SLACK, compiled.rounding_bound(self._law, self._sigma, copies=order))
        largest = math.exp(log_range + self._pad + 2 * order * slack)
        ceiling = largest * (1.0 + _VARIATION)
        making = threading.Lock()

        def draw(rng: np.random.Generator, size: int) -> Array:
            if self._device is not None:
                on_device.check_device(self._device)  # before messages that take long
            with making:
                patterns = self._patterns_of(order)
            if patterns.variation > _VARIATION:
                return np.full(size, ceiling)  # as if all were spoiled
            if self._device is None:
                losses, weights = patterns.losses(rng, size)
            else:
                times, lanes, weights = patterns.events(rng, size)
                losses = on_device.tilted_losses(
                    self._law, self._sigma, times, lanes, rng, size, copies=order,
                    device=self._device,
                )  # fmt: skip
            terms = _terms(losses, order, epsilon, log_moment + weights, slack)
            terms += largest * patterns.variation
            return np.where(np.isnan(terms), ceiling, terms)  # spoiled

        return WeightedTerms(ceiling, self._lanes(order), draw)

    def _lanes(self, copies: int) -> int:
        return _LANES if self._device is None else on_device.lanes(self._law, copies)

    def _losses_along(self, unit: Array, rng: np.random.Generator, along: Array) -> Array:
        law, sigma = self._law, self._sigma
        if self._device is None:
            return compiled.losses_along(law, sigma, unit, rng, along)
        return on_device.losses_along(law, sigma, unit, rng, along, device=self._device)

    def add(self, epsilon: float) -> WeightedTerms:
        """Terms of the add direction at ε ≥ 0; none where no loss is as large."""
        if epsilon - _SLACK >= self._law.add_limit:
            return WeightedTerms(0.0, self._lanes(1), lambda _, size: np.zeros(size))
        linear = best_linear_loss(self._law, self._sigma, epsilon)
        log_mean = float(linear.log_delta(np.array([epsilon]))[0])
        found = below_linear_loss(
            self._losses_along,
            epsilon,
            nu=linear.nu,
            direction=linear.direction,
            log_mean=log_mean + 2 * _ROUNDING,
            slack=_SLACK,
            lanes=self._lanes(1),
        )
        if not self._orders:
            return found
        mu = math.sqrt(self._curve.log_moment(self._sigma, 2))
        if log_mean < float(gaussian.log_delta(epsilon, mu)) + math.log(_LOOSE):
            return found
        tau = max(mu / 2.0 - epsilon / mu, -_MOST_SHIFTED)
        draw = shifted_draws(self._losses_along, self._law, epsilon - _SLACK, tau, remove=False)
        return dataclasses.replace(found, rough=draw)

    def both(self, epsilon: float) -> dict[str, WeightedTerms]:
        """Terms of either direction at ε ≥ 0, by its name."""
        make = {"remove": self.remove, "add": self.add}
        return OnDemand(lambda direction: make[direction](epsilon))


def _terms(loss: Array, order: int, epsilon: float, log_moment: Array, slack: float) -> Array:
    """A e^{-(α-1)L} (1 - e^{ε-L})_+ of losses known within ``slack``, rounded up."""
    weight = np.exp(log_moment + order * slack - (order - 1) * np.maximum(loss, epsilon - 1.0))
    return np.asarray(weight * hockey_stick(loss, epsilon - slack))
