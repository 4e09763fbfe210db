"""Guarantees: the promise of a run, whom it protects, and how it was shown."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from typing import Any, assert_never

from dptrain.core import checks
from dptrain.core.json_value import parsed
from dptrain.core.text import capital


class Adjacency(enum.Enum):
    """The relation of two data sets that must be hard to tell apart; zero-out is the default.

    What a theorem needs to know of a relation is asked here. Whoever treats relations differently
    matches all of them, so that one that is added later is accounted for as none of these.
    """

    ZERO_OUT = "zero_out"
    ADD_REMOVE = "add_remove"
    REPLACE_ONE = "replace_one"

    @property
    def public_size(self) -> bool:
        """True if both data sets have the same number of examples, which then is public."""
        match self:
            case Adjacency.ZERO_OUT | Adjacency.REPLACE_ONE:
                return True
            case Adjacency.ADD_REMOVE:
                return False
            case _:
                assert_never(self)

    @property
    def one_side_empty(self) -> bool:
        """True if one of the two worlds has no contribution of the unit at all."""
        match self:
            case Adjacency.ZERO_OUT | Adjacency.ADD_REMOVE:
                return True
            case Adjacency.REPLACE_ONE:
                return False
            case _:
                assert_never(self)

    def sentence(self, unit: Unit) -> str:
        """The relation in words, for a reader who knows no symbols."""
        who = unit.noun
        match self:
            case Adjacency.ZERO_OUT:
                return f"the contribution of any one {who} is left out of every gradient"
            case Adjacency.ADD_REMOVE:
                return f"any one {who} is added or removed"
            case Adjacency.REPLACE_ONE:
                return f"any one {who} is replaced by another"
            case _:
                assert_never(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """The protected unit: one example, or one user with at most ``max_examples`` examples.

    With ``max_examples=None`` a user is protected whatever the number of their examples.

    Raises:
        TypeError: if a field is of another type.
        ValueError: if ``kind`` is neither ``"example"`` nor ``"user"``, or the bound is below 1.
    """

    kind: str = "example"
    max_examples: int | None = 1

    def __post_init__(self) -> None:
        checks.choice("kind", self.kind, ("example", "user"))
        if self.max_examples is not None:
            checks.integer("max_examples", self.max_examples)
        if self.kind == "example" and self.max_examples != 1:
            raise ValueError("an 'example' unit must have max_examples=1; use kind='user'")

    @property
    def noun(self) -> str:
        """The unit as it is named in the guarantee's sentence."""
        if self.kind == "example":
            return "training example"
        if self.max_examples is None:
            return "user (with all of their training examples, however many)"
        return f"user with up to {self.max_examples} training {self._examples}"

    @property
    def _examples(self) -> str:
        return "example" if self.max_examples == 1 else "examples"

    def protected(self, adjacency: Adjacency) -> str:
        """Sentence on what is protected and what is not, for somebody who knows no symbols."""
        if self.kind == "user":
            # Under any relation the graph is public, and so is that a user contributed.
            most, left_out = "however many examples that is", ""
            if self.max_examples is not None:
                most = f"at most {self.max_examples} {self._examples}, copies included"
                left_out = " Examples left out to keep to this bound were not used in training."
            other = "" if adjacency.one_side_empty else ", but not that the user contributed"
            return (
                f"everything that any one user contributed is protected ({most}){other}. The "
                "protection of a user does not depend on what other users contributed."
                f"{left_out} Which examples belong to which users counts as public and is not "
                "protected"
            )
        match adjacency:
            case Adjacency.ZERO_OUT:
                what = "the contribution of any one training example"
            case Adjacency.ADD_REMOVE:
                what = "any one training example, including whether it was in the data,"
            case Adjacency.REPLACE_ONE:
                what = "the content of any one training example"
            case _:
                assert_never(adjacency)
        number = "; the number of examples is not protected" if adjacency.public_size else ""
        return (
            f"{what} is protected. Several examples of one person are protected individually, not "
            f"together{number}"
        )


