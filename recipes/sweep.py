"""Run a grid of configurations, compare the results, and state the privacy of choosing among them.

``python -m recipes.sweep --grid configs/grids/cinic10.yaml [field=value ...] [--list]``
``[--jobs 2] [--prune] [--trials 10]``

Attributes:
    recipe: vision, arxiv or individual.
    output: folder that gets a folder for every run.
    common: for every run, ``field: [values]`` lines; a run is made for each combination, and
        ``"=field"`` stands for the value of another field.
    runs: a list of configurations: ``config``, a YAML file, and ``grid``, further
        ``field: [values]`` lines for it alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from dptrain.accounting import TrialCount
from dptrain.commands import CommandParser
from dptrain.configuration import read_yaml
from dptrain.core import did_you_mean, in_words
from recipes import arxiv, choice, individual, random_search, vision
from recipes.command import INTERRUPTED, words_to_stderr
from recipes.config import flatten, load_config
from recipes.runfolder import CHECKPOINT, METRICS, SUMMARY, read_metrics
from recipes.settings import RunSettings
from recipes.study import Job, Study, minimized, ranked
from recipes.task import HELD_OUT, TEST

RECIPES: dict[str, Callable[[Sequence[str]], int]] = {
    "vision": vision.main,
    "arxiv": arxiv.main,
    "individual": individual.main,
}
SCHEMAS: dict[str, type[RunSettings]] = {
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
        """Overrides of the configuration file."""
        return [*(f"{name}={json.dumps(v)}" for name, v in self.overrides.items()), *extra]

    @property
    def finished(self) -> bool:
        """True if it has run to its end."""
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
    return "\n".join(lines)


def state_choice(
    settings: Mapping[pathlib.Path, RunSettings], output: pathlib.Path, *, public: bool
) -> str:
    """The privacy of choosing among the runs of the grid, written to the sweep's folder."""
    looked_at = [folder for folder in settings if choice.begun(folder)]
    if (reason := choice.obstacle(list(settings.values()))) is None:
        try:
            privacy = choice.reached(settings) if looked_at else None
        except ValueError as error:
            reason = str(error)
    if reason is not None:
        return (
            f"{choice.NOT_ACCOUNTED} ({reason}): whoever picks the best run has looked at the data"
        )
    if privacy is None:
        return "Privacy of the choice: no run has begun"
    choice.tell(looked_at, privacy)
    left = len(settings) - len(looked_at)
    remarks = [f"{left} of them have not begun, and count all the same."] if left else []
    held_out = _held_out(list(settings.values()))
    remarks.append(choice.who_is_not_covered(held_out=held_out, public=public))
    remarks.append("Every run counts once; one that was begun anew after it failed counts again.")
    return choice.write(output, privacy, *remarks)


def _held_out(settings: Sequence[RunSettings]) -> bool:
    """True if a run is scored on a part of the training set."""
    data = [getattr(each, "data", None) for each in settings]
    return any(getattr(each, "holdout", None) is not None for each in data)


def read_settings(
    found: Sequence[Member], arguments: argparse.Namespace, schema: type[RunSettings]
) -> dict[pathlib.Path, RunSettings]:
    """The settings of every run by its folder; of a grid, without runs that will refuse theirs.

    Raises:
        ValueError: if a point of a random search cannot be read.
    """
    kept: dict[pathlib.Path, RunSettings] = {}
    for member in found:
        fields = member.fields(arguments.overrides)
        try:
            kept[member.folder] = load_config(schema, member.config, fields)
        except ValueError:
            if arguments.trials is not None:
                raise
    return kept


