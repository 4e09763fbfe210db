"""One pick out of t steps with independent noise: the loss distribution itself; and k picks."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dptrain.accounting.balls_in_bins.lognormal_means import (
    LARGEST_RATIO,
    SLACK,
    LogMean,
    mean_of_lognormals,
)
from dptrain.accounting.balls_in_bins.renyi import is_periodic
from dptrain.accounting.base.accountant import Cost, truncation_refusal, varying_noise
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.composition import HeterogeneousComposition
from dptrain.core import Array, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import RandomAllocation

# Different column norms whose laws are computed one by one.
_MOST_NORMS = 16


Groups = tuple[tuple[float, int], ...]


@dataclasses.dataclass(frozen=True)
class AllocationCurve(Curve):
    """Independent copies of pairs P = (1/t) Σ_i N(m_i, σ²I), Q = N(0, σ²I), with orthogonal m_i.

    Attributes:
        blocks: for every pair its groups (‖m_i‖, number of such i), norms ascending, and how many
            copies of it there are. Several pairs have one norm, the same for all.
    """

    blocks: tuple[tuple[Groups, int], ...]

    def covers(self, sigma: float) -> bool:
        """True if the noise is enough for doubles to hold the law of the loss."""
        return max(groups[-1][0] for groups, _ in self.blocks) / sigma <= LARGEST_RATIO

    def laws(self, sigma: float) -> list[LogMean]:
        """The law of dP/dQ under Q for every pair, on one grid."""
        largest = max(sum(count for _, count in groups) for groups, _ in self.blocks)
        found = [
            mean_of_lognormals(tuple((norm / sigma, count) for norm, count in groups), like=largest)
            for groups, _ in self.blocks
        ]
        finest = min(law.spacing for law in found)
        return [law.refined(round(law.spacing / finest)) for law in found]

    @property
    def copies(self) -> int:
        """Number of copies of pairs in all."""
        return sum(copies for _, copies in self.blocks)

    def _plain(self, sigma: float) -> float:
        """μ of the run when the picks are published, and the largest norm is always picked."""
        squares = [copies * groups[-1][0] ** 2 for groups, copies in self.blocks]
        return math.sqrt(math.fsum(squares)) / sigma

    def _direction(self, sigma: float, *, remove: bool) -> HeterogeneousComposition:
        laws = zip(self.laws(sigma), self.blocks, strict=True)
        parts = [(law.loss(remove=remove), copies) for law, (_, copies) in laws]
        return HeterogeneousComposition(parts)

    def _delta(self, sigma: float, epsilon: Array, *, remove: bool) -> Array:
        plain = gaussian.delta(epsilon, self._plain(sigma))
        if not self.covers(sigma):
            return plain
        slack = self.copies * SLACK
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
        slack = self.copies * SLACK
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
            return ("there is too little noise for amplification, so the picks count as public",)
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


def picks_refusal(mechanism: MatrixMechanism) -> str | None:
    """``None`` for random allocation with C = c·I, else why not."""
    if not isinstance(mechanism.scheme, RandomAllocation):
        return "it needs RandomAllocation"
    return _equal_noise(mechanism) or varying_noise(mechanism)


class AllocationPLD(DeterministicAccountant):
    """PLD of random picks of an epoch's steps with independent noise, remove and add.

    For ``RandomAllocation`` with one participation and C = c·I the run is dominated by E copies of
    P = (1/t) Σ_i N(c·e_i, σ²I) against Q = N(0, σ²I)
    (docs/theory/random-allocation.md#thm-allocation-pair). For balls-in-bins and a diagonal C one
    such pair with the orthogonal m_i = Σ_j C_{:, i+jb} dominates (``MinSep`` with p = 1 and a warm
    start is the same law). Then dP/dQ is a mean of independent log-normal variables under Q, whose
    law is bounded in convex order (docs/theory/random-allocation.md#thm-allocation-law;
    ``test_is_within_the_published_brackets_and_within_our_own``): some 1e-4 of ε.

    *k picks of t steps.* An upper bound: one pick from each of k blocks, t mod k of them of ⌈t/k⌉
    steps and the rest of ⌊t/k⌋ (docs/theory/random-allocation.md#thm-allocation-blocks;
    ``test_several_picks_lie_between_all_subsets_and_their_blocks``).

    Feldman & Shenfeld 2025 (arXiv 2502.08202) gave the first such numerical account, by directed
    rounding of the loss in each direction; keeping the mean makes the error one of second order.
    """

    name = "allocation-pld"
    display = "allocation PLD"
    formerly = ("random-allocation-renyi",)
    kind = Kind.EXACT

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuse other schemes, correlated noise, and noise that varies too much."""
        scheme = mechanism.scheme
        if isinstance(scheme, RandomAllocation):
            return picks_refusal(mechanism)
        if not is_periodic(scheme):
            return truncation_refusal(scheme) or (
                "it needs RandomAllocation, BallsInBins, or MinSep with probability=1 and a warm "
                "start"
            )
        if reason := _equal_noise(mechanism):
            return reason
        ((groups, _),) = self.curve(mechanism).blocks
        if len(groups) > _MOST_NORMS:
            return (
                f"the noise differs between the bins in {len(groups)} ways, above the "
                f"{_MOST_NORMS} it tells apart; use Identity()"
            )
        return None

    def kind_of(self, mechanism: MatrixMechanism) -> Kind:
        """An upper bound for several picks, and where there is too little noise for the law."""
        scheme, sigma = mechanism.scheme, mechanism.noise_multiplier
        if isinstance(scheme, RandomAllocation) and scheme.participations > 1:
            return Kind.UPPER_BOUND
        exact = sigma == 0.0 or self.curve(mechanism).covers(sigma)
        return Kind.EXACT if exact else Kind.UPPER_BOUND

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """A second for each law at a σ; the next number of its copies takes a twentieth of it."""
        scheme = mechanism.scheme
        single = isinstance(scheme, RandomAllocation) and scheme.participations == 1
        return Cost.INSTANT if single else Cost.SECONDS

    def curve(self, mechanism: MatrixMechanism) -> AllocationCurve:
        """The curve of the norms of the m_i, equal to 1e-9 ones taken as the larger."""
        scheme = mechanism.scheme
        norms = mechanism.strategy.column_norms(scheme.steps)
        if isinstance(scheme, RandomAllocation):
            return _of_picks(scheme, float(norms.max()))
        squares = np.zeros(scheme.min_sep)
        np.add.at(squares, np.arange(scheme.steps) % scheme.min_sep, norms**2)
        values = np.sort(np.sqrt(squares))
        breaks = np.flatnonzero(np.diff(values) > 1e-9 * values[-1]) + 1
        groups = [(float(part[-1]), part.size) for part in np.split(values, breaks)]
        return AllocationCurve(((tuple(groups), 1),))


def _of_picks(scheme: RandomAllocation, norm: float) -> AllocationCurve:
    """One pick from each block of every epoch."""
    size, larger = divmod(scheme.steps_per_epoch, scheme.participations)
    counts = ((size, scheme.participations - larger), (size + 1, larger))
    blocks = [(((norm, each),), copies * scheme.epochs) for each, copies in counts if copies]
    return AllocationCurve(tuple(blocks))