class Kind(enum.Enum):
    """The way in which a guarantee was shown; only ``ESTIMATE`` proves nothing.

    ``CONFIDENCE`` is a Monte Carlo bound for a noise level that was fixed beforehand: the claim is
    false with at most the stated probability over the accountant's own draws. It differs from
    ``VERIFIED``, where that probability has already been charged to δ (estimate-verify-release).
    """

    EXACT = "exact"
    UPPER_BOUND = "upper bound"
    VERIFIED = "verified"
    CONFIDENCE = "confidence bound"
    ESTIMATE = "estimate"

    @property
    def sentence(self) -> str:
        """Words on how far the number can be trusted."""
        return {
            Kind.EXACT: "computed exactly, up to rounding toward a larger ε",
            Kind.UPPER_BOUND: "a proven upper bound",
            Kind.VERIFIED: "verified by simulation, with the probability of a wrong verdict in δ",
            Kind.CONFIDENCE: "a bound by simulation, wrong with at most the stated probability",
            Kind.ESTIMATE: "an ESTIMATE WITHOUT PROOF, not to be quoted as a guarantee",
        }[self]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guarantee:
    """An (ε, δ) statement about one training run, with everything needed to check it.

    Attributes:
        epsilon: ε ≥ 0 (natural logarithm), possibly ``inf``.
        delta: δ in [0, 1].
        unit: who is protected.
        adjacency: the neighboring relation.
        scheme: the sampling scheme that ran, as its JSON value.
        strategy: the strategy matrix, as its JSON value.
        strategy_hash: SHA-256 of the strategy's coefficients.
        noise_multiplier: σ, not divided by a norm of C.
        steps_planned: the n that was accounted for.
        steps_executed: how many steps ran, or ``None`` before a run.
        accountant: name of the accountant.
        kind: how the statement was shown.
        mechanism_hash: hash of the ``MatrixMechanism``.
        notes: conditions and remarks that belong to the statement.
        certificate: evidence of a Monte Carlo verdict (seeds, grid, verdicts), or ``None``.
        noise_generator: what the run's normals are drawn from; ``None`` in an accountant's answer,
            which is about ideal Gaussians.
    """

    epsilon: float
    delta: float
    unit: Unit
    adjacency: Adjacency
    scheme: dict[str, Any]
    strategy: dict[str, Any]
    strategy_hash: str
    noise_multiplier: float
    steps_planned: int
    accountant: str
    kind: Kind
    mechanism_hash: str
    steps_executed: int | None = None
    notes: tuple[str, ...] = ()
    certificate: dict[str, Any] | None = None
    noise_generator: str | None = None

    def __post_init__(self) -> None:
        if self.epsilon != math.inf:
            object.__setattr__(self, "epsilon", checks.number("epsilon", self.epsilon, minimum=0))
        for name, most in (("delta", 1.0), ("noise_multiplier", None)):
            value = checks.number(name, getattr(self, name), minimum=0, maximum=most)
            object.__setattr__(self, name, value)
        checks.integer("steps_planned", self.steps_planned)
        if self.steps_executed is not None:
            checks.integer("steps_executed", self.steps_executed, minimum=0)
        for name in ("strategy_hash", "accountant", "mechanism_hash"):
            checks.text(name, getattr(self, name))
        if self.noise_generator is not None:
            checks.text("noise_generator", self.noise_generator)
        for name in ("scheme", "strategy"):
            checks.text(
                f"{name}['type']", checks.instance(name, getattr(self, name), dict).get("type")
            )
        if self.certificate is not None:
            checks.instance("certificate", self.certificate, dict)
        for note in checks.instance("notes", self.notes, tuple):
            checks.text("notes", note)
        for name, kind in (("unit", Unit), ("adjacency", Adjacency), ("kind", Kind)):
            checks.instance(name, getattr(self, name), kind)

    def after(self, steps_executed: int) -> Guarantee:
        """The same planned guarantee, stating how many steps have run (stopping early is free)."""
        return dataclasses.replace(self, steps_executed=steps_executed)

    def with_notes(self, *notes: str) -> Guarantee:
        """The same guarantee with further conditions attached."""
        new = tuple(note for note in notes if note not in self.notes)
        return dataclasses.replace(self, notes=self.notes + new)

    def drawn_by(self, generator: str, *, caveats: tuple[str, ...] = ()) -> Guarantee:
        """The same guarantee for a run whose normals come from ``generator``.

        Args:
            generator: its name.
            caveats: ways in which what is added is not the noise that was accounted for; they
                become notes, and leave nothing but an estimate.
        """
        kind = Kind.ESTIMATE if caveats else self.kind
        named = dataclasses.replace(self, noise_generator=generator, kind=kind)
        return named.with_notes(*caveats)

    @property
    def plain(self) -> str:
        """Sentence on who is protected and what is not, for somebody who knows no symbols."""
        if self.epsilon == math.inf or self.delta == 1:
            return "In plain words: nothing and nobody is protected."
        sure = ", if the estimate is right" if self.kind is Kind.ESTIMATE else ""
        return (
            f"In plain words, to the extent given by ε and δ{sure}: "
            f"{self.unit.protected(self.adjacency)}."
        )

    def __str__(self) -> str:
        ran = ""
        if self.steps_executed is not None and self.steps_executed != self.steps_planned:
            ran = f" ({self.steps_executed} of them have run; the guarantee is the planned one)"
        if self.steps_executed == self.steps_planned:
            ran = " (all of them have run)"
        source = f", drawn by {self.noise_generator}" if self.noise_generator else ""
        notes = "".join(f" {capital(note.rstrip('.'))}." for note in self.notes)
        return (
            f"Training is (ε = {self.epsilon:.6g}, δ = {self.delta:.6g})-differentially private "
            f"for each {self.unit.noun}: anything observed of the released model and all its "
            f"{self.steps_planned} noisy updates{ran} would have been about as likely, within a "
            f"factor e^ε and up to probability δ, on a neighboring data set, in which "
            f"{self.adjacency.sentence(self.unit)}. Batches were drawn by {self.scheme['type']}; "
            f"the noise has correlation {self.strategy['type']} and multiplier "
            f"σ = {self.noise_multiplier:.6g}{source}. The statement is {self.kind.sentence} "
            f"(accountant: {self.accountant}). {self.plain}{notes}"
        )

    def to_json(self) -> str:
        """JSON text that ``from_json`` reads back to an equal value (ε = ∞ as ``"inf"``)."""
        value = dataclasses.asdict(self)
        value["adjacency"] = self.adjacency.value
        value["kind"] = self.kind.value
        value["epsilon"] = self.epsilon if self.epsilon != float("inf") else "inf"
        return json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Guarantee:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: if a field is missing, unknown or of an unknown kind.
        """
        value = parsed(text, "guarantee")
        if not isinstance(value, dict):
            raise ValueError(f"not a guarantee: {checks.shown(value)}")
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(value) - known):
            raise ValueError(f"unknown guarantee field(s) {unknown}; known: {sorted(known)}")
        try:
            return cls(
                **{
                    **value,
                    "epsilon": math.inf if value["epsilon"] == "inf" else value["epsilon"],
                    "unit": Unit(**value["unit"]),
                    "adjacency": Adjacency(value["adjacency"]),
                    "kind": Kind(value["kind"]),
                    "notes": tuple(checks.instance("notes", value.get("notes", []), list)),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a guarantee: {error}") from error