def _kept(settings: Sequence[RunSettings]) -> str:
    """A hash of all that runs must keep when they are resumed."""
    kept = [
        {
            name: value
            for name, value in flatten(dataclasses.asdict(each)).items()
            if name not in (*each.free_on_resume, *each.paths)
        }
        for each in settings
    ]
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def check_search(
    arguments: argparse.Namespace, settings: Sequence[RunSettings]
) -> TrialCount | None:
    """The law of a random search, ``None`` where there is none; what does not hold is refused.

    Raises:
        ValueError: naming the option and the remedy.
    """
    if arguments.public_score and _held_out(settings):
        raise ValueError(
            "--public-score: the runs are scored on data.holdout, a part of the training set, "
            "which is as private as that; leave the option out, or set data.holdout to null"
        )
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"--jobs {arguments.jobs}: run at least one at once")
    if arguments.prune and not arguments.public_score:
        raise ValueError(
            "--prune ends runs by how they score on examples that no guarantee covers; if those "
            "are public data, say so by --public-score"
        )
    if arguments.trials is None:
        return None
    trials = random_search.law(arguments.law, arguments.trials)
    if arguments.prune:
        raise ValueError(
            "--prune with --trials: a run that is ended because others were better is no "
            "independent draw, and the bound on the best of a random number of runs does not "
            "hold; leave out one of them"
        )
    if (reason := choice.obstacle(settings)) is not None:
        raise ValueError(f"--trials {arguments.trials:g}: {reason}")
    if seeds := [each.seed for each in settings if each.seed is not None]:
        raise ValueError(
            f"--trials {arguments.trials:g} with seed={seeds[0]}: a point that is drawn twice "
            "would be the same run twice, and no independent draw; set seed to null"
        )
    if sent := [each.loggers for each in settings if set(each.loggers) - {"tensorboard"}]:
        raise ValueError(
            f"--trials {arguments.trials:g} with loggers={sent[0]}: a service would see runs that "
            "must stay secret, and how many there are; set loggers to [tensorboard] or []"
        )
    choice.check_points(settings)
    return trials


def studied(
    found: Sequence[Member], arguments: argparse.Namespace, recipe: str, output: pathlib.Path
) -> tuple[list[str], bool]:
    """Run members as a study: the names of those that failed, and whether Ctrl-C stopped it."""
    jobs = [
        Job(
            folder=member.folder,
            parameters={"config": member.config, **member.overrides},
            command=["-m", f"recipes.{recipe}", *member.arguments(arguments.overrides)],
        )
        for member in found
    ]
    study = Study(output, metric=arguments.score, prune=arguments.prune, jobs=jobs)
    return study.run(at_once=arguments.jobs or 1)


