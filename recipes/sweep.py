"""Run a grid of configurations, one after the other, and compare the results.

``python -m recipes.sweep --grid configs/grids/cinic10.yaml [field=value ...] [--list]``

Attributes:
    recipe: vision, arxiv or individual.
    output: folder that gets a folder for every run.
    common: for every run, ``field: [values]`` lines; a run is made for each combination, and
        ``"=field"`` stands for the value of another field.
    runs: a list of configurations: ``config``, a YAML file, and ``grid``, further
        ``field: [values]`` lines for it alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from dptrain.commands import CommandParser
from dptrain.configuration import read_yaml
from dptrain.core import did_you_mean, in_words
from recipes import arxiv, individual, vision
from recipes.command import INTERRUPTED
from recipes.config import load_config
from recipes.runfolder import CHECKPOINT, METRICS, SUMMARY, read_metrics
from recipes.task import HELD_OUT, TEST

RECIPES: dict[str, Callable[[Sequence[str]], int]] = {
    "vision": vision.main,
    "arxiv": arxiv.main,
    "individual": individual.main,
}
SCHEMAS: dict[str, type] = {
    "vision": vision.VisionSettings,
    "arxiv": arxiv.ArxivSettings,
    "individual": individual.IndividualSettings,
}


@dataclasses.dataclass(frozen=True)
class Member:
    """One run of a grid: its configuration file, what it overrides, and its folder."""

    config: str
    overrides: dict[str, Any]
    folder: pathlib.Path

    def arguments(self, extra: Sequence[str]) -> list[str]:
        """The recipe's command line; ``extra`` comes last and wins."""
        resume = ["--resume"] if (self.folder / CHECKPOINT).exists() else []
        fields = self.fields(extra)
        return ["--config", self.config, "--output", str(self.folder), *resume, *fields]

    def fields(self, extra: Sequence[str]) -> list[str]:
        """What overrides the configuration file."""
        return [*(f"{name}={json.dumps(v)}" for name, v in self.overrides.items()), *extra]

    @property
    def finished(self) -> bool:
        """Whether it has run to its end."""
        return (self.folder / SUMMARY).exists()

    def result(self) -> dict[str, Any]:
        """The last evaluation on test or held-out examples, empty before the first one."""
        path = self.folder / METRICS
        records = read_metrics(path) if path.exists() else []
        return next((r for r in reversed(records) if r["split"] in (TEST, HELD_OUT)), {})


def members(grid: Mapping[str, Any], output: pathlib.Path) -> list[Member]:
    """All runs of a grid, in the order in which they are written down.

    Raises:
        ValueError: if the grid has unknown or missing entries, or two runs would be the same.
    """
    entries = ("recipe", "output", "common", "runs")
    if unknown := sorted(set(grid) - set(entries)):
        hint = did_you_mean(unknown[0], entries)
        raise ValueError(f"unknown entries {unknown}; {hint}a grid has {', '.join(entries)}")
    if grid.get("recipe") not in RECIPES:
        hint = did_you_mean(str(grid.get("recipe")), RECIPES)
        raise ValueError(f"recipe={grid.get('recipe')!r}: {hint}choose one of {', '.join(RECIPES)}")
    if not grid.get("runs"):
        raise ValueError("runs: name at least one configuration")
    if not isinstance(grid["runs"], list):
        raise ValueError(f"runs: {grid['runs']!r} should be a list of configurations")
    for name, axes in (("common", grid), *(("grid", entry) for entry in grid["runs"])):
        if isinstance(axes, Mapping) and not isinstance(axes.get(name, {}), Mapping):
            raise ValueError(f"{name}: {axes[name]!r} should be 'field: [values]' lines")
    found = []
    for entry in grid["runs"]:
        if not isinstance(entry, Mapping) or not {"config"} <= set(entry) <= {"config", "grid"}:
            raise ValueError(f"runs: {entry!r} should have 'config' and may have 'grid'")
        axes = {**entry.get("grid", {}), **grid.get("common", {})}
        for overrides in _points(axes):
            stem = pathlib.Path(entry["config"]).stem
            name = "_".join([stem, *(f"{k.rpartition('.')[2]}={v}" for k, v in overrides.items())])
            found.append(Member(entry["config"], overrides, output / name))
    if missing := [member.config for member in found if not pathlib.Path(member.config).is_file()]:
        raise ValueError(f"config: {missing[0]!r} is no file, seen from the working directory")
    if len({member.folder for member in found}) < len(found):
        raise ValueError("runs: two runs have the same configuration and values")
    return found


def _points(axes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the values; ``"=field"`` stands for the value of another field."""
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{name}: {values!r} should be a list of values, e.g. [1, 2]")
    seen = []
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        for name, value in point.items():
            if isinstance(value, str) and value.startswith("="):
                if value[1:] not in point:
                    raise ValueError(f"{name}: {value!r} names no field of the grid")
                point[name] = point[value[1:]]
        if point not in seen:  # a reference may repeat a value that is listed too
            seen.append(point)
            yield point


def summarise(found: Sequence[Member], output: pathlib.Path) -> str:
    """Write ``results.json`` and return a table of what has finished."""
    rows = [
        {"folder": m.folder.name, "config": m.config, **m.overrides, **m.result()}
        for m in found
        if m.finished
    ]
    (output / "results.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    lines = [f"{len(rows)} of {len(found)} runs are finished ({output / 'results.json'})"]
    for row in rows:
        numbers = ", ".join(f"{k} {v:.4f}" for k, v in row.items() if isinstance(v, float))
        lines.append(f"{row['folder']}: {numbers}")
    lines.append(
        "whoever picks the best of them has looked at the data: its guarantee does not cover that"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = CommandParser(
        prog="python -m recipes.sweep",
        description=__doc__.splitlines()[0],
        example="python -m recipes.sweep --grid configs/grids/cinic10.yaml --list",
    )
    parser.add_argument("--grid", required=True, help="YAML file, e.g. configs/grids/*.yaml")
    parser.add_argument("--output", help="folder of the runs (the entry output)")
    parser.add_argument("--list", action="store_true", help="show the runs without starting them")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="for every run")
    arguments = parser.parse_intermixed_args(argv)
    try:
        grid = read_yaml(pathlib.Path(arguments.grid))
        output = pathlib.Path(arguments.output or grid.get("output", "runs/sweep"))
        found = members(grid, output)
        # One of each configuration: a misspelt field should not fail hundreds of times.
        for member in {member.config: member for member in found}.values():
            load_config(SCHEMAS[grid["recipe"]], member.config, member.fields(arguments.overrides))
        if arguments.list:
            print("\n".join(str(member.folder) for member in found))
            return 0
        output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"error: {in_words(error)}", file=sys.stderr)
        return 2
    failed, interrupted = [], False
    for member in tqdm(found, desc="runs", unit="run"):
        if member.finished:
            continue
        status = RECIPES[grid["recipe"]](member.arguments(arguments.overrides))
        if interrupted := status == INTERRUPTED:
            break
        if status:
            failed.append(member.folder.name)
    print(summarise(found, output))
    if failed:
        print(f"{len(failed)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return INTERRUPTED if interrupted else 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
