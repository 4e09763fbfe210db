"""Poisson sampling, whole or cut, from all examples or from parts in turn."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeGuard

from dptrain.accounting.base.accountant import Cost, varying_noise
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.base.statement import SETTINGS_ARE_PUBLIC
from dptrain.accounting.poisson.curves import AverageCurve
from dptrain.accounting.poisson.parts import (
    equal_sizes,
    independent_sizes,
    poisson_curve,
    truncated_curve,
)
from dptrain.core import Adjacency, Array, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import CyclicPoisson, MinSep, Poisson, Scheme


def tosses_coins(scheme: Scheme) -> TypeGuard[Poisson | MinSep]:
    """True if each example tosses a coin of its own at every step, and who is drawn is kept."""
    coins = isinstance(scheme, Poisson) or (isinstance(scheme, MinSep) and scheme.min_sep == 1)
    return coins and scheme.max_batch_size is None


def in_turns(scheme: Scheme) -> CyclicPoisson | None:
    """The scheme as cyclic Poisson sampling, of one part where it is Poisson sampling."""
    if isinstance(scheme, CyclicPoisson):
        return scheme
    if not isinstance(scheme, Poisson) and not tosses_coins(scheme):
        return None
    return CyclicPoisson(
        probability=scheme.probability,
        cycle=1,
        dataset_size=scheme.dataset_size,
        steps=scheme.steps,
        max_batch_size=scheme.max_batch_size,
        nominal_size=scheme.nominal_size,
    )


@dataclasses.dataclass(frozen=True)
class RemarkedCurve(Curve):
    """A curve whose statements carry further notes."""

    curve: Curve
    remarks: tuple[str, ...]

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ of the curve."""
        return self.curve.delta(sigma, epsilon)

    def epsilon(self, sigma: float, delta: float) -> float:
        """ε of the curve."""
        return self.curve.epsilon(sigma, delta)

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """Notes of the curve, and the remarks."""
        return (*self.curve.notes(sigma, delta), *self.remarks)


