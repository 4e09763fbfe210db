"""Accountants asked about the scheme by which units take part, where units stand for its examples.

Of such a scheme (``Scheme.participants``) every theorem about the examples of the other holds for
its units (docs/theory/users.md#thm-users-averaged), so an accountant is asked about the mechanism
with that other scheme, and what it finds is stated of the mechanism at hand.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self, cast

import numpy.typing as npt

from dptrain.accounting.base.accountant import Accountant, Cost, Profile
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.base.statement import statement
from dptrain.core import Adjacency, Guarantee, Kind
from dptrain.mechanism import MatrixMechanism


def of_participants(mechanism: MatrixMechanism) -> MatrixMechanism:
    """The mechanism that accountants are asked about: itself, unless its units stand for others."""
    asked = mechanism.scheme.participants
    if asked is mechanism.scheme:
        return mechanism
    return dataclasses.replace(mechanism, scheme=asked)


def about_units(accountant: Accountant, mechanism: MatrixMechanism) -> Accountant:
    """The accountant, as it answers for the mechanism: itself, unless units stand for others."""
    if of_participants(mechanism) is mechanism or isinstance(accountant, AboutUnits):
        return accountant
    if isinstance(accountant, DeterministicAccountant):
        return ProvenAboutUnits(member=accountant)
    return AboutUnits(member=accountant)


def bare(accountant: Accountant) -> Accountant:
    """The accountant that ``about_units`` was given."""
    return accountant.member if isinstance(accountant, AboutUnits) else accountant


@dataclasses.dataclass(frozen=True, kw_only=True)
class AboutUnits(Accountant):
    """What another accountant says of the scheme by which units take part, stated of the units.

    Args:
        member: the other accountant.
    """

    member: Accountant

    truncation = True  # as the member has it

    def __post_init__(self) -> None:
        given = cast(Adjacency | None, self.adjacency)
        if given is None:
            object.__setattr__(self, "adjacency", self.member.adjacency)
        elif given is not self.member.adjacency:
            object.__setattr__(self, "member", self.member.under(given))
        super().__post_init__()

    @property
    def name(self) -> str:
        """The member's."""
        return self.member.name

    @property
    def display(self) -> str:
        """The member's."""
        return self.member.display

    @property
    def kind(self) -> Kind:  # type: ignore[override]  # a constant of every other class
        """The member's."""
        return self.member.kind

    @property
    def adjacencies(self) -> tuple[Adjacency, ...]:  # type: ignore[override]
        """The member's."""
        return self.member.adjacencies

    @property
    def refines(self) -> bool:  # type: ignore[override]
        """The member's."""
        return self.member.refines

    @property
    def failure_probability(self) -> float:
        """The member's."""
        return self.member.failure_probability

    def among(self, attempts: int) -> Self:
        """With the member's."""
        return dataclasses.replace(self, member=self.member.among(attempts))

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """What speaks against the member's answer, whether N is public and batches cut included."""
        return self.member.obstacle(of_participants(mechanism))

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """The member's."""
        return self.member.reserved(of_participants(mechanism))

    def kind_of(self, mechanism: MatrixMechanism) -> Kind:
        """The member's."""
        return self.member.kind_of(of_participants(mechanism))

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """The member's."""
        return self.member.cost(of_participants(mechanism))

    def guarantee(self, mechanism: MatrixMechanism, *, delta: float) -> Guarantee:
        """The member's, of the units."""
        self.check_covers(mechanism)
        return self._stated(
            mechanism, self.member.guarantee(of_participants(mechanism), delta=delta)
        )

    def profile(self, mechanism: MatrixMechanism, epsilon: npt.ArrayLike) -> Profile:
        """The member's."""
        self.check_covers(mechanism)
        return self.member.profile(of_participants(mechanism), epsilon)

    def calibrate(
        self, mechanism: MatrixMechanism, *, epsilon: float, delta: float, **options: Any
    ) -> Guarantee:
        """The member's, of the units; it is given the options."""
        self.check_covers(mechanism)
        found = self.member.calibrate(
            of_participants(mechanism), epsilon=epsilon, delta=delta, **options
        )
        return self._stated(mechanism.with_noise(found.noise_multiplier), found)

    def restate(self, mechanism: MatrixMechanism, stated: Guarantee) -> Guarantee:
        """The member's, of the units."""
        self.check_covers(mechanism)
        found = self.member.restate(of_participants(mechanism), stated)
        return self._stated(mechanism.with_noise(found.noise_multiplier), found)

    def _stated(self, mechanism: MatrixMechanism, found: Guarantee) -> Guarantee:
        return statement(
            mechanism,
            self,
            epsilon=found.epsilon,
            delta=found.delta,
            notes=found.notes,
            kind=found.kind,
            certificate=found.certificate,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProvenAboutUnits(AboutUnits, DeterministicAccountant):
    """The same for an accountant without simulation, whose curve it has."""

    member: DeterministicAccountant

    guarantee = DeterministicAccountant.guarantee
    restate = DeterministicAccountant.restate
    profile = DeterministicAccountant.profile
    calibrate = DeterministicAccountant.calibrate  # type: ignore[assignment]  # no options

    def curve(self, mechanism: MatrixMechanism) -> Curve:
        """The member's curve of the scheme by which units take part."""
        return self.member.curve(of_participants(mechanism))
