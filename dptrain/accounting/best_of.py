"""The least bound of several accountants in each direction."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.base.statement import check_delta, checked_sigma, statement
from dptrain.core import Adjacency, Array, Guarantee, Kind
from dptrain.mechanism import MatrixMechanism

# Relative gain in ε for which the dear members are asked at every noise level of a calibration.
_WORTH_IT = 2e-3


@dataclasses.dataclass(frozen=True)
class BestOfCurve(Curve):
    """The least of several curves at every ε, for either direction by itself.

    (ε, δ) needs δ_remove(ε) ≤ δ and δ_add(ε) ≤ δ, two statements that may have different proofs.
    """

    curves: tuple[tuple[str, Curve], ...]

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """The least δ of each direction."""
        found = np.array([curve.delta(sigma, epsilon) for _, curve in self.curves])
        return found[:, 0].min(axis=0), found[:, 1].min(axis=0)

    def every(self, sigma: float, delta: float) -> Array:
        """ε of every curve (rows) and direction (columns)."""
        return np.array([curve.epsilons(sigma, delta) for _, curve in self.curves])

    def epsilons(self, sigma: float, delta: float) -> tuple[float, float]:
        """The least ε of each direction."""
        remove, add = self.every(sigma, delta).min(axis=0)
        return float(remove), float(add)

    def epsilon(self, sigma: float, delta: float) -> float:
        """The larger of both directions' least ε."""
        return max(self.epsilons(sigma, delta))

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """The accountant whose bound each direction has, and its notes."""
        return self.notes_on(self.every(sigma, delta), sigma, delta)

    def notes_on(self, found: Array, sigma: float, delta: float) -> tuple[str, ...]:
        """``notes``, given what ``every`` found at (σ, δ)."""
        remove, add = (int(best) for best in np.argmin(found, axis=0))
        first = (
            f"ε = {found[remove, 0]:.6g} (remove, by {self.curves[remove][0]}) and "
            f"{found[add, 1]:.6g} (add, by {self.curves[add][0]})"
        )
        used = sorted({remove, add})
        remarks = [
            f"{name}: {note}"
            for name, curve in (self.curves[each] for each in used)
            for note in curve.notes(sigma, delta)
        ]
        return (first, *remarks)


@dataclasses.dataclass(frozen=True)
class BestOf(DeterministicAccountant):
    """Several deterministic accountants as one that states the best of them per direction.

    No failure probabilities have to be added: each bound holds for certain. Where one of them is
    exact for the mechanism it alone is asked, as the others cannot say less.
    """

    members: tuple[DeterministicAccountant, ...]

    kind = Kind.UPPER_BOUND
    adjacencies = tuple(Adjacency)
    truncation = True  # as far as every member says so for itself

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.members:
            raise ValueError("members: must contain at least one accountant")
        if {member.adjacency for member in self.members} != {self.adjacency}:
            raise ValueError(
                f"members: all must use adjacency={self.adjacency.value!r}, but they are "
                f"{[(member.name, member.adjacency.value) for member in self.members]}"
            )

    @classmethod
    def of(cls, members: Sequence[DeterministicAccountant]) -> BestOf:
        """The best of accountants of the same adjacency."""
        if not members:
            raise ValueError("members: must contain at least one accountant")
        return cls(tuple(members), adjacency=members[0].adjacency)

    @property
    def name(self) -> str:
        """The name of the only member, or the names of all of them."""
        names = [member.name for member in self.members]
        return names[0] if len(names) == 1 else f"best of {', '.join(names)}"

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuse a mechanism that one of the members refuses."""
        for member in self.members:
            if reason := member.obstacle(mechanism):
                return f"{member.name}: {reason}"
        return None

    def asked(self, mechanism: MatrixMechanism) -> tuple[DeterministicAccountant, ...]:
        """The first exact member, or else all."""
        exact = [each for each in self.members if each.kind_of(mechanism) is Kind.EXACT]
        return (exact[0],) if exact else self.members

    def kind_of(self, mechanism: MatrixMechanism) -> Kind:
        """EXACT if a member is exact for the mechanism."""
        return self.asked(mechanism)[0].kind_of(mechanism)

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """The cost of the dearest member asked."""
        order = list(Cost)
        costs = [member.cost(mechanism) for member in self.asked(mechanism)]
        return max(costs, key=order.index)

    def guarantee(self, mechanism: MatrixMechanism, *, delta: float) -> Guarantee:
        """The best of both directions; under the name of one member where it alone attains it."""
        self.check_covers(mechanism)
        asked, sigma = self.asked(mechanism), checked_sigma(mechanism)
        if len(asked) == 1 or sigma == 0.0:
            return asked[0].guarantee(mechanism, delta=delta)
        check_delta(delta, mechanism.scheme)
        curve = self.curve(mechanism)
        assert isinstance(curve, BestOfCurve)
        found = curve.every(sigma, delta)
        best, two_sided = float(found.min(axis=0).max()), found.max(axis=1)
        if two_sided.min() > best:
            notes = curve.notes_on(found, sigma, delta)
            return statement(mechanism, self, epsilon=best, delta=delta, notes=notes)
        first = int(np.argmax(two_sided <= best))
        notes = curve.curves[first][1].notes(sigma, delta)
        return statement(mechanism, asked[first], epsilon=best, delta=delta, notes=notes)

    def calibrate(self, mechanism: MatrixMechanism, *, epsilon: float, delta: float) -> Guarantee:
        """Calibrate as one accountant does; dear members join only if they better the others."""
        asked, order = self.asked(mechanism), list(Cost)
        least = min((member.cost(mechanism) for member in asked), key=order.index)
        cheap = [member for member in asked if member.cost(mechanism) is least]
        if len(cheap) == len(asked):
            return super().calibrate(mechanism, epsilon=epsilon, delta=delta)
        found = BestOf.of(cheap).calibrate(mechanism, epsilon=epsilon, delta=delta)
        reached = self.curve(mechanism).epsilon(found.noise_multiplier, delta)
        if reached > epsilon * (1.0 - _WORTH_IT):
            return found
        return super().calibrate(mechanism, epsilon=epsilon, delta=delta)

    def curve(self, mechanism: MatrixMechanism) -> Curve:
        """The member's curve, or the best of all of them."""
        asked = self.asked(mechanism)
        if len(asked) == 1:
            return asked[0].curve(mechanism)
        return BestOfCurve(tuple((each.name, each.curve(mechanism)) for each in asked))
