"""Values that write themselves to JSON and are found again by the name of their type."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from dptrain.core.text import did_you_mean


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, no spaces, shortest float that reads back the same."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 (hex) of ``canonical_json``: equal in every process and Python version."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def parsed(text: str | bytes, what: str) -> Any:
    """The value of a JSON text.

    Raises:
        TypeError: if it is no text.
        ValueError: if it is no JSON, naming ``what`` was expected.
    """
    if not isinstance(text, str | bytes):
        raise TypeError(f"text={text!r:.200}: a {what} must be read from its JSON text")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the text is not a {what}, and not valid JSON: {error}") from error


class JsonValue:
    """Base of frozen dataclasses that are stored by type name and fields.

    A direct base such as ``Scheme`` calls ``class Scheme(JsonValue, family="scheme")``; its
    concrete subclasses (those that do not name ABC as a base) register themselves under their class
    name, and so does a base that is concrete. With ``joined_by``, a module that is imported before
    members are looked up by name, a family has members that nobody needs to have imported.
    """

    _families: ClassVar[dict[str, dict[str, type]]] = {}
    _bases: ClassVar[dict[str, type[JsonValue]]] = {}
    _joined_by: ClassVar[dict[str, str]] = {}
    _family: ClassVar[str] = ""
    # Types that files of earlier layouts name, and what to write instead.
    former_names: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(
        cls, family: str | None = None, joined_by: str | None = None, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if family is not None:
            if joined_by is not None:
                JsonValue._joined_by[family] = joined_by
            cls._family = family
            JsonValue._families.setdefault(family, {})
            JsonValue._bases[family] = cls
        if cls._family and ABC not in cls.__bases__ and not cls.__name__.startswith("_"):
            members = JsonValue._families[cls._family]
            known = members.get(cls.__name__)
            if known is not None and _origin(known) != _origin(cls):
                raise TypeError(
                    f"{_origin(cls)}: a {cls._family} of this name already exists "
                    f"({_origin(known)}), and its files would be read as this class; choose "
                    "another name"
                )
            members[cls.__name__] = cls

    def _settle(self, **fields: Any) -> None:
        """Store checked fields, from ``__post_init__``: the value is frozen to everybody else."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """``{"type": class name, field: value, ...}`` with tuples as lists.

        A field that holds a value of a family becomes its dictionary, the family's name added.

        Raises:
            TypeError: if what is written would be read as a value of another class of that name.
        """
        known = JsonValue._families[self._family].get(type(self).__name__)
        if known is not None and _origin(known) != _origin(type(self)):
            raise TypeError(
                f"{_origin(type(self))} cannot be stored: a {self._family} of this name already "
                f"exists ({_origin(known)}), and the JSON text would be read as that one; choose "
                "another name"
            )
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        value: dict[str, Any] = {"type": type(self).__name__}
        for field in fields:
            item = getattr(self, field.name)
            if isinstance(item, tuple):
                item = list(item)
            elif isinstance(item, JsonValue):
                item = {"family": item._family, **item.to_dict()}
            elif isinstance(item, str):
                item = str(item)  # without what a subclass of str knows besides
            value[field.name] = item
        return value

    @classmethod
    def family_members(cls) -> Mapping[str, type]:
        """Classes of the family by name, those that join it on demand among them."""
        if (module := JsonValue._joined_by.get(cls._family)) is not None:
            importlib.import_module(module)
        return JsonValue._families[cls._family]

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Self:
        """Build the registered type that ``value["type"]`` names.

        Raises:
            ValueError: if the type or a field is unknown, or a field is out of range.
        """
        members = cls.family_members()
        if not isinstance(value, Mapping):
            raise ValueError(
                f"a {cls._family} must be read from a mapping, not from {value!r:.200}"
            )
        value = dict(value)
        name = value.pop("type", None)
        if isinstance(name, str) and name in cls.former_names:
            now = cls.former_names[name]
            raise ValueError(f"{cls._family} type {name!r} belongs to an earlier format: use {now}")
        if not isinstance(name, str) or name not in members:
            hint = did_you_mean(str(name), members)
            raise ValueError(f"unknown {cls._family} type {name!r}; {hint}known: {sorted(members)}")
        member = members[name]
        known = {field.name for field in dataclasses.fields(member)}
        if unknown := sorted(map(str, set(value) - known)):
            hint = did_you_mean(unknown[0], known)
            raise ValueError(f"{name} has no field(s) {unknown}; {hint}known: {sorted(known)}")
        fields = {key: _from_json(item) for key, item in value.items()}
        try:
            made: Self = member(**fields)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from error
        return made


def _origin(member: type) -> str:
    """Qualified name of a class, which does not change when its module is loaded again."""
    return f"{member.__module__}.{member.__qualname__}"


def _from_json(item: Any) -> Any:
    """A field's value, from what ``JsonValue.to_dict`` made of it."""
    if isinstance(item, list):
        return tuple(item)
    if isinstance(item, dict):
        item = dict(item)
        family = item.pop("family", None)
        if not isinstance(family, str) or family not in JsonValue._bases:
            raise ValueError(f"unknown family {family!r}; known: {sorted(JsonValue._bases)}")
        return JsonValue._bases[family].from_dict(item)
    return item
