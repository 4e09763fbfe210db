"""Groups of a configuration that are a value of one of several types, named by ``type``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from dptrain.clipping.base import ClippingStyle
from dptrain.core import JsonValue, did_you_mean
from dptrain.strategies import Strategy, strategy_types


def members_of(base: type[JsonValue]) -> dict[str, type]:
    """The concrete types of a family by name: all that have been imported."""
    return {
        name: member
        for name, member in sorted(JsonValue._families[base._family].items())
        if dataclasses.is_dataclass(member) and not inspect.isabstract(member)
    }


def named_type(
    group: str,
    settings: Mapping[str, Any],
    members: Mapping[str, type],
    former: Mapping[str, str] = MappingProxyType({}),
) -> type:
    """The member that ``settings["type"]`` names.

    Args:
        group: name of the group.
        settings: its entries.
        members: the types by name.
        former: what to use instead of types that no longer exist.

    Raises:
        ValueError: naming the field, the value and the nearest known type.
    """
    name: Any = settings.get("type")
    if isinstance(name, str) and name in former:
        raise ValueError(f"{group}.type={name} belongs to an earlier format: use {former[name]}")
    if name not in members:
        hint = did_you_mean(str(name), members)
        raise ValueError(f"{group}.type={name!r}: {hint}choose one of {', '.join(members)}")
    return members[name]


def stated_fields(
    group: str,
    settings: Mapping[str, Any],
    *,
    allowed: Iterable[str],
    required: Iterable[str] = (),
) -> dict[str, Any]:
    """The entries but ``type``, without those that are null (they take the type's default).

    Raises:
        ValueError: for an entry that the type does not have, or one that it needs and lacks.
    """
    name, allowed = settings.get("type"), list(allowed)
    given = {key: value for key, value in settings.items() if key != "type" and value is not None}
    if unknown := [key for key in given if key not in allowed]:
        hint = did_you_mean(unknown[0], allowed, prefix=f"{group}.")
        has = f"its fields are {', '.join(allowed)}" if allowed else "it has no fields"
        raise ValueError(
            f"{group}.{unknown[0]}={given[unknown[0]]!r}: {name} has no field {unknown[0]!r}; "
            f"{hint}{has}. Remove it, or set it to null"
        )
    if missing := [key for key in required if key not in given]:
        raise ValueError(
            f"{group}.type={name} needs {group}.{missing[0]}: set it (all of its fields: "
            f"{', '.join(allowed)})"
        )
    return given


@contextmanager
def named_in_errors(group: str) -> Iterator[None]:
    """Make errors of a value that is made meanwhile name the group, as ValueErrors."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{group}: {error}") from error


def required_of(arguments: Mapping[str, inspect.Parameter]) -> list[str]:
    """The arguments that have no default."""
    return [name for name, each in arguments.items() if each.default is inspect.Parameter.empty]


def _built(group: str, base: Any, settings: Mapping[str, Any], members: Mapping[str, type]) -> Any:
    """The value of class ``settings["type"]`` with the other entries as its fields."""
    member = named_type(group, settings, members)
    fields = inspect.signature(member).parameters
    given = stated_fields(group, settings, allowed=fields, required=required_of(fields))
    with named_in_errors(group):
        return base.from_dict({"type": member.__name__, **given})


def build_strategy(settings: Mapping[str, Any]) -> Strategy:
    """The strategy of class ``settings["type"]`` with the other entries as its fields.

    Entries that are null are left out, so that they take the class's own default.

    Raises:
        ValueError: naming the field of the configuration, the value, and what is known instead.
    """
    return _built("strategy", Strategy, settings, strategy_types())


def build_clipping(settings: Mapping[str, Any]) -> ClippingStyle:
    """The clipping style of class ``settings["type"]``, likewise.

    Raises:
        ValueError: naming the field of the configuration, the value, and what is known instead.
    """
    return _built("clipping", ClippingStyle, settings, members_of(ClippingStyle))
