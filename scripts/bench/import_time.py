"""How long ``import dptrain`` takes beyond ``import torch``, and what costs it.

    PYTHONPATH=. python scripts/bench/import_time.py [--rounds 9] [--costs] [--json FILE]

Fresh interpreters take turns, so that whatever else the machine does falls on all of them. The
minimum over rounds is what the imports cost on a quiet machine with a warm file cache; the excess
is the difference within a round, of which the median is printed as well. Processor time is that
of the child process. ``--costs`` attributes the excess to packages (``python -X importtime``,
which makes everything slower).
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time
from typing import Any

BASE = "import torch"
STATEMENTS = ("import dptrain", "from dptrain import PrivacyEngine", "from dptrain import *")
LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \| ( *)(\S+)")


def seconds(statement: str) -> tuple[float, float]:
    """Wall and processor time of an interpreter that runs one statement."""
    before = os.times()
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    wall = time.perf_counter() - start
    after = os.times()
    user = after.children_user - before.children_user
    return wall, user + after.children_system - before.children_system


def measure(rounds: int) -> list[dict[str, Any]]:
    """All statements in turn; the first round, which fills the file cache, is not counted."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (BASE, *STATEMENTS)}
    for counted in [False] + [True] * rounds:
        for statement, times in found.items():
            one = seconds(statement)
            if counted:
                times.append(one)
    return [_row(statement, times, found[BASE]) for statement, times in found.items()]


def _row(
    statement: str, times: list[tuple[float, float]], base: list[tuple[float, float]]
) -> dict[str, Any]:
    row: dict[str, Any] = {"statement": statement}
    for index, clock in enumerate(("wall", "processor")):
        own, torch = [one[index] for one in times], [one[index] for one in base]
        row[clock] = {
            "minimum": min(own),
            "median": statistics.median(own),
            "excess_of_minima": min(own) - min(torch),
            "median_excess": statistics.median(a - b for a, b in zip(own, torch, strict=True)),
            "ratio_of_minima": min(own) / min(torch),
        }
    return row


def costs(statement: str) -> list[tuple[str, float]]:
    """Seconds that a statement spends in each package's modules beyond torch's own import.

    A module's time is its own, without what it imports in turn.
    """
    script = f"{BASE}; import sys; print('import time: 0 | 0 | MARK', file=sys.stderr); {statement}"
    traced = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script],
        check=True,
        capture_output=True,
        text=True,
    )
    spent: collections.Counter[str] = collections.Counter()
    _, _, after = traced.stderr.partition("MARK")
    for own, _, module in LINE.findall(after):
        spent[module.split(".")[0]] += int(own)
    return [(package, own / 1e6) for package, own in spent.most_common()]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--costs", action="store_true", help="which packages take the time")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if options.costs:
        for statement in STATEMENTS:
            print(f"{statement}, beyond {BASE} (traced: slower than in truth)")
            for package, own in costs(statement)[:12]:
                print(f"    {own:6.3f} s  {package}")
        return
    rows = measure(options.rounds)
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    for row in rows:
        for clock in ("wall", "processor"):
            one = row[clock]
            print(
                f"{row['statement']:>34}, {clock:>9}: minimum {one['minimum']:.2f} s, median "
                f"{one['median']:.2f} s; beyond torch {one['excess_of_minima']:.2f} s (minima), "
                f"{one['median_excess']:.2f} s (median); ratio {one['ratio_of_minima']:.2f}"
            )
    if options.json is not None:
        value = {"cores": os.cpu_count(), "rounds": options.rounds, "rows": rows}
        options.json.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
