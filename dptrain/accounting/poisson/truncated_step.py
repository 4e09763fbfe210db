"""One step of a Poisson draw that is cut to B examples: its cases and their pairs of laws."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol, assert_never

from scipy.stats import binom

from dptrain.accounting.losses.composition import LossDistribution
from dptrain.accounting.losses.dominating_pairs import ShiftedMixtures, TwoSidedLosses
from dptrain.accounting.losses.subsampled_gaussian import (
    Spread,
    spread,
    subsampled_gaussian_on_grid,
)
from dptrain.core import Adjacency

# Binomial tails are computed to a relative 1e-12 (checked against sums of 40 digits).
_SLACK = 1e-10
# Tails below this lose digits to underflow.
_UNDERFLOW = 1e-290


@dataclasses.dataclass(frozen=True)
class Branches:
    """The cases of a step, by how many *other* examples are drawn; all rounded up.

    Attributes:
        open: weight of the steps with fewer than B others: there is room for the example.
        full: weight of the others: if the example enters, it displaces another.
        kept: the example's chance q2 to be drawn and kept, given that the batch is full.
        either: weight of the steps of which only one or the other can be said.
    """

    open: float
    full: float
    kept: float
    either: float = 0.0

    @classmethod
    def of(cls, *, dataset_size: int, probability: float, max_batch_size: int) -> Branches:
        """The cases for N, p and B: Pr[Bin(N-1, p) < B], Pr[Bin(N-1, p) ≥ B] and q2.

        Given s ≥ B other examples drawn, the chance is p·B/(s+1); its mean over s is
        q2 = (B/N)·Pr[Bin(N, p) ≥ B+1]/Pr[Bin(N-1, p) ≥ B] (Ganesh 2025, section 3.4, arXiv
        2508.15089), and at most p·B/(B+1).
        """
        size, p, largest = dataset_size, probability, max_batch_size
        kept = p * largest / (largest + 1) * (1.0 + _SLACK)
        if size <= largest:
            return cls(open=1.0, full=0.0, kept=kept)
        room = float(binom.cdf(largest - 1, size - 1, p))
        full = float(binom.sf(largest - 1, size - 1, p))
        if full > _UNDERFLOW:
            tail = float(binom.sf(largest, size, p))
            kept = min(kept, largest / size * tail / full * (1.0 + 3.0 * _SLACK))
        return cls(
            open=_upper(room, complement=full), full=_upper(full, complement=room), kept=kept
        )

    @classmethod
    def covering(
        cls, least: int, most: int, *, probability: float, max_batch_size: int
    ) -> Branches:
        """The cases for a data set of unknown size, least ≤ N ≤ most.

        ``full`` of the least N and ``open`` of the most are parts of every N's weights, q2 of the
        least N bounds every N's, and what is left over is of either kind
        (docs/theory/poisson.md#thm-truncated-cases;
        ``test_branches_of_an_interval_cover_every_size_in_it``).
        """
        low = cls.of(dataset_size=least, probability=probability, max_batch_size=max_batch_size)
        if least == most:
            return low
        high = cls.of(dataset_size=most, probability=probability, max_batch_size=max_batch_size)
        either = max(high.full - low.full * (1.0 - 4.0 * _SLACK), 0.0)
        return cls(open=high.open, full=low.full, kept=low.kept, either=either)


def _upper(probability: float, *, complement: float) -> float:
    """An upper bound on a probability, computed with its complement, from the better of the two."""
    from_complement = math.nextafter(1.0 - complement * (1.0 - _SLACK), 2.0)
    return min(probability * (1.0 + _SLACK), from_complement) + _UNDERFLOW


class Pair(Protocol):
    """The losses of a pair of laws, in both directions."""

    def spread(self, *, remove: bool) -> Spread:
        """The spread of the loss of (P, Q) (remove) or (Q, P) (add)."""

    def discretized(self, *, spacing: float, remove: bool) -> LossDistribution:
        """The losses, rounded up."""


@dataclasses.dataclass(frozen=True)
class SubsampledPair:
    """Bern(p) against 0, with noise σ."""

    probability: float
    sigma: float

    def spread(self, *, remove: bool) -> Spread:
        """The spread of the subsampled Gaussian's loss."""
        return spread(probability=self.probability, sigma=self.sigma, remove=remove)

    def discretized(self, *, spacing: float, remove: bool) -> LossDistribution:
        """The subsampled Gaussian's losses, rounded up."""
        return subsampled_gaussian_on_grid(
            probability=self.probability, sigma=self.sigma, spacing=spacing, remove=remove
        )


def _within(q: float, sigma: float, forward: tuple[float, float], backward: float) -> Pair:
    return TwoSidedLosses(
        ShiftedMixtures(q, *forward, sigma), ShiftedMixtures(q, backward, 0.0, sigma)
    )


def open_pair(adjacency: Adjacency, probability: float, sigma: float) -> Pair:
    """An example of probability p comes on top of a known sum: its gradient is x or x', or absent.

    Zero-out and add-remove: Bern(p)·x against 0. Replace-one: Bern(p)·x against Bern(p)·x'.
    Lengths are at most 1, and x = -x' of length 1 is the worst case
    (docs/theory/poisson.md#thm-poisson-replace;
    ``test_replace_one_of_one_step_by_integration``).
    """
    match adjacency:
        case Adjacency.ZERO_OUT | Adjacency.ADD_REMOVE:
            return SubsampledPair(probability, sigma)
        case Adjacency.REPLACE_ONE:
            opposite = ShiftedMixtures(probability, 1.0, -1.0, sigma)
            return TwoSidedLosses(opposite, opposite)
        case _:
            assert_never(adjacency)


def full_pair(adjacency: Adjacency, probability: float, sigma: float) -> Pair:
    """An example that enters with probability q displaces one of gradient w.

    Both worlds are a known sum plus, with probability q, v in P and u in Q:

    * zero-out: v = x - w, u = -w, so that |v| ≤ 2, |u| ≤ 1, |v - u| ≤ 1;
    * add-remove: v = x - w, u = 0 (the smaller data set displaces nothing);
    * replace-one: v = x - w, u = x' - w, so that |v|, |u| and |v - u| are at most 2.

    Add-remove is Bern(q) against 0 at distance |v| ≤ 2: half the noise. For the others the worst
    vectors lie on a line (docs/theory/poisson.md#thm-two-shifts;
    ``test_no_gradients_in_a_plane_attain_more_than_is_claimed``), with (v, u):

    * zero-out: (2, 1) for (P, Q) and (1, 0) for (Q, P);
    * replace-one: (2, 0) for both; where the batch is open (1, -1), which is its pair itself.

    Each is attained, in zero-out by w = -x for (P, Q) and by w = x for (Q, P). That both belong to
    one pair of laws, ``TwoSidedLosses``, is docs/theory/poisson.md#thm-two-sided-losses
    (``test_two_full_steps_bound_every_choice_of_the_gradients``). Ganesh 2025, Theorems 3.3 and
    3.4 (arXiv 2508.15089), do not use |v - u| and get (2, -1) and (2, -2), which is looser.
    """
    match adjacency:
        case Adjacency.ZERO_OUT:
            return _within(probability, sigma, (2.0, 1.0), 1.0)
        case Adjacency.ADD_REMOVE:
            return SubsampledPair(probability, sigma / 2.0)
        case Adjacency.REPLACE_ONE:
            return _within(probability, sigma, (2.0, 0.0), 2.0)
        case _:
            assert_never(adjacency)
