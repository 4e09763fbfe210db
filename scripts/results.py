"""Results of a script: rows, how a page shows them, the machine, and the file that keeps all three.

A file is JSON: ``script``, ``machine``, ``tables`` by name, and what else the script wants to read
again. A table has ``rows`` (or the name of the table of the file whose rows it shows) and
``columns``, each of which is a list: a title and templates. A cell is the first of its templates
whose fields a row has, or a dash:

    ["loss", "{loss.mean:.4f} ± {loss.half_width:.4f}", "{loss.mean:.4f} (1 run)", "not run"]

A field is a path of keys. Behind its colon stands a format of Python's, or a unit and a format
(``{bytes:MiB .1f}``), or one of the formats that choose a unit: ``time`` of seconds, ``bytes``, and
``figures`` with a number of significant digits. A list is shown as code, a truth as yes or no.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
Row = Mapping[str, Any]
Columns = Sequence[Sequence[str]]

SPREAD = "{ratio.median:.2f} ({ratio.q1:.2f}–{ratio.q3:.2f})"
"""A ratio and its quartiles."""

_FIELD = re.compile(r"\{([^:}]+):?([^}]*)\}")
_UNITS = {
    "%": 100,
    "ms": 1000,
    "minutes": 1 / 60,
    "MiB": 2**-20,
    "GB": 1e-9,
}


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows, and the columns that a page shows of them."""

    columns: Columns
    rows: Sequence[Row]

    def markdown(self) -> str:
        """The table as a page has it."""
        rows = [[cell(row, *templates) for _, *templates in self.columns] for row in self.rows]
        return markdown([title for title, *_ in self.columns], rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells of text as a table of Markdown, with numbers to the right."""
    rows = list(rows)
    numeric = [
        all(re.match(r"(< |−)?[\d.,]*\d|∞|$", row[i]) for row in rows) for i in range(len(head))
    ]
    rule = ["---:" if right else "---" for right in numeric]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


def pivoted(
    rows: Sequence[Row], keys: Mapping[str, str], by: str, template: str, missing: str = ""
) -> Table:
    """A row for all rows with the same values of some fields, and a column for each of another.

    Args:
        rows: to be brought together.
        keys: titles by field, of what a row of the table stands for.
        by: the field whose values become columns.
        template: of these columns, with ``@`` for the value.
        missing: the text where there is no row.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = {name: row[name] for name in keys}
        found.setdefault(tuple(key.values()), key)[row[by]] = row
    head = [(title, f"{{{name}}}") for name, title in keys.items()]
    names = dict.fromkeys(row[by] for row in rows)
    columns = [(name, template.replace("@", name), missing) for name in names]
    return Table([*head, *columns], [found[key] for key in sorted(found)])


def cell(row: Row, *templates: str) -> str:
    """The text of the first template whose fields are all there; a dash if there is none."""

    def filled(match: re.Match[str]) -> str:
        value: Any = row
        for key in match[1].split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            raise KeyError(match[1])
        return shown(value, match[2])

    for template in templates:
        try:
            return _FIELD.sub(filled, template)
        except KeyError:
            continue
    return "–"


def shown(value: Any, form: str = "") -> str:
    """A value in one of the formats that the module's docstring lists."""
    unit, _, rest = form.rpartition(" ")
    if unit:
        return shown(_UNITS[unit] * value, rest)
    if form == "time":
        if value < 1e-3:
            return "< 1 ms"
        return f"{_figures(1e3 * value)} ms" if value < 1 else f"{_figures(value)} s"
    if form == "bytes":
        for unit in ("B", "kB", "MB", "GB"):
            if abs(value) < 1000 or unit == "GB":
                return f"{_figures(value)} {unit}"
            value /= 1000
    if form.startswith("figures"):
        return _figures(value, int(form.removeprefix("figures")))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(f"`{each}`" for each in value)
    return format(value, form or ("g" if isinstance(value, float) else ""))


def _figures(value: float, digits: int = 3) -> str:
    """Significant digits, without an exponent where that is short."""
    if math.isinf(value):
        return "∞"
    if value == 0 or 1e-4 <= abs(value) < 10**digits:
        return f"{value:.{digits}g}"
    return f"{value:,.0f}" if 10**digits <= abs(value) < 1e12 else f"{value:.{digits}g}"


# The machine.


def machine(*packages: str, device: str = "cpu", load: bool = False) -> dict[str, Any]:
    """The processor or GPU, its cores, Python and the versions of packages.

    Args:
        packages: names of distributions.
        device: ``"cpu"``, or what torch calls a GPU.
        load: for times: how busy the machine was when this was asked.
    """
    if device != "cpu":
        import torch

        device = torch.cuda.get_device_name(device)
    found: dict[str, Any] = {
        "device": device,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found | ({"load before": round(os.getloadavg()[0], 2)} if load else {})


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def words(machine: str | Mapping[str, Any] | None) -> str | None:
    """A machine in words; a text stays as it is."""
    if machine is None or isinstance(machine, str):
        return machine
    said = []
    for key, value in machine.items():
        if isinstance(value, Mapping):
            said.append(words(value) or "")
        elif key in ("processor", "device", "libc"):
            said.append(str(value))
        elif key in ("cores", "threads"):
            said.append(f"{value} {key}")
        elif key.startswith("load"):
            said.append(f"load before the run {float(value):.1f}")
        elif key != "OMP_NUM_THREADS":
            said.append(f"{key} {value}")
    return ", ".join(said)


# The file.


def publish(
    path: pathlib.Path | None,
    tables: Mapping[str, Table],
    *,
    script: str,
    machine: str | Mapping[str, Any] | None = None,
    quiet: bool = False,
    **more: Any,
) -> None:
    """Print tables, and write them where a file is named, in one step.

    Args:
        path: the file; ``None`` prints only.
        tables: by name.
        script: ``__file__`` of the script.
        machine: that it ran on, for the tables' origin.
        quiet: write without printing, for results that come one by one.
        more: what else the script reads again.
    """
    if not quiet:
        print("\n\n".join(each.markdown() for each in tables.values()))
    if path is None:
        return
    first = {id(table.rows): name for name, table in reversed(tables.items())}
    tree = {
        "script": str(pathlib.Path(script).resolve().relative_to(ROOT)),
        "machine": machine,
        "tables": {
            name: {
                "columns": table.columns,
                "rows": table.rows if (of := first[id(table.rows)]) == name else of,
            }
            for name, table in tables.items()
        },
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(_written(tree) + "\n", encoding="utf-8")
    temporary.replace(path)


def read(path: pathlib.Path | None) -> dict[str, Any]:
    """All of a file, with its tables as such; of one that is not there, no tables."""
    if path is None or not path.exists():
        return {"tables": {}}
    tree: dict[str, Any] = {"tables": {}, **json.loads(path.read_text(encoding="utf-8"))}
    for name, each in tree["tables"].items():
        rows = tree["tables"][each["rows"]].rows if isinstance(each["rows"], str) else each["rows"]
        tree["tables"][name] = Table(each["columns"], rows)
    return tree


def rows_of(path: pathlib.Path | None, name: str) -> list[dict[str, Any]]:
    """Rows of a table in a file; none if it is not there."""
    table = read(path)["tables"].get(name)
    return [] if table is None else list(table.rows)


def _written(value: Any, indent: str = "") -> str:
    """JSON with an item of a mapping, or an element of a list, a line: a diff shows rows."""
    if isinstance(value, Mapping) and value:
        inner = ((json.dumps(k, ensure_ascii=False) + ": ", v) for k, v in value.items())
        parts = [f"{indent} {key}{_written(each, indent + ' ')}" for key, each in inner]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    if isinstance(value, list | tuple) and value:
        parts = [f"{indent} {json.dumps(each, ensure_ascii=False)}" for each in value]
        return "[\n" + ",\n".join(parts) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)
