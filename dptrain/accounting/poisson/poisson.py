"""Poisson sampling with independent noise: privacy loss distribution of the subsampled Gaussian."""

from __future__ import annotations

import dataclasses
from typing import TypeGuard, assert_never

from dptrain.accounting.base.accountant import varying_noise
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.base.statement import SETTINGS_ARE_PUBLIC
from dptrain.accounting.poisson.curves import CasesCurve, ComposedCurve, SubsampledGaussianCurve
from dptrain.accounting.poisson.truncated_step import Branches
from dptrain.core import Adjacency, Array, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep, Poisson, Scheme


def tosses_coins(scheme: Scheme) -> TypeGuard[Poisson | MinSep]:
    """Whether every example tosses a coin of its own at every step, and who is drawn is kept."""
    coins = isinstance(scheme, Poisson) or (isinstance(scheme, MinSep) and scheme.min_sep == 1)
    return coins and scheme.max_batch_size is None


@dataclasses.dataclass(frozen=True)
class RemarkedCurve(Curve):
    """A curve whose statements carry one more note."""

    curve: Curve
    remark: str

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """The curve's."""
        return self.curve.delta(sigma, epsilon)

    def epsilon(self, sigma: float, delta: float) -> float:
        """The curve's."""
        return self.curve.epsilon(sigma, delta)

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """The curve's and the remark."""
        return (*self.curve.notes(sigma, delta), self.remark)


def poisson_curve(
    adjacency: Adjacency, *, probability: float, steps: int, sensitivity: float
) -> ComposedCurve:
    """Composed Poisson steps under one of the three adjacencies."""
    match adjacency:
        case Adjacency.ZERO_OUT | Adjacency.ADD_REMOVE:
            return SubsampledGaussianCurve(probability, steps, sensitivity)
        case Adjacency.REPLACE_ONE:
            alone = Branches(open=1.0, full=0.0, kept=probability)
            return CasesCurve(probability, alone, steps, sensitivity, adjacency)
        case _:
            assert_never(adjacency)


class PoissonPLD(DeterministicAccountant):
    """PLD of n Poisson-subsampled Gaussians, remove and add, for C = c·I.

    ``MinSep`` with ``min_sep=1`` is the same law. Every example tosses its own coins, so the steps
    compose independently, and each is dominated by a pair that gradients attain:

    * zero-out and add-or-remove-one: ((1-p) N(0, σ²) + p N(c, σ²), N(0, σ²)) and its reverse
      (docs/theory/poisson.md#thm-poisson; ``test_one_step_matches_the_closed_form``; Zhu, Dong &
      Wang 2022, Theorem 11, arXiv 2106.08567). N enters nowhere, so add-or-remove-one holds for
      data sets of any size; p, n and the divisor, the scheme's ``nominal_size`` times p, are
      settings that do not change with it.
    * replace-one: Bern(p) against -Bern(p), both directions at once
      (docs/theory/poisson.md#thm-poisson-replace;
      ``test_replace_one_of_one_step_by_integration``).
    """

    name = "poisson-pld"
    display = "Poisson PLD"
    kind = Kind.EXACT
    adjacencies = (Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE)

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuses other schemes, correlated noise and noise that varies from step to step."""
        scheme = mechanism.scheme
        if not tosses_coins(scheme):
            needed = "it needs Poisson sampling (or MinSep with min_sep=1)"
            return f"{needed}, and batches that are not cut (max_batch_size=None)"
        if mechanism.strategy.bands != 1:
            return (
                f"it needs independent noise (bands=1), the strategy has "
                f"bands={mechanism.strategy.bands}"
            )
        return varying_noise(mechanism)

    def curve(self, mechanism: MatrixMechanism) -> Curve:
        """The curve; a diagonal C only scales the sensitivity.

        Raises:
            ValueError: if the mechanism is refused: of cut batches, say, it is no bound.
        """
        scheme = mechanism.scheme
        if (reason := self.refusal(mechanism)) is not None or not tosses_coins(scheme):
            raise ValueError(f"{self.name}: {reason}")
        found = poisson_curve(
            self.adjacency,
            probability=scheme.probability,
            steps=scheme.steps,
            sensitivity=float(mechanism.strategy.column_norms(scheme.steps).max()),
        )
        if self.adjacency.public_size:
            return found
        return RemarkedCurve(found, SETTINGS_ARE_PUBLIC)
