"""Poisson sampling with ``max_batch_size`` and independent noise, under three adjacencies."""

from __future__ import annotations

from typing import Any

from dptrain.accounting.base.accountant import varying_noise
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.base.statement import SETTINGS_ARE_PUBLIC
from dptrain.accounting.poisson.curves import CasesCurve, ComposedCurve
from dptrain.accounting.poisson.poisson import RemarkedCurve, poisson_curve
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

    A step is a public mixture of two cases: r = 1, of probability Pr[Bin(N-1, p) < B], where the
    example comes on top, and r = 2, where it displaces another with probability q2 of ``Branches``
    (docs/theory/poisson.md#thm-truncated-cases). With r = 2 the pair is, by its divergences at ε ≥
    0,

    * zero-out: 2·Bern(q2) against Bern(q2) for (P, Q), Bern(q2) against 0 for (Q, P), and Bern(p)
      against 0 with r = 1 (docs/theory/poisson.md#thm-truncated-zero-out; sharper than Ganesh 2025,
      Theorem 3.3, arXiv 2508.15089);
    * add-or-remove-one: 2·Bern(q2) against 0 (Ganesh 2025, Theorem 3.1). As N is private, the
      statement is for every run on at most M = ``nominal_size`` examples, with one more or one
      fewer (docs/theory/poisson.md#thm-truncated-add-remove);
    * replace-one: 2·Bern(q2) against 0 in both directions, and Bern(p) against -Bern(p) with r = 1
      (docs/theory/poisson.md#thm-truncated-replace; sharper than Ganesh 2025, Theorem 3.4).

    Nothing is lost where B ≥ N (Poisson sampling); elsewhere it is an upper bound: no one gradient
    of the displaced example is the worst for both directions, and r is not published
    (``test_no_gradients_in_a_plane_attain_more_than_is_claimed``).

    Rounding: q2 and both weights are rounded up; the weights may then add up to more than 1 by
    2e-10, so that the composed masses are at least the true ones.
    """

    name = "truncated-poisson-pld"
    display = "truncated Poisson PLD"
    kind = Kind.UPPER_BOUND
    adjacencies = (Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE)
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
        return mechanism.scheme.population + (not self.adjacency.public_size)

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
        if self.adjacency.public_size:
            return truncated_curve(self.adjacency, dataset_size=size, **run)
        covered = RemarkedCurve(curve_up_to(size, **run), sizes_covered(scheme))
        return RemarkedCurve(covered, SETTINGS_ARE_PUBLIC)
