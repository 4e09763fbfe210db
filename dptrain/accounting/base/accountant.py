"""An accountant: turns a mechanism into δ(ε), in both directions."""

from __future__ import annotations

import dataclasses
import enum
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self, cast

import numpy as np
import numpy.typing as npt

from dptrain.core import Adjacency, Guarantee, Kind, Unit, checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import AnySizeScheme, Scheme, scheme_types


@dataclasses.dataclass(frozen=True)
class Profile:
    """δ over a grid of ε in both directions.

    Attributes:
        epsilon: grid of ε ≥ 0, ascending.
        remove: δ of (P, Q) at each ε.
        add: δ of (Q, P) at each ε.
        kind: how the values were shown.
        accountant: name of the accountant that computed them.
        failure_probability: of kind CONFIDENCE the chance, over the draws of all simulations that
            it rests on, that not all of its values are upper bounds; ``None`` where each value was
            shown by itself only, and of other kinds.
        adjacency: the neighboring relation that the values are about; ``None`` where it is not
            told, as by an accountant that was asked by itself.
        unit: who is protected, likewise.
        mechanism_hash: hash of the mechanism, likewise.
    """

    epsilon: npt.NDArray[np.float64]
    remove: npt.NDArray[np.float64]
    add: npt.NDArray[np.float64]
    kind: Kind
    accountant: str
    failure_probability: float | None = None
    adjacency: Adjacency | None = None
    unit: Unit | None = None
    mechanism_hash: str | None = None

    def check_about(self, guarantee: Guarantee) -> None:
        """Refuse to stand beside a guarantee of something else.

        Raises:
            ValueError: if relation, unit or mechanism are told and are not the guarantee's.
        """
        for name in ("adjacency", "unit", "mechanism_hash"):
            mine, its = getattr(self, name), getattr(guarantee, name)
            if mine is not None and mine != its:
                raise ValueError(
                    f"profile: it describes {name}={_named(mine)} and the guarantee {_named(its)}, "
                    "so they cannot be combined; take profile(mechanism, "
                    "adjacency=guarantee.adjacency) of the same mechanism"
                )

    @property
    def holds_at_once(self) -> bool:
        """True if all values are upper bounds, for certain or together with a stated chance.

        Then the chords between them in e^ε are upper bounds as well
        (docs/theory/certification.md#thm-confidence-curve).
        """
        if self.kind is Kind.CONFIDENCE:
            return self.failure_probability is not None
        return self.kind in (Kind.EXACT, Kind.UPPER_BOUND)

    @property
    def delta(self) -> npt.NDArray[np.float64]:
        """The larger δ of the two directions."""
        return np.maximum(self.remove, self.add)


def _named(value: Adjacency | Unit | str) -> str:
    if isinstance(value, Unit):
        return repr(value.noun)
    return repr(value.value if isinstance(value, Adjacency) else value)


class Cost(enum.Enum):
    """Roughly how long one guarantee takes on two cores."""

    INSTANT = "under a second"
    SECONDS = "seconds"
    MINUTES = "minutes"
    HOURS = "hours"


