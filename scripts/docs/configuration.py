"""Every field of a recipe's configuration: type, default and meaning, from the code."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pathlib
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from dptrain.clipping.base import ClippingStyle
from dptrain.configuration import members_of
from dptrain.individual import IndividualFilter
from dptrain.sampling import Scheme
from dptrain.strategies import Strategy
from recipes import sweep
from recipes.filter_settings import FilterSettings
from recipes.settings import RunSettings
from scripts.docs import references
from scripts.docs.docstrings import described, described_by_class
from scripts.docs.pages import ROOT

PAGE = "reference/configuration.md"

# Groups whose fields depend on their ``type``: the family, and what every type of it takes.
FAMILIES: dict[str, type] = {
    "scheme": Scheme,
    "strategy": Strategy,
    "clipping": ClippingStyle,
    "individual": IndividualFilter,
}
# Arguments of a type that a run knows by itself, or that a configuration calls otherwise.
_NOT_STATED = {
    "scheme": {"dataset_size", "steps", "epochs", "graph", "batch_size"},
    "strategy": {"steps"},
    "individual": {"target_epsilon", "target_delta", "max_steps"},
}


@dataclasses.dataclass(frozen=True)
class Field:
    """One line of a table."""

    name: str
    kind: str
    default: str
    meaning: str


def run_fields(schema: type, prefix: str = "") -> Iterator[Field]:
    """Fields of a dataclass and of those inside it, by dotted name; families without theirs."""
    kinds = typing.get_type_hints(schema, include_extras=True)
    said = described_by_class(schema)
    for field in dataclasses.fields(schema):
        name = f"{prefix}{field.name}"
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if dataclasses.is_dataclass(default):
            yield from _with_defaults(type(default), f"{name}.", default)
        else:
            kind = "group" if field.name in FAMILIES else _kind(kinds[field.name])
            yield Field(name, kind, _value(default), said.get(field.name, ""))


def _with_defaults(schema: type, prefix: str, default: Any) -> Iterator[Field]:
    for field in run_fields(schema, prefix):
        name = field.name.removeprefix(prefix)
        yield dataclasses.replace(field, default=_value(getattr(default, name)))


def types(group: str) -> dict[str, type]:
    """The types of a group that a configuration may name."""
    members = members_of(FAMILIES[group])
    if group == "individual":  # an odometer's rounds are opened by hand
        return {n: m for n, m in members.items() if "target_epsilon" in _parameters(group, m)}
    return members


def type_fields(group: str, member: type) -> list[Field]:
    """Fields that one type of a group has beside those of all."""
    said = described_by_class(member)
    make = getattr(member, "for_batch_size", None) if group == "scheme" else None
    said |= {
        name: text
        for name, text in described(getattr(make, "__doc__", None)).items()
        if name not in said
    }
    return [
        Field(name, _annotation(each.annotation), _default(each), said.get(name, ""))
        for name, each in _parameters(group, member).items()
        if name not in _NOT_STATED.get(group, ())
    ]


def _parameters(group: str, member: type) -> Mapping[str, inspect.Parameter]:
    make = getattr(member, "for_batch_size", member) if group == "scheme" else member
    return inspect.signature(make).parameters


def page() -> str:
    """The page of the reference."""
    parts = [
        "# Configuration",
        "",
        "A run of a recipe is described by one YAML file, and every field can be overridden on the "
        "command line as `field=value`, e.g. `privacy.epsilon=2`. A field that is left out has its "
        "default. An unknown field is refused, and the message names the nearest known one.",
        "",
        "## Every run",
        "",
        *_table(run_fields(RunSettings)),
    ]
    for group in FAMILIES:
        parts += ["", f"## The group `{group}`", "", *_group(group)]
    for name, schema in sweep.SCHEMAS.items():
        parts += ["", f"## Of `python -m recipes.{name}`", "", _own_words(schema), ""]
        common = {field.name: field for field in run_fields(RunSettings)}
        own = [field for field in run_fields(schema) if common.get(field.name) != field]
        parts += _table(own)
    parts += ["", "## Grids", "", _own_words(sweep), "", *_table(_grid())]
    parts += ["", "## Files", "", *_files()]
    return "\n".join(parts) + "\n"


def _group(group: str) -> Iterator[str]:
    yield f"`{group}.type` names the class, and its other fields stand beside it."
    yield ""
    if group == "scheme":
        common = {
            "batch_size": ("float", "B̄, the expected batch size"),
            "epoch_length": ("float", "instead of `batch_size`: N/B̄"),
        }
        fields = [Field(name, kind, "null", text) for name, (kind, text) in common.items()]
        yield "Every scheme takes exactly one of these two:"
        yield ""
        yield from _table(fields)
    if group == "individual":
        said = described_by_class(FilterSettings)
        kinds = typing.get_type_hints(FilterSettings)
        yield "Every filter takes these:"
        yield ""
        yield from _table(
            Field(field.name, _kind(kinds[field.name]), "", said[field.name])
            for field in dataclasses.fields(FilterSettings)
            if field.name not in ("type", "own")
        )
    for name, member in types(group).items():
        yield f"\n### {name} {{ #{group}-{name.lower()} }}"
        yield ""
        yield references.rewritten(_first_paragraph(member.__doc__), f"{member.__module__}.{name}")
        yield ""
        fields = type_fields(group, member)
        yield from _table(fields) if fields else ["It has no fields of its own."]


def _grid() -> list[Field]:
    said = described(sweep.__doc__)
    return [Field(name, "", "", text) for name, text in said.items()]


def _files() -> Iterator[str]:
    yield "| file | what it is |"
    yield "|---|---|"
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        yield f"| `{path.relative_to(ROOT)}` | {first_remark(path)} |"


def first_remark(path: pathlib.Path) -> str:
    """The first sentence of the comment at the head of a file."""
    head = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
    text = " ".join(line.lstrip("# ") for line in (head[0] if head else "").splitlines())
    return re.split(r"(?<!Fig)[.](?:\s|$)", text, maxsplit=1)[0].replace("|", "\\|")


def _table(fields: typing.Iterable[Field]) -> list[str]:
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        meaning = references.rewritten(field.meaning).replace("``", "`").replace("|", "\\|")
        kind = field.kind.replace("|", "\\|")
        cells = [f"`{field.name}`", kind, f"`{field.default}`" if field.default else "", meaning]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _own_words(thing: Any) -> str:
    return references.rewritten(_first_paragraph(thing.__doc__)).replace("``", "`")


def _first_paragraph(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())


def _kind(hint: Any) -> str:
    """A type in the words of YAML, with the bounds that it is held to."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        return f"{_kind(parts[0])} {', '.join(_bounds(parts[1:]))}".strip()
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) in (list, tuple):
        return f"list of {_kind(parts[0])}"
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if parts and typing.get_origin(hint) not in (dict, Mapping):
        return " or ".join(_kind(part) for part in parts)
    names = {bool: "bool", int: "int", float: "float", str: "text"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _bounds(metadata: typing.Iterable[Any]) -> Iterator[str]:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    for each in metadata:
        for bound in getattr(each, "metadata", ()):
            for name, sign in signs.items():
                if (value := getattr(bound, name, None)) is not None:
                    yield f"{sign} {value:g}"


def _annotation(text: Any) -> str:
    """The same of what a signature says, which may be its source."""
    words = str(text if isinstance(text, str) else getattr(text, "__name__", text)).strip("'")
    words = re.sub(r"\bNone\b", "null", words)
    words = re.sub(r"\bstr\b", "text", words)
    return words.replace("tuple[float, ...]", "list of float").replace(" | ", " or ")


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return "required"
    return _value(parameter.default)


def _value(value: Any) -> str:
    """A default as YAML has it."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key}: {_value(each)}" for key, each in value.items())
        return f"{{{inside}}}"
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        return str(value)
