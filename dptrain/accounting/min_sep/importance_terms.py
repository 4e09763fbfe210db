"""Weighted samples whose mean is δ(ε) of b-min-sep sampling, none larger than a proven bound."""

from __future__ import annotations

import math
import threading

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.min_sep import engine_compiled as compiled
from dptrain.accounting.min_sep import engine_torch as on_device
from dptrain.accounting.min_sep.linear_loss import best_linear_loss
from dptrain.accounting.min_sep.min_sep_losses import log_ratio, sample_losses
from dptrain.accounting.min_sep.moments import affordable, settles
from dptrain.accounting.min_sep.moments.settled import Settled, settle
from dptrain.accounting.min_sep.moments.settled_draws import SettledPatterns
from dptrain.accounting.min_sep.moments.tilted import (
    ORDERS,
    Asked,
    TiltedPatterns,
    engine,
    fits,
    states,
)
from dptrain.accounting.min_sep.renyi import MinSepRenyiCurve
from dptrain.accounting.min_sep.replicas import ROUNDING, Indices, Replicas, largest_order
from dptrain.accounting.simulation.terms import (
    OnDemand,
    WeightedTerms,
    below_linear_loss,
    noise_along,
)
from dptrain.core import Array

# Losses err by less than 1e-10 (``min_sep_loss``); the terms are evaluated on the safe side of it.
_SLACK = 1e-9
_CHUNK_BYTES = 64 << 20
_COMPILED_LANES = 1024  # samples a chunk of compiled draws
_VARIATION = 1e-5  # of the ceiling: more than compiled draws are off in total variation
# A larger order shrinks the terms and makes each draw dearer: states of ``Replicas``, and messages
# of ``TiltedPatterns`` (it takes some 8 b steps until they settle).
_MOST_STATES = 16_000
_MOST_MESSAGES = 10**8


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
    are off in total variation is added to every term. On a GPU noise and losses are torch's, within
    the same bound; patterns are drawn as before.

    ``asked="cuda"`` draws on a GPU; in tests ``device`` is the CPU, which stands in for one.
    """

    def __init__(
        self,
        curve: MinSepRenyiCurve,
        sigma: float,
        asked: Asked = "auto",
        *,
        device: str = "cuda",
    ) -> None:
        self._curve, self._law, self._sigma = curve, curve.law, sigma
        # Of A, and of the probabilities drawn with: some 1e-14 a step.
        self._pad = 2 * max(ROUNDING, 3e-14 * self._law.steps)
        self._engine, self._device = engine(self._law, asked), device
        self._patterns: dict[int, TiltedPatterns] = {}
        self._settled: dict[int, Settled] = {}
        self._settled_moments: dict[int, float] = {}
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
        if self._engine != "numpy" and order in ORDERS:
            return self._few_messages(order) or settles(self._law, order)
        few = order == 2 or math.comb(b + order - 1, order) <= _MOST_STATES
        return few and order <= numpy_largest

    def _few_messages(self, order: int) -> bool:
        messages = states(self._law, order) * min(8 * self._law.min_sep, self._law.steps)
        return order == 2 or messages <= _MOST_MESSAGES

    def _settles(self, order: int) -> bool:
        """True if an order is drawn by settled messages alone."""
        return (
            self._engine != "numpy"
            and order in ORDERS
            and not self._few_messages(order)
            and settles(self._law, order)
        )

    def _log_moment(self, order: int) -> float:
        """log A from above; by the messages that draw, where these are settled ones."""
        if not self._settles(order):
            return self._curve.log_moment(self._sigma, order)
        if order not in self._settled_moments:
            found = settle(self._law, self._sigma, order)
            self._settled, self._settled_moments[order] = {order: found}, found.log_moment
        return self._settled_moments[order]

    @staticmethod
    def _from_moment(log_moment: float, order: int, epsilon: float) -> float:
        conversion = order * math.log1p(-1.0 / order) - math.log(order - 1.0)
        return log_moment - (order - 1) * epsilon + conversion

    def _log_range(self, order: int, epsilon: float) -> float:
        return self._from_moment(self._log_moment(order), order, epsilon)

    def _best_order(self, epsilon: float) -> tuple[int, float]:
        """An order, and the logarithm of the largest of its terms.

        A larger one has to halve the terms. Whether it might is foreseen from the orders below, as
        log A is convex in α and its slope, for the most part, too.
        """
        best, least = self._orders[0], self._log_range(self._orders[0], epsilon)
        moments = [0.0, self._log_moment(best)]  # of α = 1, 2
        for order in self._orders[1:]:
            if len(moments) == 2:
                foreseen = 2 * moments[-1] - moments[-2]
            else:
                foreseen = 3 * moments[-1] - 3 * moments[-2] + moments[-3]
            if self._from_moment(foreseen, order, epsilon) > least - math.log(2.0):
                break
            moments.append(self._log_moment(order))
            found = self._from_moment(moments[-1], order, epsilon)
            if found > least - math.log(2.0):
                break
            best, least = order, found
        return best, least

    def _plain(self, epsilon: float) -> WeightedTerms:
        """Terms in [0, 1] of the remove direction, drawn from P itself."""
        law, sigmas = self._law, [self._sigma]

        def draw(rng: np.random.Generator, size: int) -> Array:
            losses = sample_losses(law, sigmas, "remove", rng, size)
            return hockey_stick(losses[0], epsilon - _SLACK)

        def draw_on_device(rng: np.random.Generator, size: int) -> Array:
            losses = on_device.sample(law, sigmas, ["remove"], rng, size, device=self._device)
            return hockey_stick(losses[0, 0], epsilon - _SLACK)

        if self._engine == "cuda":
            return WeightedTerms(1.0, on_device.lanes(law), draw_on_device)
        return WeightedTerms(1.0, self.lanes, draw)

    def remove(self, epsilon: float) -> WeightedTerms:
        """Terms of the remove direction at ε ≥ 0: plain ones if no order is affordable."""
        if not self._orders:
            return self._plain(epsilon)
        order, largest = self._best_order(epsilon)
        if largest > 0.0:
            return self._plain(epsilon)
        log_moment = self._log_moment(order)
        if self._engine != "numpy" and order in ORDERS:
            return self._compiled(order, epsilon, log_moment, largest)
        if order not in self._replicas:
            self._replicas = {order: Replicas(self._law, self._sigma, order)}
        replicas = self._replicas[order]
        slack = _SLACK if self._engine != "cuda" else self._slack(order)
        ceiling = math.exp(largest + self._pad + 2 * order * slack)

        def losses(rng: np.random.Generator, size: int) -> Array:
            if self._engine == "cuda":
                return self._on_device(order, *_events(replicas.draw(rng, size)), rng, size)
            shift = lfilter(self._law.coefficients, [1.0], replicas.draw(rng, size), axis=0)
            outputs = shift + self._sigma * rng.standard_normal((self._law.steps, size))
            return log_ratio(self._law, self._sigma, outputs)

        def draw(rng: np.random.Generator, size: int) -> Array:
            terms = _terms(losses(rng, size), order, epsilon, log_moment + self._pad, slack)
            return np.where(np.isnan(terms), ceiling, terms)  # spoiled

        return WeightedTerms(ceiling, self.lanes, draw)

    def _slack(self, order: int) -> float:
        """Bound on the rounding of losses of ``order`` copies by compiled code or on a device."""
        return max(_SLACK, compiled.rounding_bound(self._law, self._sigma, copies=order))

    def _on_device(
        self, order: int, times: Indices, lanes: Indices, rng: np.random.Generator, size: int
    ) -> Array:
        """log P/Q of outputs with these participations, NaN where spoiled."""
        return on_device.tilted_losses(
            self._law, self._sigma, times, lanes, rng, size, copies=order, device=self._device
        )

    def _patterns_of(self, order: int) -> TiltedPatterns:
        if self._engine == "cuda" and (why := compiled.refusal(self._law, instead="auto")):
            raise ValueError(f"engine='cuda' draws participations by compiled code, but {why}")
        if order not in self._patterns:
            if self._settles(order):
                known = self._settled.get(order)
                found: TiltedPatterns = SettledPatterns(self._law, self._sigma, order, known)
            else:
                found = TiltedPatterns(self._law, self._sigma, order)
            self._patterns = {order: found}
        return self._patterns[order]

    def _compiled(
        self, order: int, epsilon: float, log_moment: float, log_range: float
    ) -> WeightedTerms:
        if not fits(self._law, order) and not self._settles(order):
            try:
                self._patterns_of(order)
            except MemoryError:  # messages that settle late: without this order, then
                self._orders.remove(order)
                return self.remove(epsilon)
        # Else messages are computed when the first sample is drawn, if one is.
        slack = self._slack(order)
        largest = math.exp(log_range + self._pad + 2 * order * slack)
        ceiling = largest * (1.0 + _VARIATION)
        making = threading.Lock()

        def draw(rng: np.random.Generator, size: int) -> Array:
            if self._engine == "cuda":
                on_device.check_device(self._device)  # before messages that take long
            with making:
                patterns = self._patterns_of(order)
            if patterns.variation > _VARIATION:
                return np.full(size, ceiling)  # as if all were spoiled
            if self._engine == "cuda":
                times, lanes, weights = patterns.events(rng, size)
                losses = self._on_device(order, times, lanes, rng, size)
            else:
                losses, weights = patterns.losses(rng, size)
            terms = _terms(losses, order, epsilon, log_moment + self._pad + weights, slack)
            terms += largest * patterns.variation
            return np.where(np.isnan(terms), ceiling, terms)  # spoiled

        lanes = _COMPILED_LANES
        if self._engine == "cuda":
            lanes = on_device.lanes(self._law, order)
        return WeightedTerms(ceiling, lanes, draw)

    def add(self, epsilon: float) -> WeightedTerms:
        """Terms of the add direction at ε ≥ 0; none where no loss is as large."""
        if epsilon - _SLACK >= self._law.add_limit:
            return WeightedTerms(0.0, self.lanes, lambda _, size: np.zeros(size))
        linear = best_linear_loss(self._law, self._sigma, epsilon)

        law, sigma, lanes = self._law, self._sigma, self.lanes
        if self._engine != "numpy":
            lanes = _COMPILED_LANES if self._engine == "numba" else on_device.lanes(law)

        def losses(unit: Array, rng: np.random.Generator, along: Array) -> Array:
            if self._engine == "numba":
                return compiled.losses_along(law, sigma, unit, rng, along)
            if self._engine == "cuda":
                return on_device.losses_along(law, sigma, unit, rng, along, device=self._device)
            return -log_ratio(law, sigma, sigma * noise_along(unit, rng, along))

        return below_linear_loss(
            losses,
            epsilon,
            nu=linear.nu,
            direction=linear.direction,
            log_mean=float(linear.log_delta(np.array([epsilon]))[0]) + 2 * ROUNDING,
            slack=_SLACK,
            lanes=lanes,
        )

    def both(self, epsilon: float) -> dict[str, WeightedTerms]:
        """Terms of either direction at ε ≥ 0, by its name."""
        make = {"remove": self.remove, "add": self.add}
        return OnDemand(lambda direction: make[direction](epsilon))


def _events(counts: npt.NDArray[np.int16]) -> tuple[Indices, Indices]:
    """(times, lanes) of the participations of all copies, from how many take part."""
    times, lanes = np.nonzero(counts)
    taking = counts[times, lanes]
    return np.repeat(times, taking), np.repeat(lanes, taking)


def _terms(
    loss: Array, order: int, epsilon: float, log_moment: float | Array, slack: float
) -> Array:
    """A e^{-(α-1)L} (1 - e^{ε-L})_+ of losses known within ``slack``, rounded up."""
    weight = np.exp(log_moment + order * slack - (order - 1) * np.maximum(loss, epsilon - 1.0))
    return np.asarray(weight * hockey_stick(loss, epsilon - slack))
