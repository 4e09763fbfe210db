"""Every field of a privacy statement's JSON, from its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dptrain.reporting import STATEMENT, schema

PAGE = "reference/statement.md"
SCHEMA = "reference/privacy_report.schema.json"


def page() -> str:
    """The page of the reference."""
    lines = [
        "# Privacy statement",
        "",
        f"Every field of `{STATEMENT}`, which a run leaves beside its model. The same as a "
        f"[JSON Schema](privacy_report.schema.json) (2020-12), which `dptrain.reporting.schema()` "
        "returns. What of it follows from the mechanism inside says "
        "[`dptrain verify`](../guides/guarantee.md#verifying-a-statement).",
        "",
        "| Field | Type | What it is |",
        "|---|---|---|",
    ]
    return "\n".join([*lines, *_rows(schema(), "")]) + "\n"


def text() -> str:
    """The schema as a file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def _rows(value: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, each in value.get("properties", {}).items():
        where = f"{prefix}{name}"
        optional = "" if name in value.get("required", ()) else "; optional"
        yield f"| `{where}` | {_kind(each)}{optional} | {each['description']} |"
        yield from _rows(each, f"{where}.")


def _kind(value: dict[str, Any]) -> str:
    if "const" in value:
        return json.dumps(value["const"])
    if "enum" in value:
        return " or ".join(json.dumps(each) for each in value["enum"])
    if "anyOf" in value:
        return " or ".join(_kind(each) for each in value["anyOf"])
    kind = str(value["type"])
    return f"{kind} of {_kind(value['items'])}s" if "items" in value else kind
