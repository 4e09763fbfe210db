"""The fields of a privacy statement that follow from the mechanism inside, worked out again."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from dptrain.accounting import (
    DeterministicAccountant,
    Profile,
    mechanism_of,
    restate,
    stated_accountant,
)
from dptrain.accounting.base import AVERAGED, PUBLIC_GRAPH
from dptrain.core import Guarantee, Kind
from dptrain.reporting.publication.whole_statement import (
    PROVEN,
    WholeStatement,
    is_statement,
    read_statement,
    stated_guarantee,
)
from dptrain.reporting.published_profile import as_shown, read_profile
from dptrain.reporting.report import conditions, statement_text

TOLERANCE = 1e-6
"""By how much of itself an ε or δ worked out again may be the larger one.

Sentences give six digits. Sums of n terms, each rounded, are off by n units of 1.1e-16, and the
searches for ε end within 1e-12 of it, so that for any n up to a billion another processor's
numbers agree to this.
"""

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_UNSHOWN = (
    "that this mechanism ran: its batches drawn, its gradients clipped and its noise added as they "
    "are told here, on data in which the unit is what it is called, with nothing else released"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of a verification for each field of a statement.

    Attributes:
        guarantee: as it was stated.
        verified: fields that follow from the mechanism inside, and how.
        declared: fields that do not follow from it: the word of whoever wrote the statement.
        refuted: what does not match, in whole sentences; empty if the guarantee is reproduced.
    """

    guarantee: Guarantee
    verified: tuple[str, ...]
    declared: tuple[str, ...]
    refuted: tuple[str, ...]

    @property
    def reproduced(self) -> bool:
        """True if the guarantee was reproduced, and nothing beside it says otherwise."""
        return not self.refuted

    def __str__(self) -> str:
        lines = [
            *(f"verified: {each}" for each in self.verified),
            *(f"declared, not verified: {each}" for each in self.declared),
            *(f"DOES NOT MATCH: {each}" for each in self.refuted),
        ]
        return "\n".join(lines)


def verify_statement(value: Mapping[str, Any], text: str | None = None) -> Verification:
    """Work out again what a statement says, as far as that follows from the mechanism inside.

    The mechanism is built from scheme, strategy and σ, and the accountant that is named is asked
    anew (``restate``); a simulation is drawn again from its seed, at the cost of the first time.
    What is stated may be weaker than what is found, never stronger, but for ``TOLERANCE``.

    Args:
        value: of a ``privacy_report.json``, which has to be whole; of another file that holds a
            ``guarantee``; or of a bare guarantee.
        text: the Markdown beside it, if it has one: what people read has to say the same, so the
            value has to be a whole statement then.

    Raises:
        ValueError: if it is no statement, of a format that is not known here, or not whole.
    """
    if not isinstance(value, Mapping):
        raise ValueError("it is not a privacy statement, which must be a JSON object")
    bare = {"epsilon", "delta", "unit", "adjacency"} <= set(value)
    read = read_statement(value) if not bare and is_statement(value) else None
    if not bare and not isinstance(value.get("guarantee"), Mapping):
        raise ValueError("it is not a privacy statement, since it has no 'guarantee'")
    guarantee = stated_guarantee(value if bare else value["guarantee"])
    if read is None and text is not None:
        raise ValueError(
            "it is a guarantee and not a complete privacy statement, so the Markdown file of the "
            "same name cannot be compared with it: verify the complete statement, or rename the "
            "guarantee's file"
        )
    found = _Findings(guarantee)
    found.check_guarantee()
    if read is not None:
        found.check_statement(value, read)
        if text is not None:
            found.check_text(value, text)
    elif not bare:
        found.check_beside(value)
    found.declared.append(_UNSHOWN)
    return Verification(
        guarantee=guarantee,
        verified=tuple(found.verified),
        declared=tuple(found.declared),
        refuted=tuple(found.refuted),
    )