def search(
    found: Sequence[Member],
    settings: Sequence[RunSettings],
    trials: TrialCount,
    arguments: argparse.Namespace,
    recipe: str,
    output: pathlib.Path,
) -> tuple[list[str], bool]:
    """Run a random number of points drawn from the grid, and publish the best of them."""
    points = {member.folder.name: member for member in found}
    drawn = [
        dataclasses.replace(points[point], folder=folder)
        for point, folder in random_search.drawn(output, list(points), trials, _kept(settings))
    ]
    if not drawn:
        print("no run was drawn (the law allows that): there is nothing to release")
        return [], False
    failed, interrupted = studied(drawn, arguments, recipe, output)
    left = [member for member in drawn if not member.finished]
    if left:
        print(f"{len(left)} of {len(drawn)} runs are left (a secret): no choice has been made")
        return failed, interrupted
    best = max(drawn, key=lambda m: ranked(m.result()[arguments.score], arguments.score))
    chosen = random_search.publish(best.folder, output)
    privacy = choice.reached_at_random(settings, [m.folder for m in drawn], trials)
    choice.tell([chosen], privacy)
    about = choice.who_is_not_covered(held_out=_held_out(settings), public=arguments.public_score)
    better = "least" if minimized(arguments.score) else "greatest"
    print(f"the best of {len(drawn)} runs (a secret) is {best.folder}")
    print(
        choice.write(
            chosen,
            privacy,
            about,
            f"Chosen was the run with the {better} {arguments.score}; every run drew its "
            f"hyperparameters uniformly from {len(found)} combinations.",
            "The guarantee in privacy_report.md is that of the run by itself.",
        )
    )
    print(f"for release: {chosen}, and nothing else of {output}")
    return failed, interrupted


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
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="K",
        help="so many runs at once, as an Optuna study in the output folder (extra sweep)",
    )
    parser.add_argument(
        "--score", default="loss", help="the metric that runs are compared by in a study"
    )
    parser.add_argument(
        "--public-score",
        action="store_true",
        help="the examples that runs are scored on are public data",
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help="a study ends runs that score worse than the median of those before",
    )
    parser.add_argument(
        "--trials",
        type=float,
        metavar="MEAN",
        help="in place of the whole grid, a secret number of runs, MEAN on average, at points "
        "drawn from it; only the best is released, for a smaller ε",
    )
    parser.add_argument(
        "--law",
        choices=random_search.LAWS,
        default="geometric",
        help="of the number of --trials; logarithmic costs least and varies most, poisson varies "
        "least",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the results as one JSON document, and everything else to standard error",
    )
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="for every run")
    arguments = parser.parse_intermixed_args(argv)
    try:
        grid = read_yaml(pathlib.Path(arguments.grid))
        output = pathlib.Path(arguments.output or grid.get("output", "runs/sweep"))
        found = members(grid, output)
        schema, recipe = SCHEMAS[grid["recipe"]], grid["recipe"]
        # One of each configuration: a misspelt field should not fail hundreds of times.
        for member in {member.config: member for member in found}.values():
            load_config(schema, member.config, member.fields(arguments.overrides))
        if arguments.list:
            folders = [str(member.folder) for member in found]
            print(json.dumps({"runs": folders}) if arguments.json else "\n".join(folders))
            return 0
        with words_to_stderr(arguments.json):
            failed, interrupted = _run(found, arguments, schema, recipe, output)
    except (ValueError, OSError) as error:
        print(f"error: {in_words(error)}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(_document(found, arguments, output, failed), indent=2))
    return _status(failed, interrupted)


def _run(
    found: Sequence[Member],
    arguments: argparse.Namespace,
    schema: type[RunSettings],
    recipe: str,
    output: pathlib.Path,
) -> tuple[list[str], bool]:
    """Run the grid as the arguments say; the names of failed runs, and whether Ctrl-C stopped it.

    Raises:
        ValueError: before the first run, for what cannot be run or searched as it is asked for.
        OSError: if the folder cannot be written to.
    """
    by_folder = read_settings(found, arguments, schema)
    settings = list(by_folder.values())
    trials = check_search(arguments, settings)
    if trials is None and choice.obstacle(settings) is None:
        choice.keep_plan(output, [member.folder.name for member in found], _kept(settings))
    print(choice.planned(settings, trials), flush=True)
    output.mkdir(parents=True, exist_ok=True)
    if trials is not None:
        return search(found, settings, trials, arguments, recipe, output)
    if arguments.jobs is not None or arguments.prune:
        failed, interrupted = studied(found, arguments, recipe, output)
    else:
        failed, interrupted = one_by_one(found, arguments, recipe)
    print(summarise(found, output))
    print(state_choice(by_folder, output, public=arguments.public_score))
    return failed, interrupted


def _document(
    found: Sequence[Member],
    arguments: argparse.Namespace,
    output: pathlib.Path,
    failed: Sequence[str],
) -> dict[str, Any]:
    """The output of ``--json``: of a random search, only the run that may be released."""
    folder = output
    if arguments.trials is not None:
        folder = output / random_search.CHOSEN
        told: dict[str, Any] = {"chosen": str(folder) if folder.exists() else None}
    else:
        results = json.loads((output / "results.json").read_text(encoding="utf-8"))
        told = {"planned": len(found), "finished": results, "failed": list(failed)}
    privacy = folder / f"{choice.CHOICE}.json"
    if privacy.exists():
        told["privacy_of_choice"] = json.loads(privacy.read_text(encoding="utf-8"))
    return told


def one_by_one(
    found: Sequence[Member], arguments: argparse.Namespace, recipe: str
) -> tuple[list[str], bool]:
    """Run members in this process: names of those that failed, and whether Ctrl-C stopped it."""
    failed: list[str] = []
    for member in tqdm(found, desc="runs", unit="run"):
        if member.finished:
            continue
        status = RECIPES[recipe](member.arguments(arguments.overrides))
        if status == INTERRUPTED:
            return failed, True
        if status:
            failed.append(member.folder.name)
    return failed, False


def _status(failed: Sequence[str], interrupted: bool) -> int:
    if failed:
        print(f"{len(failed)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return INTERRUPTED if interrupted else 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
