"""The part of JSON Schema that the published schema uses, from the specification (2020-12)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "null": (type(None),),
}
_SAID = {"$schema", "title", "description"}
_CHECKED = {
    *("type", "properties", "required", "additionalProperties", "items", "minItems", "minLength"),
    *("enum", "const", "anyOf", "pattern", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum"),
}


def errors(value: Any, schema: dict[str, Any], at: str = "$") -> Iterator[str]:
    """What of the value the schema does not allow.

    Raises:
        ValueError: if the schema has a keyword that is not known here.
    """
    if unknown := set(schema) - _SAID - _CHECKED:
        raise ValueError(f"{at}: keywords {sorted(unknown)} are not checked here")
    kind = schema.get("type")
    if kind and (not isinstance(value, _TYPES[kind]) or isinstance(value, bool)):
        yield f"{at}: no {kind}"
        return
    if "const" in schema and (type(value), value) != (type(schema["const"]), schema["const"]):
        yield f"{at}: not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: none of {schema['enum']}"
    if "anyOf" in schema and all(any(errors(value, each, at)) for each in schema["anyOf"]):
        yield f"{at}: nothing that is allowed"
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{at}: does not match"
        if len(value) < schema.get("minLength", 0):
            yield f"{at}: too short"
    if isinstance(value, int | float) and not isinstance(value, bool):
        for name, wrong in (
            ("minimum", lambda limit: value < limit),
            ("maximum", lambda limit: value > limit),
            ("exclusiveMinimum", lambda limit: value <= limit),
            ("exclusiveMaximum", lambda limit: value >= limit),
        ):
            if name in schema and wrong(schema[name]):
                yield f"{at}: {name}"
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{at}: too few"
        for number, each in enumerate(value):
            yield from errors(each, schema.get("items", {}), f"{at}[{number}]")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        yield from (
            f"{at}.{name}: missing" for name in schema.get("required", ()) if name not in value
        )
        others = schema.get("additionalProperties", {})
        for name, each in value.items():
            if name not in known and others is False:
                yield f"{at}.{name}: unknown"
            else:
                yield from errors(each, known.get(name, others or {}), f"{at}.{name}")
