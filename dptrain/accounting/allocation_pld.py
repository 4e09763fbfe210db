"""One pick out of t steps with independent noise: the privacy loss distribution itself."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dptrain.accounting import gaussian
from dptrain.accounting.accountant import Cost, varying_noise
from dptrain.accounting.balls_in_bins import is_periodic
from dptrain.accounting.deterministic import Array, Curve, DeterministicAccountant
from dptrain.accounting.lognormal_mean import LARGEST_RATIO, SLACK, LogMean
from dptrain.accounting.lognormal_sums import mean_of_lognormals
from dptrain.accounting.pld import Composition
from dptrain.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import RandomAllocation

# Different column norms whose laws are computed one by one.
_MOST_NORMS = 16


@dataclasses.dataclass(frozen=True)
class AllocationCurve(Curve):
    """E independent copies of P = (1/t) Σ_i N(m_i, σ²I), Q = N(0, σ²I), with orthogonal m_i.

    Attributes:
        groups: pairs (‖m_i‖, number of such i), norms ascending.
        epochs: E.
    """

    groups: tuple[tuple[float, int], ...]
    epochs: int
    _laws: dict[float, LogMean] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def covers(self, sigma: float) -> bool:
        """Whether the noise is enough for doubles to hold the law of the loss."""
        return self.groups[-1][0] / sigma <= LARGEST_RATIO

    def law(self, sigma: float) -> LogMean:
        """The law of dP/dQ under Q for one epoch."""
        if sigma not in self._laws:
            while len(self._laws) >= 4:
                del self._laws[next(iter(self._laws))]
            groups = [(norm / sigma, count) for norm, count in self.groups]
            self._laws[sigma] = mean_of_lognormals(groups)
        return self._laws[sigma]

    def _plain(self, sigma: float) -> float:
        """μ of the run when the picks are published, and the largest norm is always picked."""
        return math.sqrt(self.epochs) * self.groups[-1][0] / sigma

    def _direction(self, sigma: float, *, remove: bool) -> Composition:
        return Composition(self.law(sigma).loss(remove=remove), self.epochs)

    def _delta(self, sigma: float, epsilon: Array, *, remove: bool) -> Array:
        plain = gaussian.delta(epsilon, self._plain(sigma))
        if not self.covers(sigma):
            return plain
        slack = self.epochs * SLACK
        found = self._direction(sigma, remove=remove).delta(np.maximum(epsilon - slack, 0.0))
        # δ(ε) falls by no more than its argument grows.
        return np.minimum(plain, found + np.where(epsilon < slack, slack, 0.0))

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ in both directions."""
        return self._delta(sigma, epsilon, remove=True), self._delta(sigma, epsilon, remove=False)

    def epsilons(self, sigma: float, delta: float) -> tuple[float, float]:
        """ε (remove, add) at δ, rounded up."""
        plain = gaussian.epsilon(delta, self._plain(sigma))
        if not self.covers(sigma):
            return plain, plain
        slack = self.epochs * SLACK
        found = [
            self._direction(sigma, remove=remove).epsilon(delta) + slack for remove in (True, False)
        ]
        return min(plain, found[0]), min(plain, found[1])

    def epsilon(self, sigma: float, delta: float) -> float:
        """The larger ε(δ) of the two directions."""
        return max(self.epsilons(sigma, delta))

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """ε per direction, and what was rounded."""
        if not self.covers(sigma):
            return ("there is too little noise for amplification: the picks count as published",)
        remove, add = self.epsilons(sigma, delta)
        return (
            f"ε = {remove:.6g} (remove) and {add:.6g} (add)",
            "likelihood ratios were rounded pessimistically to a grid (a spread that keeps the "
            "mean), tails beyond 12.5 standard deviations count as δ",
        )


def _equal_noise(mechanism: MatrixMechanism) -> str | None:
    if mechanism.strategy.bands != 1:
        return (
            f"it needs independent noise (bands=1), the strategy has "
            f"bands={mechanism.strategy.bands}; use Identity()"
        )
    return None


class AllocationPLD(DeterministicAccountant):
    """PLD of one pick per epoch among t steps with independent noise, remove and add.

    Claim: for :class:`RandomAllocation` with one participation and C = c·I the run is dominated by
    (P^E, Q^E) and (Q^E, P^E), P = (1/t) Σ_i N(c·e_i, σ²I), Q = N(0, σ²I)
    (:class:`RandomAllocationRenyi` has the proof). For balls-in-bins and a diagonal C one such pair
    with m_i = Σ_j C_{:, i+jb} dominates (Schuchardt & Kalinin, Lemma 3.2; ``MinSep`` with p = 1
    and a warm start is the same law); the m_i are orthogonal. δ is that of the pair up to the
    rounding of :mod:`lognormal_mean`, some 1e-4 of ε.

    Proof. For orthogonal m_i the numbers <m_i, y> are independent under Q = N(0, σ²I), so that
    dP/dQ = (1/t) Σ_i exp((<m_i, y> - ‖m_i‖²/2)/σ²) is a mean of independent log-normal variables
    with r_i = ‖m_i‖/σ. Its law is bounded in convex order in :mod:`lognormal_mean`, hence the
    pair is dominated, and E independent copies are by as many of the bound.

    Feldman & Shenfeld (2025) gave the first such numerical account, by directed rounding of the
    loss in each direction; keeping the mean makes the error one of second order.
    """

    name = "allocation PLD"
    kind = Kind.EXACT

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuses other schemes, k > 1, correlated noise, and noise that varies too much."""
        scheme = mechanism.scheme
        if isinstance(scheme, RandomAllocation):
            if scheme.participations != 1:
                return (
                    f"it needs participations=1, the scheme has participations="
                    f"{scheme.participations}: the picks of a uniform subset depend on each "
                    "other; use participations=1 with fewer steps_per_epoch and more epochs"
                )
            return _equal_noise(mechanism) or varying_noise(mechanism)
        if not is_periodic(scheme):
            return (
                "it needs RandomAllocation, BallsInBins, or MinSep with probability=1 and a warm "
                "start"
            )
        if reason := _equal_noise(mechanism):
            return reason
        found = len(self.curve(mechanism).groups)
        if found > _MOST_NORMS:
            return (
                f"the noise differs between the bins in {found} ways, above the {_MOST_NORMS} it "
                "tells apart; use Identity()"
            )
        return None

    def kind_of(self, mechanism: MatrixMechanism) -> Kind:
        """An upper bound where there is too little noise for the law of the loss."""
        sigma = mechanism.noise_multiplier
        exact = sigma == 0.0 or self.curve(mechanism).covers(sigma)
        return Kind.EXACT if exact else Kind.UPPER_BOUND

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """A second per grid of a thousand steps."""
        return Cost.SECONDS

    def curve(self, mechanism: MatrixMechanism) -> AllocationCurve:
        """The curve of the norms of the m_i, equal to 1e-9 ones taken as the larger."""
        scheme = mechanism.scheme
        norms = mechanism.strategy.column_norms(scheme.steps)
        if isinstance(scheme, RandomAllocation):
            return AllocationCurve(((float(norms.max()), scheme.steps_per_epoch),), scheme.epochs)
        squares = np.zeros(scheme.min_sep)
        np.add.at(squares, np.arange(scheme.steps) % scheme.min_sep, norms**2)
        values = np.sort(np.sqrt(squares))
        breaks = np.flatnonzero(np.diff(values) > 1e-9 * values[-1]) + 1
        groups = [(float(part[-1]), part.size) for part in np.split(values, breaks)]
        return AllocationCurve(tuple(groups), 1)
