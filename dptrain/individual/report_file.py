"""The CSV of an individual report: warning, head as JSON, one line an example."""

from __future__ import annotations

import csv
import itertools
import json
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.guarantee import Kind
from dptrain.individual.private_file import MARK, WARNING, in_place

if TYPE_CHECKING:
    from dptrain.individual.report import IndividualReport

FORMAT = 1
MEANING = (
    "What is guaranteed is the bound. ε of one example is how much of it the releases so far have "
    "used, by that example's own gradients"
)


def write_report(report: IndividualReport, path: pathlib.Path) -> None:
    """Replace ``path`` by the report's file."""
    head = {
        "note": f"{MARK}. {MEANING}",
        "format": FORMAT,
        "examples": report.size,
        "delta": repr(report.delta),
        "filter": report.filter,
        "kind": report.kind.value,
        "condition": report.condition,
        "bound": None if report.bound is None else repr(float(report.bound)),  # also "inf"
        "active_counts": report.active_counts,
    }
    with in_place(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {WARNING}\n# {json.dumps(head, ensure_ascii=False)}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_columns(report.names is not None))
        columns: list[Any] = [
            range(report.size),
            map(repr, report.epsilon.tolist()),  # reads back to the same float
            map(int, report.active.tolist()),
            itertools.repeat(MARK, report.size),
        ]
        if report.names is not None:
            columns.insert(1, report.names)
        writer.writerows(zip(*columns, strict=True))


def read_report(path: pathlib.Path) -> dict[str, Any]:
    """The fields of the report that :func:`write_report` wrote.

    Raises:
        ValueError: if it is no such file, or a line is missing or damaged.
    """
    if not path.is_file():
        raise ValueError(f"path={path}: there is no such file")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            warning, head = file.readline(), file.readline()
            if not warning.startswith("# NOT FOR RELEASE") or not head.startswith("# {"):
                raise ValueError("it does not begin as a file of IndividualReport.save()")
            return _fields(json.loads(head[2:]), list(csv.reader(file)))
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise ValueError(
            f"path={path} cannot be read as an individual report ({error}); write it again with "
            "IndividualReport.save()"
        ) from error


def _fields(head: dict[str, Any], rows: list[list[str]]) -> dict[str, Any]:
    if head["format"] != FORMAT:
        raise ValueError(f"format {head['format']!r} is not {FORMAT}")
    columns, lines = (rows[0], rows[1:]) if rows else ([], [])
    named = "name" in columns
    if columns != _columns(named):
        raise ValueError(f"its columns are {columns}, not {_columns(named)}")
    if len(lines) != head["examples"]:
        raise ValueError(f"it has {len(lines)} of {head['examples']} examples")
    for i, line in enumerate(lines):
        if len(line) != len(columns) or line[0] != str(i) or line[-2] not in ("0", "1"):
            raise ValueError(f"the line of example {i} is damaged")
    bound = head["bound"]
    return {
        "epsilon": np.array([float(line[-3]) for line in lines]),
        "delta": float(head["delta"]),
        "active": np.array([line[-2] == "1" for line in lines]),
        "active_counts": tuple(head["active_counts"]),
        "filter": head["filter"],
        "kind": Kind(head["kind"]),
        "condition": head["condition"],
        "bound": None if bound is None else float(bound),
        "names": tuple(line[1] for line in lines) if named else None,
    }


def _columns(named: bool) -> list[str]:
    return ["example", *(["name"] if named else []), "epsilon", "active", "note"]