@dataclasses.dataclass(frozen=True)
class Accountant(ABC):
    """One way of proving (ε, δ) for some pairs of scheme and strategy.

    A subclass states ``name`` and ``kind``, and ``adjacencies`` where it has theorems for more or
    other relations than zero-out; an instance is about one of them. ``register_accountant`` makes
    it known, so that mechanisms which it covers find it.

    Args:
        adjacency: the neighboring relation that its statements are about; by default the first of
            ``adjacencies``.

    Attributes:
        name: plain name, such as ``"balls-in-bins-renyi"``: what users give, and what guarantees
            and certificates store. No two registered accountants share it.
        display: its name in sentences, for people to read.
        formerly: names in files of earlier versions of what this accountant proves now.
        kind: how its statements are shown.
        adjacencies: the relations that it has theorems for.
        refines: whether it simulates only to improve on what deterministic accountants prove, which
            it asks itself: it answers instead of them.
        failure_probability: chance over its own draws that a statement of kind CONFIDENCE is false.
        truncation: whether its statements hold where a scheme cuts batches: it reads
            ``max_batch_size`` itself. By default it answers for no scheme that has one, whatever
            ``refusal`` says.

    Raises:
        TypeError: if ``adjacency`` is something else, or a subclass fixes it for all its instances.
        ValueError: if it has no theorems for that relation.
    """

    # None: the first of adjacencies, which __post_init__ puts here.
    adjacency: Adjacency = dataclasses.field(default=cast(Adjacency, None), kw_only=True)

    kind: ClassVar[Kind]
    adjacencies: ClassVar[tuple[Adjacency, ...]] = (Adjacency.ZERO_OUT,)
    refines: ClassVar[bool] = False
    truncation: ClassVar[bool] = False
    formerly: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Set on the class the field's default would silently overwrite it.
        if "adjacency" in cls.__dict__:
            raise TypeError(
                f"{cls.__name__}.adjacency: the adjacency belongs to each instance; list the "
                "relations for which the class has theorems, for instance adjacencies = "
                "(Adjacency.ADD_REMOVE,)"
            )

    def __post_init__(self) -> None:
        given: Adjacency | None = self.adjacency
        if given is None:
            object.__setattr__(self, "adjacency", self.adjacencies[0])
        checks.instance("adjacency", self.adjacency, Adjacency, example="Adjacency.ZERO_OUT")
        if self.adjacency not in self.adjacencies:
            raise ValueError(
                f"adjacency={self.adjacency.value!r}: the {self.display} accountant states "
                f"{self.relations} only"
            )

    @property
    @abstractmethod
    def name(self) -> str:
        """Plain name."""

    @property
    def display(self) -> str:
        """Name for people: the plain one, unless there is a better one."""
        return self.name

    @property
    def failure_probability(self) -> float:
        """Chance over its own draws that a statement of kind CONFIDENCE is false."""
        return 0.0

    @property
    def relations(self) -> str:
        """The relations that it has theorems for, in words."""
        return ", ".join(each.value for each in self.adjacencies)

    def under(self, adjacency: Adjacency) -> Self:
        """The same accountant about another relation.

        Raises:
            ValueError: if it has no theorems for it.
        """
        return dataclasses.replace(self, adjacency=adjacency)

    def among(self, attempts: int) -> Self:
        """The accountant of one of so many calibrations, of which what they say picks one.

        Itself, as it is never wrong; an accountant that simulates counts its chance of failure q as
        often, with δ_v + k q (1 - δ_v) = δ and k q = δ/1000, so that all of them rest on one δ_v
        (docs/theory/certification.md#thm-evr).

        Raises:
            ValueError: if it may be wrong, and says nothing of several attempts.
        """
        if self.kind not in (Kind.EXACT, Kind.UPPER_BOUND) and attempts > 1:
            raise ValueError(
                f"accountant={self.name!r} may be wrong with some probability, and choosing the "
                f"best of {attempts} calibrations increases it: override "
                f"{type(self).__name__}.among to count all attempts, or calibrate the chosen "
                "mechanism again"
            )
        return self

    @abstractmethod
    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """``None`` if the mechanism is covered, else why it is not, in one sentence."""

    def obstacle(self, mechanism: MatrixMechanism) -> str | None:
        """The reason why it states nothing about the mechanism, or ``None`` if it states something.

        Apart from ``refusal``: whether N is public, and whether batches are cut.
        """
        if reason := size_refusal(self.adjacency, mechanism) or self.refusal(mechanism):
            return reason
        return None if self.truncation else truncation_refusal(mechanism.scheme)

    def check_covers(self, mechanism: MatrixMechanism) -> None:
        """Raise where ``obstacle`` gives a reason.

        Raises:
            ValueError: with the reason.
        """
        if reason := self.obstacle(mechanism):
            raise ValueError(
                f"the {self.display} accountant does not cover this mechanism: {reason}"
            )

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """The reason why it answers for a covered mechanism only by name, or ``None``."""
        return None

    def kind_of(self, mechanism: MatrixMechanism) -> Kind:
        """The kind of its statement about this mechanism: ``kind``, unless it can say more."""
        return self.kind

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """The time that one guarantee for a mechanism that it covers takes."""
        return Cost.INSTANT

    @abstractmethod
    def guarantee(self, mechanism: MatrixMechanism, *, delta: float) -> Guarantee:
        """The least ε this accountant can show at δ (rounded up).

        Raises:
            ValueError: if the mechanism is refused or δ is not in (0, 1).
        """

    def restate(self, mechanism: MatrixMechanism, stated: Guarantee) -> Guarantee:
        """Its statement about the mechanism now, to be compared with what was stated.

        The least ε at the stated δ, or the least δ at the stated ε where that was what was asked:
        the two agree but for the rounding of searches. An accountant that simulates draws what it
        drew then.

        Args:
            mechanism: what was accounted for.
            stated: what this accountant is said to have stated of it.

        Raises:
            ValueError: if the mechanism is refused, or what was stated cannot be shown again.
        """
        return self.guarantee(mechanism, delta=stated.delta)

    @abstractmethod
    def profile(self, mechanism: MatrixMechanism, epsilon: npt.ArrayLike) -> Profile:
        """δ(ε) in both directions on a grid of ε ≥ 0."""

    @abstractmethod
    def calibrate(self, mechanism: MatrixMechanism, *, epsilon: float, delta: float) -> Guarantee:
        """The guarantee of the least σ (rounded up) that meets (ε, δ); it carries that σ.

        ``mechanism`` gives scheme and strategy; its own σ is ignored.

        Raises:
            ValueError: if no σ reaches the target.
        """