class _Findings:
    """The lines of a verification so far."""

    def __init__(self, guarantee: Guarantee) -> None:
        self.stated = guarantee
        self.verified: list[str] = []
        self.declared: list[str] = []
        self.refuted: list[str] = []

    def same(self, what: str, stated: Any, found: Any, *, shown: str = "") -> None:
        """Note a field as verified if both values are equal, as refuted otherwise."""
        if stated == found:
            self.verified.append(shown or f"{what} = {stated}")
        else:
            self.refuted.append(f"{what} is stated as {stated}, but computed as {found}")

    def check_guarantee(self) -> None:
        stated = self.stated
        if stated.kind is Kind.ESTIMATE:
            self.refuted.append("it is an estimate, which proves nothing: there is no guarantee")
        if not math.isfinite(stated.epsilon) or stated.delta >= 1:
            self.refuted.append(
                f"ε = {stated.epsilon:g} at δ = {stated.delta:g} promises nothing: there is no "
                "guarantee"
            )
        if self.refuted:
            return
        if stated.accountant.startswith("individual "):
            self.refuted.append(
                f"the {stated.accountant} computed ε from the gradients of each example during "
                "training, so it does not follow from the mechanism and cannot be verified from a "
                "file"
            )
            return
        try:
            mechanism = mechanism_of(stated)
            self.verified.append(
                f"noise multiplier σ = {stated.noise_multiplier:.6g}, with scheme and strategy of "
                f"the mechanism {stated.mechanism_hash}"
            )
            again = restate(stated)
        except ValueError as error:
            self.refuted.append(f"the guarantee is not reproduced: {error}")
            return
        coefficients = mechanism.strategy.coefficient_hash
        self.same("strategy hash", stated.strategy_hash, coefficients)
        self._numbers(again)
        self.same("how it was shown", stated.kind.value, again.kind.value)
        self.same("accountant", stated.accountant, again.accountant)
        self.same("protected unit", stated.unit.noun, again.unit.noun)
        self.same("adjacency", stated.adjacency.value, again.adjacency.value)
        self.same("steps planned", stated.steps_planned, again.steps_planned)
        self._certificate(again)
        self._notes(again)
        executed = stated.steps_executed
        if executed is not None and executed > stated.steps_planned:
            self.refuted.append(
                f"{executed} steps were executed, but the guarantee covers {stated.steps_planned}"
            )
        elif executed is not None:
            self.declared.append(f"steps executed = {executed}")
        if stated.noise_generator is not None:
            self.declared.append(f"noise generator: {stated.noise_generator}")
        if "graph" in stated.scheme:
            self.declared.append("the sizes of the graph of users, as the scheme states them")

    def _numbers(self, again: Guarantee) -> None:
        stated, most = self.stated, 1.0 + TOLERANCE
        if again.epsilon <= stated.epsilon * most and again.delta <= stated.delta * most:
            self.verified.append(
                f"ε = {stated.epsilon:.6g} at δ = {stated.delta:.6g}: {again.accountant} computes "
                f"ε = {again.epsilon:.6g} at δ = {again.delta:.6g}"
            )
        else:
            self.refuted.append(
                f"(ε = {stated.epsilon:.6g}, δ = {stated.delta:.6g}) is stated, but "
                f"{again.accountant} proves only (ε = {again.epsilon:.6g}, δ = {again.delta:.6g}) "
                "for this mechanism"
            )

    def _certificate(self, again: Guarantee) -> None:
        stated, found = self.stated.certificate, again.certificate
        if stated is None and found is None:
            return
        if _alike(stated, found):
            self.verified.append("certificate: its seed reproduces its samples and verdicts")
            self.declared.append("that no other seed was tried before that of the certificate")
        else:
            self.refuted.append("its seed does not reproduce the certificate")

    def _notes(self, again: Guarantee) -> None:
        left = list(self.stated.notes)
        for note in again.notes:
            match = next((each for each in left if _same_text(each, note)), None)
            if match is None and (again.certificate is not None or _is_condition(note)):
                self.refuted.append(f"a note of the accountant's is missing or changed: {note}")
            elif match is None:
                self.verified.append(f"the accountant notes, and the statement does not: {note}")
            else:
                left.remove(match)
                self.verified.append(f"note: {match}")
        self.declared += [f"note: {each}" for each in left]

    def check_statement(self, value: Mapping[str, Any], read: WholeStatement) -> None:
        """Check the fields of a statement beside its guarantee."""
        stated = self.stated
        self.same(
            "the sentence", value["sentence"], str(stated), shown="the sentence, by its words"
        )
        if value["conditions"] == conditions(stated):
            self.verified.append("the conditions are those of such a guarantee")
        else:
            self.refuted.append("the conditions are not those of such a guarantee")
        self.check_beside(value)
        if "proven_profile" in value:
            self._profile("the proven curve", value["proven_profile"], shown=False)
        self._attacks(value["attacks"], read)
        facts = read.facts or {}
        self.declared += [
            f"run.{key}: {_short(each)}" for key, each in facts.items() if each is not None
        ]

    def check_beside(self, value: Mapping[str, Any]) -> None:
        """Check the curve, if there is one; unknown fields count as declared."""
        if "profile" in value:
            self._profile("the curve", value["profile"], shown=True)
        checked = {"format", "sentence", "guarantee", "conditions", "profile", "proven_profile"}
        checked |= {"attacks", "run"} if is_statement(value) else set()
        self.declared += [
            f"{name}: {_short(told)}" for name, told in value.items() if name not in checked
        ]

    def check_text(self, value: Mapping[str, Any], text: str) -> None:
        """Check the Markdown, line by line."""
        try:
            due = statement_text(value).splitlines()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.refuted.append(f"the Markdown cannot be generated again from the JSON: {error}")
            return
        told = text.splitlines()
        for number, (one, other) in enumerate(itertools.zip_longest(told, due, fillvalue=""), 1):
            if not _same_text(one, other):
                self.refuted.append(
                    f"line {number} of the Markdown is {_short(one)}, but the JSON gives "
                    f"{_short(other)}"
                )
                return
        self.verified.append(f"the Markdown, {len(told)} lines, agrees with the JSON")

    def _profile(self, what: str, value: Any, *, shown: bool) -> None:
        """Check a curve: as it is shown beside the guarantee, or as its accountant computes it."""
        try:
            profile = read_profile(value)
            if profile.kind not in PROVEN:
                self.declared.append(f"{what} δ(ε), {profile.kind.sentence}")
                return
            found = self._curve(profile, shown=shown)
        except ValueError as error:
            self.refuted.append(f"{what} δ(ε) is not reproduced: {error}")
            return
        for side in ("remove", "add"):
            told, least = getattr(profile, side), getattr(found, side)
            lower = np.flatnonzero(told < least * (1.0 - TOLERANCE))
            if lower.size:
                at = int(lower[0])
                self.refuted.append(
                    f"{what} states δ = {told[at]:.6g} ({side}) at ε = {profile.epsilon[at]:.6g}, "
                    f"but the accountant computes {least[at]:.6g}"
                )
                return
        self.same(
            "how the curve was shown",
            profile.kind.value,
            found.kind.value,
            shown=f"{what} δ(ε) at {profile.epsilon.size} points, {profile.kind.sentence}",
        )

    def _curve(self, profile: Profile, *, shown: bool) -> Profile:
        mechanism = mechanism_of(self.stated)
        member = stated_accountant(profile.accountant, self.stated.adjacency)
        if not isinstance(member, DeterministicAccountant):
            raise ValueError(f"{member.name} simulates, so its curve is not proven")
        found = member.profile(mechanism.participants, profile.epsilon)
        return as_shown(found, self.stated) if shown else found

    def _attacks(self, value: Mapping[str, Any], read: WholeStatement) -> None:
        """Check what an attack can reach; that there is no curve is its author's word."""
        refused = read.refused
        try:
            limits, proven = read.limits, read.proven is not None
        except ValueError as error:
            self.refuted.append(f"what an attack can reach cannot be computed: {error}")
            return
        due = {"sentence": str(limits), **limits.summary(), "curve_refused": refused}
        if _alike(value, due) and proven is (refused is None):
            self.verified.append("what an attack can reach follows from ε, δ and the curve")
        else:
            self.refuted.append("what an attack can reach does not follow from ε, δ and the curve")
        if refused is not None:
            self.declared.append(f"no curve supports what an attack can reach: {refused}")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _is_condition(note: str) -> bool:
    """True if a note belongs to every statement about users, and is no remark on a method."""
    return note == PUBLIC_GRAPH or note.startswith(AVERAGED.partition("{")[0])


def _alike(stated: Any, found: Any) -> bool:
    """True if both values are equal, but for the last digits of numbers."""
    if isinstance(stated, Mapping) and isinstance(found, Mapping):
        return stated.keys() == found.keys() and all(_alike(stated[k], found[k]) for k in found)
    if isinstance(stated, list | tuple) and isinstance(found, list | tuple):
        pairs = zip(stated, found, strict=False)
        return len(stated) == len(found) and all(_alike(*pair) for pair in pairs)
    if isinstance(stated, float) or isinstance(found, float):
        numbers = all(type(each) in (int, float) for each in (stated, found))
        return numbers and math.isclose(stated, found, rel_tol=TOLERANCE, abs_tol=1e-300)
    return type(stated) is type(found) and bool(stated == found)


def _same_text(one: str, other: str) -> bool:
    """True for the same words, and numbers that differ by no more than their last of six digits."""
    if _NUMBER.split(one) != _NUMBER.split(other):
        return False
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=2e-5) for a, b in pairs)
