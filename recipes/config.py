"""Typed configurations from a YAML file and ``field=value`` arguments, with helpful errors."""

from __future__ import annotations

import dataclasses
import difflib
import json
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import yaml
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from dptrain.configuration import Loader, one_line, read_yaml
from dptrain.core import did_you_mean

T = TypeVar("T")

# Types of fields: what they allow is checked when a file is read, and by :func:`check_types`.
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def one_of(choices: Iterable[str]) -> AfterValidator:
    """The annotation of a text that has to be one of a few: ``Annotated[str, one_of(NAMES)]``."""
    known = tuple(choices)

    def check(value: str) -> str:
        if value not in known:
            raise ValueError(f"{did_you_mean(value, known)}choose one of {', '.join(known)}")
        return value

    return AfterValidator(check)


def load_config(
    schema: type[T], path: str | pathlib.Path | None = None, overrides: Sequence[str] = ()
) -> T:
    """An instance of the dataclass ``schema``: its defaults, then the file, then the overrides.

    A field of type ``dict[str, Any]`` is a value of one of several types, named by its ``type``:
    whoever builds it knows which other fields that type has. If the file, or an override, names
    another type than the one so far, the fields stated before (for the old one) are dropped,
    except those that every type has: the field's metadata lists them under ``common``.

    Args:
        schema: dataclass whose fields are typed values, further dataclasses, or such values.
        path: YAML file, or ``None`` for the defaults.
        overrides: ``"scheme.min_sep=8"``; values are YAML, so ``null`` and ``[8, 16]`` work.

    Raises:
        ValueError: if a field is unknown (the message names the nearest known one), a value has
            the wrong type, or an override is not of the form ``field=value``.
        FileNotFoundError: if there is no such file.
    """
    config = dataclasses.asdict(schema())  # type: ignore[call-overload]
    known = _Known.of(schema)
    if path is not None:
        config = _merge(schema, config, read_yaml(pathlib.Path(path)), known, source=f"{path}: ")
    types = tuple(f"{group}.type=" for group in known.groups)
    # A type first: the order of the arguments must not decide whether a field is its own.
    for override in sorted(overrides, key=lambda text: not text.startswith(types)):
        field, equals, text = override.partition("=")
        if not equals or not field:
            raise ValueError(f"{override!r} is no override; write field=value, e.g. steps=100")
        nested: Any = _value(text, override)
        for part in reversed(field.split(".")):
            nested = {part: nested}
        config = _merge(schema, config, nested, known, source="")
    return _typed(schema, config)


def check_types(config: Any) -> None:
    """Hold an instance of a schema to the types of its fields, however it was made.

    Raises:
        ValueError: naming the field, the value and what it should be.
    """
    _typed(type(config), dataclasses.asdict(config))


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """``{"scheme.min_sep": 8, ...}``: the leaves of nested mappings by dotted name."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def leaves(schema: type) -> list[str]:
    """The dotted names of all fields of a schema."""
    return sorted(flatten(dataclasses.asdict(schema())))


def to_yaml(config: Any, *, without: Collection[str] = ()) -> str:
    """YAML text of a configuration that ``load_config`` reads back.

    Args:
        config: an instance of a dataclass.
        without: dotted names of fields to leave out, which a comment says.
    """
    tree = dataclasses.asdict(config)
    for name in without:
        *groups, field = name.split(".")
        holder = tree
        for group in groups:
            holder = holder[group]
        del holder[field]
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    head = f"# Left out, as they are of the machine that it ran on: {', '.join(sorted(without))}\n"
    return head + text if without else text


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted names of the leaves in which two nested mappings differ, with both values."""
    before, after = flatten(old), flatten(new)
    return {
        name: (before.get(name), after.get(name))
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    }


def _value(text: str, override: str) -> Any:
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{override!r}: the value is not YAML ({one_line(error)})") from error


@dataclasses.dataclass(frozen=True)
class _Known:
    """The settings that exist: dotted names of the leaves, and the groups that are typed values."""

    leaves: list[str]
    groups: dict[str, tuple[str, ...]]  # with the entries that survive a change of type

    @classmethod
    def of(cls, schema: type) -> _Known:
        types = get_type_hints(schema)
        groups = {
            field.name: tuple(field.metadata.get("common", ()))
            for field in dataclasses.fields(schema)
            if get_origin(types[field.name]) is dict
        }
        return cls(leaves(schema), groups)


def _merge(
    schema: type, config: dict[str, Any], tree: Any, known: _Known, *, source: str
) -> dict[str, Any]:
    for name in flatten(tree):
        group, dot, _ = name.partition(".")
        if name not in known.leaves and not (dot and group in known.groups):
            raise ValueError(f"{source}{_unknown(name, known.leaves)}")
    for group, common in known.groups.items():
        new = tree.get(group, {})
        if not isinstance(new, Mapping):
            raise ValueError(f"{source}{_unknown(group, known.leaves)}")
        if new.get("type", config[group].get("type")) != config[group].get("type"):
            kept = common if new["type"] is not None else ()  # no type, no fields
            config[group] = {name: config[group].get(name) for name in kept}
    config = _united(config, tree)
    _typed(schema, config, source=source)
    return config


def _united(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings in one, where they differ the new one's; groups that both have are united."""
    both = {
        name: _united(old[name], value)
        for name, value in new.items()
        if isinstance(value, Mapping) and isinstance(old.get(name), Mapping)
    }
    return {**old, **new, **both}


def _typed(schema: type[T], tree: Mapping[str, Any], *, source: str = "") -> T:
    """The instance of a schema with these values; strictly, so that 3.0 or true is no integer.

    By way of JSON, since only from there a strict reading takes mappings for dataclasses.
    """
    try:
        return TypeAdapter(schema).validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name, value = ".".join(map(str, first["loc"])), json.dumps(first["input"])
        what = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
        what = what.replace("a valid string", "text").replace("valid array", "list, e.g. [1, 2]")
        raise ValueError(f"{source}{name}={value}: {what}") from error


def _unknown(name: str, known: list[str]) -> str:
    """The message for an unknown field: its nearest neighbor by full name or by last part."""
    inside = [field for field in known if field.startswith(name + ".")]
    if inside:
        return f"{name!r} is a group of fields; set one of them: {', '.join(inside)}"
    last = {field.rpartition(".")[2]: field for field in known}
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if not near:
        hit = difflib.get_close_matches(name.rpartition(".")[2], list(last), n=1, cutoff=0.6)
        near = [last[hit[0]]] if hit else difflib.get_close_matches(name, known, n=1, cutoff=0)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown field {name!r}{hint}"