class PoissonPLD(DeterministicAccountant):
    """PLD of ceil(n/b) Poisson-subsampled Gaussians of sensitivity max_t ‖C_{:,t}‖, bands ≤ b.

    For ``Poisson`` and for ``MinSep`` with ``min_sep=1``, which is the same law, b = 1: every
    example tosses its own coins, so the steps compose independently, and each is dominated by a
    pair that gradients attain:

    * zero-out and add-or-remove-one: ((1-p) N(0, σ²) + p N(c, σ²), N(0, σ²)) and its reverse
      (docs/theory/poisson.md#thm-poisson; ``test_one_step_matches_the_closed_form``; Zhu, Dong &
      Wang 2022, Theorem 11, arXiv 2106.08567). N enters nowhere, so add-or-remove-one holds for
      data sets of any size; p, n and the divisor, the scheme's ``nominal_size`` times p, are
      settings that do not change with it.
    * replace-one: Bern(p) against -Bern(p), both directions at once
      (docs/theory/poisson.md#thm-poisson-replace;
      ``test_replace_one_of_one_step_by_integration``).

    For ``CyclicPoisson`` with b parts an example's turns compose
    (docs/theory/poisson.md#thm-cyclic; ``test_worst_part_by_quadrature_where_norms_are_equal``;
    Choquette-Choo et al. 2023, Theorem 4, arXiv 2306.08153). Equal parts read N: with one example
    fewer, others have to move between parts, and change their turns, so that add-or-remove-one
    needs ``assignment="independent"``. The signs of C's entries play no part, and no use is made of
    the split's being random and hidden: an upper bound.

    With ``max_batch_size`` a step is a public mixture of two cases: r = 1, of probability
    Pr[Bin(N-1, p) < B], where the example comes on top, and r = 2, where it displaces another with
    probability q2 of ``Branches`` (docs/theory/poisson.md#thm-truncated-cases). With r = 2 the pair
    is, by its divergences at ε ≥ 0,

    * zero-out: 2·Bern(q2) against Bern(q2) for (P, Q), Bern(q2) against 0 for (Q, P), and Bern(p)
      against 0 with r = 1 (docs/theory/poisson.md#thm-truncated-zero-out; sharper than Ganesh 2025,
      Theorem 3.3, arXiv 2508.15089);
    * add-or-remove-one: 2·Bern(q2) against 0 (Ganesh 2025, Theorem 3.1). As N is private, the
      statement is for every run on at most M = ``nominal_size`` examples, with one more or one
      fewer (docs/theory/poisson.md#thm-truncated-add-remove);
    * replace-one: 2·Bern(q2) against 0 in both directions, and Bern(p) against -Bern(p) with r = 1
      (docs/theory/poisson.md#thm-truncated-replace; sharper than Ganesh 2025, Theorem 3.4).

    It is an upper bound where a batch can be cut: no one gradient of the displaced example is the
    worst for both directions, and r is not published
    (``test_no_gradients_in_a_plane_attain_more_than_is_claimed``). A turn draws from the m examples
    of the part, and truncated privacy is not known to be monotone in m, so δ is the mean over m of
    the δ given m, by intervals of m for independent parts
    (docs/theory/poisson.md#thm-cyclic-sizes; ``test_truncated_parts_average_over_their_sizes``).
    q2 and both weights are rounded up; the weights may then add up to more than 1 by 2e-10, so that
    the composed masses are at least the true ones.
    """

    name = "poisson-pld"
    display = "Poisson PLD"
    formerly = ("truncated-poisson-pld", "cyclic-poisson-pld")
    kind = Kind.EXACT
    adjacencies = (Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE)
    truncation = True

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuse other schemes, bands beyond the cycle, and equal parts where N is private."""
        scheme, bands = in_turns(mechanism.scheme), mechanism.strategy.bands
        if scheme is None:
            return (
                "it needs Poisson or CyclicPoisson sampling, or MinSep with min_sep=1 and "
                "max_batch_size=None"
            )
        if not isinstance(mechanism.scheme, CyclicPoisson):
            if bands != 1:
                return (
                    f"it needs independent noise, but the strategy has bands={bands}; use bands=1 "
                    "(Identity), or accountant='gaussian' without amplification"
                )
            varies = varying_noise(mechanism)
            return varies and f"{varies}; use Identity"
        if bands > scheme.cycle:
            return (
                f"it needs bands <= cycle, but the strategy has bands={bands} and the scheme "
                f"cycle={scheme.cycle}; use at most {scheme.cycle} bands or a cycle of at least "
                f"{bands}"
            )
        private = not self.adjacency.public_size
        if private and scheme.assignment == "equal" and scheme.cycle > 1:
            return (
                "assignment='equal' divides by the number of examples, so one example more or "
                "less moves others to other parts; use assignment='independent'"
            )
        return None

    def kind_of(self, mechanism: MatrixMechanism) -> Kind:
        """EXACT for one part, nothing to cut and the same noise at every step."""
        scheme = self._scheme(mechanism)
        exact = scheme.cycle == 1 and varying_noise(mechanism) is None and not _cuts(scheme)
        return Kind.EXACT if exact else Kind.UPPER_BOUND

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Truncated parts of several sizes take a composition each."""
        scheme = self._scheme(mechanism)
        return Cost.SECONDS if scheme.cycle > 1 and _cuts(scheme) else Cost.INSTANT

    def curve(self, mechanism: MatrixMechanism) -> Curve:
        """The curve of the largest column norm.

        Raises:
            ValueError: if the mechanism is refused.
        """
        if (reason := self.refusal(mechanism)) is not None:
            raise ValueError(f"{self.name}: {reason}")
        scheme = self._scheme(mechanism)
        run: dict[str, Any] = {
            "probability": scheme.probability,
            "steps": scheme.max_participations,
            "sensitivity": float(mechanism.strategy.column_norms(scheme.steps).max()),
        }
        cut = _cuts(scheme)
        found = self._cut(scheme, **run) if cut else poisson_curve(self.adjacency, **run)
        if self.adjacency.public_size:
            return found
        if scheme.max_batch_size is None:
            return RemarkedCurve(found, (SETTINGS_ARE_PUBLIC,))
        covered = (
            f"It is about data sets of at most {scheme.population} examples, with one more or one "
            "fewer, as larger ones would have more of their batches cut"
        )
        return RemarkedCurve(found, (covered, SETTINGS_ARE_PUBLIC))

    def _scheme(self, mechanism: MatrixMechanism) -> CyclicPoisson:
        found = in_turns(mechanism.scheme)
        assert found is not None
        return found

    def _cut(self, scheme: CyclicPoisson, **run: Any) -> Curve:
        """The mean over the sizes of the example's part."""
        if not self.adjacency.public_size:
            found = independent_sizes(scheme.population + 1, scheme.cycle)
            sizes = [(weight, 1, most) for weight, _, most in found]
        else:
            split = equal_sizes if scheme.assignment == "equal" else independent_sizes
            sizes = split(scheme.dataset_size, scheme.cycle)
        run["max_batch_size"] = scheme.max_batch_size
        parts = [
            (weight, truncated_curve(self.adjacency, dataset_size=most, least=least, **run))
            for weight, least, most in sizes
        ]
        return parts[0][1] if len(parts) == 1 else AverageCurve(tuple(parts))


def _cuts(scheme: CyclicPoisson) -> bool:
    """True if a draw can exceed the largest batch; where N is private, with one example more."""
    largest = scheme.part_sizes[-1] if scheme.nominal_size is None else scheme.nominal_size + 1
    return scheme.max_batch_size is not None and scheme.max_batch_size < largest
