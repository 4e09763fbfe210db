"""Families that strangers join: what a class must be for its values to be stored by its name."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from dptrain.core import checks
from dptrain.core.json_value import JsonValue

_RESERVED = ("type", "family")  # what the JSON text of a value says besides its fields


def checked_member(member: Any, base: Any, *, call: str) -> None:
    """Refuse a class whose values could not be stored and found again by its name.

    Args:
        member: what was handed to a ``register_…`` function.
        base: the family's class, for instance ``Strategy``.
        call: that function's name, for the messages.

    Raises:
        TypeError: if it is no class of the family, is abstract, or is no frozen dataclass.
        ValueError: if its name is another member's, or cannot be stored, or a field's is reserved.
    """
    start = f"{call}({getattr(member, '__name__', checks.shown(member))})"
    if not isinstance(member, type) or not issubclass(member, base):
        found = "a value: hand over its class" if isinstance(member, base) else "something else"
        raise TypeError(f"{start}: must be a subclass of dptrain's {base.__name__}, not {found}")
    if missing := sorted(getattr(member, "__abstractmethods__", ())):
        raise TypeError(f"{start}: the class is abstract, since it lacks {', '.join(missing)}")
    if inspect.isabstract(member) or JsonValue in member.__bases__:
        raise TypeError(f"{start}: this is the base class itself; register a class of your own")
    parameters = vars(member).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise TypeError(
            f"{start}: must be a frozen dataclass, whose fields are stored; decorate it with "
            "@dataclasses.dataclass(frozen=True, kw_only=True) below the registration"
        )
    if taken := [f.name for f in dataclasses.fields(member) if f.name in _RESERVED]:
        raise ValueError(f"{start}: the field {taken[0]!r} has a reserved name; choose another")
    if member.__module__.partition(".")[0] != "dptrain":
        base.family_members()  # so that a name that is taken is found now
    known = JsonValue._families[base._family].get(member.__name__)
    if known is None:
        raise ValueError(
            f"{start}: values are stored by the name of their class, but classes whose name begins "
            "with an underscore or that have ABC as a base cannot be stored; rename the class or "
            "drop ABC"
        )
    if known is not member:
        raise ValueError(
            f"{start}: the name is already used by {known.__module__}.{known.__qualname__}; choose "
            "another"
        )