@dataclasses.dataclass(frozen=True)
class Availability:
    """Availability of an accountant for a mechanism: whether it answers, and if not, why.

    Attributes:
        accountant: the accountant.
        refusal: why it does not cover the mechanism, or ``None``.
        reserved: why it answers only when asked by name though it covers it, or ``None``.
        kind: how its statement would be shown, ``None`` if refused.
        cost: how long it would take, ``None`` if refused.
    """

    accountant: Accountant
    refusal: str | None
    reserved: str | None
    kind: Kind | None
    cost: Cost | None

    @classmethod
    def of(cls, accountant: Accountant, mechanism: MatrixMechanism) -> Availability:
        """Ask the accountant."""
        if refusal := accountant.obstacle(mechanism):
            return cls(accountant, refusal, None, None, None)
        kind, cost = accountant.kind_of(mechanism), accountant.cost(mechanism)
        return cls(accountant, None, accountant.reserved(mechanism), kind, cost)

    @property
    def name(self) -> str:
        """The accountant's plain name."""
        return self.accountant.name

    @property
    def reason(self) -> str | None:
        """``None`` if it answers by itself, else why not."""
        return self.refusal or self.reserved


def size_refusal(adjacency: Adjacency, mechanism: MatrixMechanism) -> str | None:
    """The reason why the mechanism does not fit the adjacency's idea of N, or ``None``.

    Zero-out and replace-one compare data sets of one size N, which is public, and dividing by N·p
    is right. Under add-or-remove N is private, and nothing public may be worked out with it.
    """
    scheme = mechanism.scheme
    if adjacency.public_size:
        if scheme.nominal_size is None:
            return None
        return (
            f"nominal_size={scheme.nominal_size} keeps the number of examples private, but it is "
            f"public under {adjacency.value}; leave nominal_size out, or use add_remove"
        )
    if scheme.nominal_size is not None:
        return None
    name = type(scheme).__name__
    hiding = [each for each, kind in scheme_types().items() if issubclass(kind, AnySizeScheme)]
    return (
        f"the number of examples is private under add_remove, but a run with this {name} divides "
        f"by its expected batch size N·p and prints N; use {' or '.join(hiding)} with "
        "nominal_size=, a public number that is not set from N"
    )


def truncation_refusal(scheme: Scheme) -> str | None:
    """The reason why a theorem on every drawn example says nothing about the scheme, or ``None``.

    Where batches are cut, whether one example is kept depends on which others are drawn, and it may
    displace one of them: the coins are no longer independent.
    """
    if scheme.max_batch_size is None:
        return None
    return (
        f"max_batch_size={scheme.max_batch_size} truncates batches, so examples are no longer "
        "drawn independently, as its theorem assumes; use max_batch_size=None, or an accountant "
        "for truncated sampling"
    )


def varying_noise(mechanism: MatrixMechanism) -> str | None:
    """Reason why an accountant of equal steps of C = c·I refuses the diagonal, or ``None``."""
    norms = mechanism.strategy.column_norms(mechanism.steps)
    if norms.min() < norms.max():
        return "it needs the same noise at every step, but the diagonal of the strategy varies"
    return None
