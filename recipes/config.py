"""Typed configurations from a YAML file and ``field=value`` arguments, with helpful errors."""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dptrain.configuration import Loader, one_line, read_yaml

T = TypeVar("T")


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
    config = OmegaConf.structured(schema)
    known = _Known.of(schema)
    if path is not None:
        config = _merge(config, read_yaml(pathlib.Path(path)), known, source=str(path))
    types = tuple(f"{group}.type=" for group in known.groups)
    # A type first: the order of the arguments must not decide whether a field is its own.
    for override in sorted(overrides, key=lambda text: not text.startswith(types)):
        field, equals, text = override.partition("=")
        if not equals or not field:
            raise ValueError(f"{override!r} is no override; write field=value, e.g. steps=100")
        nested: Any = _value(text, override)
        for part in reversed(field.split(".")):
            nested = {part: nested}
        config = _merge(config, nested, known, source=repr(override))
    return OmegaConf.to_object(config)  # type: ignore[return-value]


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """``{"scheme.min_sep": 8, ...}``: the leaves of nested mappings by dotted name."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


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
    """What may be set: the dotted names of the leaves, and the groups that are typed values."""

    leaves: list[str]
    groups: dict[str, tuple[str, ...]]  # with the entries that survive a change of type

    @classmethod
    def of(cls, schema: type) -> _Known:
        leaves = sorted(flatten(dataclasses.asdict(schema())))
        types = get_type_hints(schema)
        groups = {
            field.name: tuple(field.metadata.get("common", ()))
            for field in dataclasses.fields(schema)
            if get_origin(types[field.name]) is dict
        }
        return cls(leaves, groups)


def _merge(config: DictConfig, tree: Any, known: _Known, *, source: str) -> DictConfig:
    for name in flatten(tree):
        group, dot, _ = name.partition(".")
        if name not in known.leaves and not (dot and group in known.groups):
            raise ValueError(f"{source}: {_unknown(name, known.leaves)}")
    for group, common in known.groups.items():
        new = tree.get(group, {})
        if not isinstance(new, Mapping):
            raise ValueError(f"{source}: {_unknown(group, known.leaves)}")
        if new.get("type", config[group].get("type")) != config[group].get("type"):
            kept = common if new["type"] is not None else ()  # no type, no fields
            config[group] = {name: config[group].get(name) for name in kept}
    try:
        return OmegaConf.merge(config, tree)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        name = getattr(error, "full_key", None) or "?"
        what = str(error).splitlines()[0]
        raise ValueError(f"{source}: field {name!r}: {what}") from error


def _unknown(name: str, known: list[str]) -> str:
    """The message for an unknown field: its nearest neighbour by full name or by last part."""
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
