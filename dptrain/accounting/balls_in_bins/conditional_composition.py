"""Balls-in-bins with any strategy matrix, step by step: conditional composition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from tqdm import tqdm

from dptrain.accounting.balls_in_bins.posterior_hazards import (
    Step,
    event_count,
    hazard_log_odds,
    mixture_weights,
    steps,
)
from dptrain.accounting.balls_in_bins.renyi import periodic_refusal
from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.losses.composition import HeterogeneousComposition
from dptrain.accounting.losses.gaussian_mixture import GaussianMixtures, common_spacing
from dptrain.accounting.losses.loss_distribution import LossDistribution
from dptrain.core import Array, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep
from dptrain.strategies import Strategy

# Steps with the same levels: the weights of each and how many steps have them.
_Groups = dict[bytes, dict[bytes, int]]


def compose_steps(
    means: Array, log_odds: Callable[[Step], Array], *, sigma: float, remove: bool
) -> HeterogeneousComposition:
    """All steps' losses of (P_n, Q_n) (remove) or (Q_n, P_n) (add), on one grid, composed.

    Args:
        means: of the bins, shape (b, n), ≥ 0.
        log_odds: bounds on the log odds of the reverse hazards of a step's rows.
        sigma: deviation of the noise.
        remove: the direction.
    """
    made = [
        (
            GaussianMixtures(
                np.stack([np.frombuffer(weights) for weights in group]), np.frombuffer(levels)
            ),
            list(group.values()),
        )
        for levels, group in _grouped(means, log_odds).items()
    ]
    spreads = [s for mixture, _ in made for s in mixture.spread(sigma=sigma, remove=remove)]
    counts = [count for _, group in made for count in group]
    spacing = common_spacing(spreads, counts)

    def parts() -> Iterator[tuple[LossDistribution, int]]:
        for mixture, repeated in made:
            losses = mixture.discretized(sigma=sigma, spacing=spacing, remove=remove)
            yield from zip(losses, repeated, strict=True)

    bar = tqdm(parts(), total=len(counts), desc="privacy losses", delay=2.0, leave=False)
    return HeterogeneousComposition(bar)


def _grouped(means: Array, log_odds: Callable[[Step], Array]) -> _Groups:
    """Levels and weights of the dominating mixture of every step; equal steps are counted."""
    result: _Groups = {}
    bar = tqdm(steps(means), total=means.shape[1], desc="posteriors", delay=2.0, leave=False)
    for step in bar:
        lowest = step.means.min()
        levels, place = np.unique(np.append(lowest, step.means[step.rows]), return_inverse=True)
        if levels[-1] == 0.0:
            continue  # nothing of the example is in this row
        weights = np.bincount(place, weights=mixture_weights(log_odds(step)))
        group = result.setdefault(levels.tobytes(), {})
        group[weights.tobytes()] = group.get(weights.tobytes(), 0) + 1
    return result


# Least δ_E that is tried: 2^-1000.
_DEEPEST = 1000
_KEPT = 6


def _power(delta: float) -> int:
    """The exponent k of the greatest δ_E = 2^-k ≤ δ/2."""
    return min(max(1, math.ceil(-math.log2(delta / 2.0))), _DEEPEST)


def bin_means(strategy: Strategy, *, steps: int, bins: int) -> Array:
    """m_i = Σ_j |C|_{:, i + j·bins} of every bin, shape (bins, rows), without rounding by FFTs."""
    magnitude = strategy.magnitude()
    return np.stack(
        [magnitude.columns(steps, np.arange(i, steps, bins)).sum(axis=1) for i in range(bins)]
    )


class ConditionalCompositionCurve(Curve):
    """Bounds for P = (1/b) Σ_i N(m_i, σ²I) against Q = N(0, σ²I), given the means (b, n).

    δ(ε) of the run is at most that of the composed pairs (P_n, Q_n) plus the probability of a bad
    past, one after which such a pair does not dominate its step
    (docs/theory/balls-in-bins.md#thm-conditional-composition;
    ``test_no_bound_lies_below_the_simulated_truth``; Choquette-Choo et al. 2024, Theorem 3.1,
    arXiv 2310.15526). Q_n = N(0, σ²), and P_n is a mixture of the N(m_{i,n}, σ²) whose weights are
    stochastically larger, in m_{i,n}, than the posterior of the bin
    (docs/theory/balls-in-bins.md#thm-posterior-hazards). Bad are pasts where one of M posterior
    hazards exceeds its bound, M being the number of (step, bin) pairs that need one, each with
    probability δ_E/M at most. The union is over all pairs and steps: the largest quantile of an
    epoch's steps is not a bound (docs/theory/balls-in-bins.md#thm-hazard-budget). The same with P
    and Q exchanged, Q then being the law under which hazards are bounded.

    δ_E is free but fixed before anything is released: δ(ε) ≤ δ_E + H_{δ_E}(ε) for each. Powers of
    two are tried. At a given δ it is the largest that is at most δ/2; at a given ε the search
    starts where δ_E and H_{δ_E}(ε) balance, and the least sum found counts. The least over larger
    sets of choices of valid bounds is valid.
    """

    def __init__(self, means: Array) -> None:
        self._means = means
        self._events = event_count(means)
        self._compositions: dict[tuple[float, int, bool], HeterogeneousComposition] = {}

    @property
    def events(self) -> int:
        """M, the number of hazards that are bounded."""
        return self._events

    def composition(self, sigma: float, power: int, *, remove: bool) -> HeterogeneousComposition:
        """The dominating pairs of all steps at δ_E = 2^-power."""
        key = (sigma, power, remove)
        if key not in self._compositions:
            while len(self._compositions) >= _KEPT:
                del self._compositions[next(iter(self._compositions))]
            self._compositions[key] = self._composed(sigma, 2.0**-power, remove=remove)
        return self._compositions[key]

    def _composed(self, sigma: float, failure: float, *, remove: bool) -> HeterogeneousComposition:
        each = failure / max(self._events, 1)

        def log_odds(step: Step) -> Array:
            return hazard_log_odds(step, sigma=sigma, failure=each, remove=remove)

        return compose_steps(self._means, log_odds, sigma=sigma, remove=remove)

    def _failure(self, power: int) -> float:
        """δ_E, or 0 if no hazard needs a bound."""
        return 2.0**-power if self._events else 0.0

    def epsilons(self, sigma: float, delta: float) -> tuple[float, float]:
        """ε (remove, add) with the greatest δ_E = 2^-k ≤ δ/2."""
        power = _power(delta)
        left = delta - self._failure(power)
        if left <= 0.0:
            return math.inf, math.inf
        return (
            self.composition(sigma, power, remove=True).epsilon(left),
            self.composition(sigma, power, remove=False).epsilon(left),
        )

    def epsilon(self, sigma: float, delta: float) -> float:
        """The larger ε of both directions."""
        return max(self.epsilons(sigma, delta))

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ of both directions, the least over δ_E near the balance at every ε."""
        return (
            self._delta(sigma, epsilon, remove=True),
            self._delta(sigma, epsilon, remove=False),
        )

    def _delta(self, sigma: float, epsilon: Array, *, remove: bool) -> Array:
        found: dict[int, Array] = {}

        def at(power: int) -> Array:
            if power not in found:
                found[power] = self.composition(sigma, power, remove=remove).delta(epsilon)
            return found[power]

        if not self._events:
            return at(1)
        for i in range(epsilon.size):
            # H grows and δ_E falls with the power: bisect for the last one with H ≤ δ_E.
            low, high = 0, 4
            while high < _DEEPEST and at(high)[i] <= self._failure(high):
                low, high = high, min(2 * high, _DEEPEST)
            while high - low > 1:
                middle = (low + high) // 2
                fits = at(middle)[i] <= self._failure(middle)
                low, high = (middle, high) if fits else (low, middle)
            at(high + 1)  # the choice at a given δ is at most this
        totals = [self._failure(power) + value for power, value in found.items()]
        # δ(ε) falls, so a bound at a smaller ε is one at a larger ε too.
        return np.minimum.accumulate(np.minimum(np.min(totals, axis=0), 1.0))

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """A remark on how δ was split."""
        return (
            f"2^-{_power(delta)} of δ is the union bound over {self._events} posterior hazards; "
            "privacy losses were rounded pessimistically to a grid (connect the dots), normal "
            "tails beyond 13.5 standard deviations count as δ",
        )


# Steps times bins times those above the least: for a few seconds, and to be asked unnamed.
_SECONDS, _AUTOMATIC = 1e4, 1e6


class ConditionalComposition(DeterministicAccountant):
    """Conditional composition for balls-in-bins and any C.

    (Schuchardt & Kalinin 2026, section 4, arXiv 2601.21636.)

    ``MinSep`` with p = 1 and a warm start is the same law. Where it differs from the paper: the
    failure probability is a union bound over all steps (see the curve), hazards of a step's lowest
    level need none, and more variational weights are tried.
    """

    name = "conditional-composition"
    display = "conditional composition"
    kind = Kind.UPPER_BOUND

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuse other schemes, and tables that do not fit the memory."""
        return periodic_refusal(mechanism)

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """Answer by name only where it takes long: it is the better bound only with much noise."""
        if self._work(mechanism) <= _AUTOMATIC:
            return None
        return f"it takes {self.cost(mechanism).value} here; ask for it by name"

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Estimate by the steps, and by the bins that are above the least in one."""
        work = self._work(mechanism)
        if work <= _SECONDS:
            return Cost.SECONDS
        return Cost.MINUTES if work <= 1e8 else Cost.HOURS

    def _work(self, mechanism: MatrixMechanism) -> int:
        scheme = mechanism.scheme
        assert isinstance(scheme, BallsInBins | MinSep)
        return scheme.steps * scheme.min_sep * min(mechanism.strategy.bands, scheme.min_sep)

    def curve(self, mechanism: MatrixMechanism) -> ConditionalCompositionCurve:
        """The curve of the b means."""
        scheme = mechanism.scheme
        assert isinstance(scheme, BallsInBins | MinSep)
        return ConditionalCompositionCurve(
            bin_means(mechanism.strategy, steps=scheme.steps, bins=scheme.min_sep)
        )
