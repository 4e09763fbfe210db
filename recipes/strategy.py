"""Any strategy of dptrain from the ``strategy`` group of a configuration."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from dptrain.registry import JsonValue
from dptrain.strategies import Strategy


def strategy_types() -> dict[str, type]:
    """The strategies that can be named, by name: all that have been imported."""
    return {
        name: member
        for name, member in sorted(JsonValue._families[Strategy._family].items())
        if dataclasses.is_dataclass(member) and not inspect.isabstract(member)
    }


def build_strategy(settings: Mapping[str, Any]) -> Strategy:
    """The strategy of class ``settings["type"]`` with the other entries as its fields.

    Entries that are null are left out, so that they take the class's own default.

    Raises:
        ValueError: naming the field of the configuration, the value, and what is known instead.
    """
    members = strategy_types()
    name = settings.get("type")
    if name not in members:
        near = difflib.get_close_matches(str(name), list(members), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"strategy.type={name!r}: {hint}choose one of {', '.join(members)}")
    given = {key: value for key, value in settings.items() if key != "type" and value is not None}
    fields = {field.name: field for field in dataclasses.fields(members[name]) if field.init}
    if unknown := [key for key in given if key not in fields]:
        has = f"its fields are {', '.join(fields)}" if fields else "it has no fields"
        raise ValueError(
            f"strategy.{unknown[0]}={given[unknown[0]]!r}: {name} has no field {unknown[0]!r}; "
            f"{has}. Take it out, or set it to null"
        )
    missing = [
        key
        for key, field in fields.items()
        if key not in given
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(
            f"strategy.type={name} needs strategy.{missing[0]}: set it (all of its fields: "
            f"{', '.join(fields)})"
        )
    try:
        return Strategy.from_dict({"type": name, **given})
    except ValueError as error:
        raise ValueError(f"strategy: {error}") from error
