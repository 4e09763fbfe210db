"""A privacy statement's JSON as it is read: of this format, and with every field that belongs."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from dptrain.accounting import Profile, TradeOff
from dptrain.core import Guarantee, Kind
from dptrain.reporting.publication.run_facts import RunFacts
from dptrain.reporting.published_profile import read_profile

FORMAT = 3
PROVEN = (Kind.EXACT, Kind.UPPER_BOUND)
"""Kinds of curves that hold at every ε for certain."""
_SCHEMA = "privacy_report.schema.json"
_ALSO_ELSEWHERE = ("guarantee", "profile", "attacks")  # fields of other files with a guarantee, too


@dataclasses.dataclass(frozen=True)
class WholeStatement:
    """A statement's JSON of which no field is missing.

    Attributes:
        date: when it was written, YYYY-MM-DD.
        facts: what was declared (``RunFacts.to_dict``), if anything was.
    """

    value: Mapping[str, Any]
    guarantee: Guarantee
    date: str
    facts: Mapping[str, Any] | None

    @property
    def profile(self) -> Profile | None:
        """The curve that is shown, if there is one."""
        return read_profile(self.value["profile"]) if "profile" in self.value else None

    @property
    def proven(self) -> Profile | None:
        """The curve behind ``limits``, if there is one."""
        if "proven_profile" in self.value:
            return read_profile(self.value["proven_profile"])
        found = self.profile
        return found if found is not None and found.kind in PROVEN else None

    @property
    def refused(self) -> str | None:
        """The reason why there is no curve behind ``limits``, or ``None``."""
        told = self.value["attacks"]["curve_refused"]
        return None if told is None else str(told)

    @functools.cached_property
    def limits(self) -> TradeOff:
        """The limits of what an attack can reach."""
        return TradeOff.of(self.guarantee, self.proven)


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a statement: every field of ``statement``, and what it is."""
    text = resources.files("dptrain.reporting").joinpath(_SCHEMA).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def is_statement(value: Mapping[str, Any]) -> bool:
    """True if a JSON object has a field that only statements have, whole or not."""
    return bool((set(schema()["properties"]) - set(_ALSO_ELSEWHERE)) & set(value))


def stated_guarantee(value: Any) -> Guarantee:
    """The guarantee of a JSON value, of which no field is left out."""
    guarantee = Guarantee.from_json(json.dumps(value))
    _check_whole(value, schema()["properties"]["guarantee"], "guarantee")
    return guarantee


def read_statement(value: Mapping[str, Any]) -> WholeStatement:
    """Read a statement, if it is whole.

    Raises:
        ValueError: if it is no statement, of another format, or a field is missing or wrong.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("guarantee"), Mapping):
        raise ValueError("it is not a privacy statement, since it has no 'guarantee'")
    told = value.get("format", FORMAT)
    if type(told) is not int or told != FORMAT:
        raise ValueError(
            f"its format is {told!r}, and this version of dptrain knows {FORMAT}: read it with the "
            "version that wrote it, or create a new statement with this one (privacy_report)"
        )
    guarantee = Guarantee.from_json(json.dumps(value["guarantee"]))
    facts, known = value.get("run"), {field.name for field in dataclasses.fields(RunFacts)}
    if "run" in value and (not isinstance(facts, Mapping) or set(facts) != known):
        raise ValueError(
            f"its 'run' is not a set of facts about a run: the fields are {sorted(known)}"
        )
    _check_whole(value, schema(), "privacy statement")
    return WholeStatement(value, guarantee, _checked_date(value["date"]), facts)


def _check_whole(value: Mapping[str, Any], described: Mapping[str, Any], what: str) -> None:
    if missing := list(_missing(value, described)):
        raise ValueError(
            f"it is not a complete {what}: {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing, and a part of a statement cannot be "
            "verified. Use the file as dptrain wrote it"
        )


def _missing(value: Any, described: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Names of required fields that are missing, at any depth."""
    for inner in described.get("anyOf", ()):
        if value is not None:
            yield from _missing(value, inner, where)
    required, properties = described.get("required", ()), described.get("properties", {})
    if (required or properties) and not isinstance(value, Mapping):
        yield where.rstrip(".")
        return
    yield from (f"{where}{name}" for name in required if name not in value)
    for name, inner in properties.items():
        if name in value:
            yield from _missing(value[name], inner, f"{where}{name}.")


def _checked_date(value: Any) -> str:
    try:
        if datetime.date.fromisoformat(value).isoformat() == value:
            return str(value)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"its date {value!r} is not valid: must be YYYY-MM-DD")
