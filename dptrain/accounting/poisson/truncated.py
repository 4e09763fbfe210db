"""Poisson sampling with ``max_batch_size`` and independent noise, under three adjacencies."""

from __future__ import annotations

from typing import Any

from dptrain.accounting.base.accountant import varying_noise
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.poisson.curves import CasesCurve, ComposedCurve
from dptrain.accounting.poisson.poisson import SETTINGS_ARE_PUBLIC, RemarkedCurve, poisson_curve
from dptrain.accounting.poisson.truncated_step import Branches
from dptrain.core import Adjacency, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Poisson
from dptrain.sampling.schemes import AnySizeScheme


def truncated_curve(
    adjacency: Adjacency,
    *,
    dataset_size: int,
    probability: float,
    max_batch_size: int,
    steps: int,
    sensitivity: float,
) -> ComposedCurve:
    """Composed steps for N examples (add-remove: for N against N-1), at most B of them kept."""
    if max_batch_size >= dataset_size:
        return poisson_curve(
            adjacency, probability=probability, steps=steps, sensitivity=sensitivity
        )
    cases = Branches.of(
        dataset_size=dataset_size, probability=probability, max_batch_size=max_batch_size
    )
    return CasesCurve(probability, cases, steps, sensitivity, adjacency)


def curve_up_to(
    largest: int, *, probability: float, max_batch_size: int, steps: int, sensitivity: float
) -> ComposedCurve:
    """Composed steps under add-remove for data sets of unknown size, the larger at most this."""
    if max_batch_size >= largest:
        return poisson_curve(
            Adjacency.ADD_REMOVE, probability=probability, steps=steps, sensitivity=sensitivity
        )
    cases = Branches.covering(1, largest, probability=probability, max_batch_size=max_batch_size)
    return CasesCurve(probability, cases, steps, sensitivity, Adjacency.ADD_REMOVE)


def sizes_covered(scheme: AnySizeScheme) -> str:
    """Which data sets a statement of add-remove is about, where batches are cut."""
    return (
        f"It is about data sets of at most {scheme.population} examples, with one more or one "
        "fewer, as larger ones would have more of their batches cut"
    )


