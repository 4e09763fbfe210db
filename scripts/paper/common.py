"""The common part of scripts that redo a paper's figure: options, tables, comparisons."""

from __future__ import annotations

import argparse
import csv
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts import results

RESULTS = pathlib.Path(__file__).parent / "results"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows the script's docstring and knows where results go."""
    found = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--output", type=pathlib.Path, default=RESULTS, help="folder of the tables and pictures"
    )
    return found


def write_csv(path: pathlib.Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table, floats with seven digits; makes the folder.

    Raises:
        ValueError: if a row has another length than the header.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"row={row}: has {len(row)} values for {len(columns)} columns")
            writer.writerow([f"{v:.7g}" if isinstance(v, float) else v for v in row])
    print(f"wrote {path}")


def write_table(
    path: pathlib.Path,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    titles: Mapping[str, str],
    script: str,
) -> None:
    """Write a table that a page shows, floats with seven digits, in the format of all results.

    Args:
        path: the file, ending in ``.json``.
        columns: names of the numbers in a row.
        rows: of the table.
        titles: of the columns that are shown, by name.
        script: ``__file__`` of the script.
    """
    named = [
        {
            name: float(f"{value:.7g}") if isinstance(value, float) else value
            for name, value in zip(columns, row, strict=True)
        }
        for row in rows
    ]
    shown = [(title, f"{{{name}:figures4}}") for name, title in titles.items()]
    tables = {path.stem: results.Table(shown, named)}
    results.publish(path, tables, script=script, quiet=True)
    print(f"wrote {path}")


def read_csv(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a table by column name."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def compare(rows: Iterable[tuple[str, str, str]]) -> None:
    """Print what a paper's text says beside what was computed here."""
    table = [("quantity", "paper", "here"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    for what, stated, ours in table:
        print(f"{what:{widths[0]}s}  {stated:{widths[1]}s}  {ours}")


def positive(text: str) -> float:
    """An argparse type: a number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{value}: must be positive")
    return value


def short(value: float) -> str:
    """A number for a label: 1e-5 and not 1e-05."""
    return f"{value:g}".replace("e-0", "e-")


class Stopwatch:
    """Wall and processor seconds of a script, to print at its end."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def __str__(self) -> str:
        wall = time.perf_counter() - self._wall
        return f"{wall:.1f} s ({time.process_time() - self._processor:.1f} s of processor time)"