class TruncatedPoissonPLD(DeterministicAccountant):
    """PLD of n steps of truncated Poisson sampling, both directions, for C = c·I.

    *Zero-out* (Ganesh 2025, Theorem 3.3, with a sharper pair). Let x be the gradient of the
    example, blanked to 0 in the other world, where it is still drawn like any other. One step is
    dominated by a public r and the pair of its case:

    * r = 1 with probability Pr[Bin(N-1, p) < B]: Bern(p) against 0;
    * r = 2 otherwise: with q2 of ``Branches``, the pair whose divergences at ε ≥ 0 are those
      of 2·Bern(q2) against Bern(q2) for (P, Q) and of Bern(q2) against 0 for (Q, P).

    Proof.

    * Draw the others first, in a random order, s of them. If s ≥ B, the example's own coin and the
      lottery among s + 1 let it in with probability p·B/(s+1), and by symmetry it displaces the
      B-th in the order, whose gradient is w, ‖w‖ ≤ 1; else the first B are the batch. None of this
      depends on the world. Publish the order and min(s, B), from which r follows. Given s ≥ B the
      example enters with probability q2, the mean over s. Padding adds nothing.
    * Given what is published and all earlier releases, the gradients are fixed, so the others' sum
      is a known shift. For s < B what is left is Bern(p)·x against 0. For s ≥ B it is x - w with
      probability q2 against -w with probability q2: lengths of at most 2 and 1, and at most 1
      apart. ``truncated_step.full_pair`` proves the pair for these.
    * The law of r does not depend on the data, so the loss of (r, y) is that of y given r: the
      step's loss distribution is the mixture of the two. Coins are fresh in every step, so the
      steps compose adaptively.

    Nothing is lost where B ≥ N (Poisson sampling); elsewhere it is an upper bound: no one w is the
    worst for both directions, and r is not published.

    Rounding: with a smaller q2 the laws of r = 2 arise from those with a larger one by replacing
    the output by a draw from N(0, σ²) with some probability, so q2 is rounded up. So are both
    weights, whose sum may then exceed 1 by 2e-10: the composed masses are at least the true ones,
    whichever case is worse (a small q2 can make r = 2 the better one).

    *Add-or-remove-one* (Ganesh 2025, Theorem 3.1): r = 1: Bern(p) against 0; r = 2: 2·Bern(q2)
    against 0. Let the larger data set have m examples. The others are the same m - 1 in both
    worlds, with the same coins and the same random order, and min(s, B) is published as under
    zero-out; in the smaller world the batch is the first B of the order. So r has the law of
    Bin(m-1, p), q2 is that of m, and the larger world adds x with probability p (s < B) or x - w,
    of length at most 2, with probability q2 (s ≥ B), where the smaller one adds nothing. Both
    batches are padded to the same B.

    That compares m with m - 1, and what it says depends on m, which is private: a statement for
    the N at hand would differ between neighbors. So it is made for every run on at most
    M = ``nominal_size`` examples at once, with one more or one fewer: all m ≤ M + 1. For each of
    them the batch is open with probability at least Pr[Bin(M, p) < B], and else q2 ≤ p: the pair
    2·Bern(p) against 0 dominates that of r = 2 and that of r = 1 (``Branches.covering``).

    *Replace-one* (Ganesh 2025, Theorem 3.4, with a sharper pair), both directions at once. N, the
    others, their coins and their order are the same in both worlds, and everything but the
    example's gradient, x or x'. As under zero-out:

    * r = 1: Bern(p)·x against Bern(p)·x': Bern(p) against -Bern(p);
    * r = 2: x - w with probability q2 against x' - w with probability q2, lengths at most 2 and at
      most 2 apart: the divergences of 2·Bern(q2) against 0 at ε ≥ 0, in both directions
      (``truncated_step.full_pair``), where the theorem has those of 2·Bern(q2) against -2·Bern(q2).
    """

    name = "truncated-poisson-pld"
    display = "truncated Poisson PLD"
    kind = Kind.UPPER_BOUND
    adjacencies = tuple(Adjacency)
    truncation = True

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuses other schemes, correlated noise and noise that varies from step to step."""
        scheme, strategy = mechanism.scheme, mechanism.strategy
        if not isinstance(scheme, Poisson) or scheme.max_batch_size is None:
            return "it needs Poisson sampling with max_batch_size"
        if strategy.bands != 1:
            return (
                f"it needs independent noise, the strategy has bands={strategy.bands}; use bands=1 "
                "(Identity), or accountant='gaussian' without amplification"
            )
        varies = varying_noise(mechanism)
        return varies and f"{varies}; use Identity"

    def _largest(self, mechanism: MatrixMechanism) -> int:
        """Examples that a draw may come from: under add-remove one more than the nominal size."""
        return mechanism.scheme.population + (self.adjacency is Adjacency.ADD_REMOVE)

    def kind_of(self, mechanism: MatrixMechanism) -> Kind:
        """Exact if no batch can be cut."""
        scheme = mechanism.scheme
        assert isinstance(scheme, Poisson)
        assert scheme.max_batch_size is not None
        cut = scheme.max_batch_size < self._largest(mechanism)
        return Kind.UPPER_BOUND if cut else Kind.EXACT

    def curve(self, mechanism: MatrixMechanism) -> Curve:
        """The curve; a diagonal C only scales the sensitivity."""
        scheme = mechanism.scheme
        assert isinstance(scheme, Poisson)
        assert scheme.max_batch_size is not None
        run: dict[str, Any] = {
            "probability": scheme.probability,
            "max_batch_size": scheme.max_batch_size,
            "steps": scheme.steps,
            "sensitivity": float(mechanism.strategy.column_norms(scheme.steps).max()),
        }
        size = self._largest(mechanism)
        if self.adjacency is not Adjacency.ADD_REMOVE:
            return truncated_curve(self.adjacency, dataset_size=size, **run)
        covered = RemarkedCurve(curve_up_to(size, **run), sizes_covered(scheme))
        return RemarkedCurve(covered, SETTINGS_ARE_PUBLIC)
