"""``dptrain compose``: what several runs on the same data promise together."""

from __future__ import annotations

import argparse
import math
import pathlib
from collections.abc import Sequence
from typing import Any, assert_never

import numpy as np

from dptrain.accounting import ComposedRuns
from dptrain.accounting.base import SMALLEST_DELTA
from dptrain.commands.arguments import add_adjacency
from dptrain.commands.outputs import check_outputs, draw, plain_epsilon, write_json
from dptrain.commands.parser import declare
from dptrain.commands.several.run_files import KnownRun, check_same, how_shown, read_runs
from dptrain.contrib.selection import PLANNED, epsilon_at, weakest_kind
from dptrain.core import Adjacency, Kind, aligned, checks
from dptrain.reporting import plot_composed

_EXAMPLE = r"""
dptrain calibrate --scheme Poisson batch_size=500 --strategy Identity --dataset-size 50000 \
    --epochs 10 --epsilon 2 --delta 1e-6 --out small.json
dptrain calibrate --scheme CyclicPoisson batch_size=500 cycle=4 --strategy BSR bands=4 \
    --dataset-size 50000 --epochs 10 --epsilon 4 --delta 1e-6 --json large.json
dptrain compose small.json large.json --delta 1e-6 --json together.json"""

ASSUMED = (
    f"{PLANNED}; which of them were made, what was trained with them (model, hyperparameters) and "
    "when they ended may depend on all earlier results. Runs that were added, and noise that was "
    "chosen, after seeing results are not covered: dptrain odometer keeps a budget for those",
    "the runs' random numbers are independent: two runs from one seed share their noise, and of "
    "them nothing follows",
    "these are all runs on these data: those that were planned and not made, that failed or were "
    "thrown away included",
)
NOT_COVERED = (
    "whatever else was learned from the data: preprocessing, other runs, a test set or held-out "
    "people that the choice among the runs looked at without noise",
    "checkpoints, seeds and metrics of training batches of any of the runs",
)
_SAME = "all runs read the same data set, and nobody is more than one unit of it"
_OVERLAPPING = (
    "as was stated, the data sets may share people, and nobody is more than one unit in any of them"
)


def add(commands: Any) -> None:
    """Declare the command."""
    parser = declare(commands, "compose", run, example=_EXAMPLE)
    parser.add_argument(
        "runs",
        nargs="+",
        type=pathlib.Path,
        metavar="RUN",
        help="every planned run, made or not: a mechanism, statement or summary as JSON, or a "
        "run's folder; repeat one for every run of it",
    )
    parser.add_argument(
        "--planned",
        type=int,
        metavar="M",
        help="the largest number of runs that might have been made, regardless of results; runs "
        "that are not named count like the last one named (default: the number named)",
    )
    parser.add_argument(
        "--delta",
        type=float,
        help="δ: find the smallest ε (default: the largest δ stated for a run, or their sum if "
        "that δ is too small)",
    )
    parser.add_argument("--epsilon", type=float, help="ε: find the least δ")
    data = parser.add_mutually_exclusive_group()
    data.add_argument(
        "--overlapping",
        action="store_true",
        help="the data sets differ but may share people, each at most one unit of a set",
    )
    data.add_argument(
        "--disjoint",
        action="store_true",
        help="no unit is in two of the data sets, so δ is the largest of the runs",
    )
    add_adjacency(
        parser, "the neighboring relation of bare mechanisms (default: the mechanism's own)"
    )
    parser.add_argument("--plot", type=pathlib.Path, help="draw the curves to a PNG")
    parser.add_argument("--json", type=pathlib.Path, help="write figures and curves to this file")


def run(options: argparse.Namespace) -> None:
    """State what several planned runs on the same data promise together, made or not."""
    if options.delta is not None and options.epsilon is not None:
        raise ValueError(
            f"give one of --delta and --epsilon (got delta={options.delta}, "
            f"epsilon={options.epsilon})"
        )
    if options.delta is not None:
        checks.number("--delta", options.delta, above=0, below=1)
    if options.epsilon is not None:
        checks.number("--epsilon", options.epsilon, minimum=0)
    check_outputs(options.json, plot=options.plot)
    adjacency = None if options.adjacency is None else Adjacency(options.adjacency)
    named = len(options.runs)
    planned = named if options.planned is None else checks.integer("--planned", options.planned)
    if planned < named:
        raise ValueError(
            f"--planned {planned}: {named} runs are named, and all of them count; give the largest "
            "number that might have been made"
        )
    share = None if options.delta is None else options.delta / (2 * planned)
    runs = read_runs(options.runs, delta=share, adjacency=adjacency)
    runs += runs[-1:] * (planned - named)
    check_same(runs, overlapping=options.overlapping, disjoint=options.disjoint)
    together = ComposedRuns([each.limits for each in runs], disjoint=options.disjoint)
    epsilon, delta = _asked(options, runs, together)
    basic = _basic(runs, together, epsilon, delta)
    kind = weakest_kind(together.runs)
    rows = [_row(each, delta) for each in runs]
    print(_sentence(runs, epsilon, delta, kind, disjoint=options.disjoint))
    print(f"\n{_table(runs, rows, delta)}\n")
    print(basic["sentence"])
    assumed = _assumed(runs, options)
    for title, lines in (("It assumes that", assumed), ("It does not cover", NOT_COVERED)):
        print(f"\n{title}")
        print("\n".join(f"- {line}" for line in lines))
    curve = _curve(together, runs, epsilon)
    draw(
        options.plot,
        plot_composed,
        together,
        [each.name for each in runs],
        curve,
        epsilon=epsilon,
        delta=delta,
        lead="\n",
    )
    write_json(
        options.json,
        {
            "epsilon": plain_epsilon(epsilon),
            "delta": delta,
            "kind": kind.value,
            "condition": PLANNED,
            "planned": planned,
            "disjoint": options.disjoint,
            "unit": runs[0].guarantee.unit.noun,
            "adjacency": runs[0].guarantee.adjacency.value,
            "basic": {name: value for name, value in basic.items() if name != "sentence"},
            "runs": rows,
            "profile": curve,
            "assumes": assumed,
            "does_not_cover": list(NOT_COVERED),
        },
    )


def _asked(
    options: argparse.Namespace, runs: Sequence[KnownRun], together: ComposedRuns
) -> tuple[float, float]:
    """The (ε, δ) of the statement; one of them is given or follows from what the runs state."""
    if options.epsilon is not None:
        remove, add = together.delta(options.epsilon)
        return options.epsilon, max(float(max(remove, add)), SMALLEST_DELTA)
    if options.delta is not None:
        return together.epsilon(options.delta), options.delta
    stated = [each.guarantee.delta for each in runs if each.stated]
    if len(stated) < len(runs):
        raise ValueError("--delta is missing: a mechanism has none; give --delta, or --epsilon")
    if math.isfinite(found := together.epsilon(max(stated))):
        return found, max(stated)
    total = min(sum(stated) * (1 + 1e-6), 0.5)
    return together.epsilon(total), total


def _basic(
    runs: Sequence[KnownRun], together: ComposedRuns, epsilon: float, delta: float
) -> dict[str, Any]:
    """The result of basic composition: of the stated numbers, and at the δ of the statement."""
    at = together.added_up(delta) if delta < 1 else 0.0
    found: dict[str, Any] = {"epsilon_at_delta": plain_epsilon(at)}
    text = (
        f"Basic composition (Σ ε at equal shares of δ) gives ε = {at:.6g} at δ = {delta:.6g}"
        if math.isfinite(at)
        else f"Basic composition (Σ ε at equal shares of δ) gives no bound at δ = {delta:.6g}"
    )
    if all(each.stated for each in runs):
        sums = [
            sum(getattr(each.guarantee, name) for each in runs) for name in ("epsilon", "delta")
        ]
        found |= {"sum_of_epsilon": sums[0], "sum_of_delta": sums[1]}
        text += f"; the stated numbers add up to ε = {sums[0]:.6g}, δ = {sums[1]:.6g}"
    if math.isfinite(epsilon) and math.isfinite(at) and at > 0 and not together.disjoint:
        text += f". Composed, ε is {epsilon / at:.0%} of that sum" if len(runs) > 1 else ""
    return {**found, "sentence": f"{text}."}


def _sentence(
    runs: Sequence[KnownRun], epsilon: float, delta: float, kind: Kind, *, disjoint: bool
) -> str:
    guarantee = runs[0].guarantee
    how = how_shown(kind, [each.failure_probability for each in runs])
    how += f" (runs: {', '.join(dict.fromkeys(each.limits.accountant for each in runs))})"
    what = "on data sets that share nobody" if disjoint else "together"
    if not math.isfinite(epsilon) or delta >= 1:
        return (
            f"There is no bound for the {len(runs)} planned runs {what} at δ = {delta:.6g}: for "
            "runs that state only (ε, δ), the δ add up; ask for a larger --delta."
        )
    return (
        f"All {len(runs)} planned runs {what}, whichever of them were made, with whatever was "
        f"chosen by looking at their results, are (ε = {epsilon:.6g}, δ = {delta:.6g})-"
        f"differentially private for each {guarantee.unit.noun} ({guarantee.adjacency.value}): "
        f"{guarantee.adjacency.sentence(guarantee.unit)}. That holds if {PLANNED}. This is {how}."
    )


def _row(each: KnownRun, delta: float) -> dict[str, Any]:
    guarantee = each.guarantee
    return {
        "file": each.name,
        "epsilon_at_delta": plain_epsilon(epsilon_at(each.limits, delta)),
        "stated": {"epsilon": guarantee.epsilon, "delta": guarantee.delta} if each.stated else None,
        "known": "curve" if len(each.limits.epsilon) > 1 else "one (ε, δ)",
        "kind": each.limits.kind.value,
        "mechanism_hash": guarantee.mechanism_hash,
        "notes": list(guarantee.notes),
    }


def _table(runs: Sequence[KnownRun], rows: Sequence[dict[str, Any]], delta: float) -> str:
    lines = [
        f"| run | sampling | noise | σ | steps | ε at δ = {delta:.3g} | stated | known |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each, row in zip(runs, rows, strict=True):
        guarantee, own = each.guarantee, row["epsilon_at_delta"]
        stated = f"({guarantee.epsilon:.4g}, {guarantee.delta:.3g})" if each.stated else "–"
        shown = "–" if own == "inf" else f"{own:.4g}"
        lines.append(
            f"| {each.name} | {guarantee.scheme['type']} | {guarantee.strategy['type']} | "
            f"{guarantee.noise_multiplier:.4g} | {guarantee.steps_planned} | {shown} | {stated} | "
            f"{row['known']} |"
        )
    return aligned("\n".join(lines), left=3)


def _assumed(runs: Sequence[KnownRun], options: argparse.Namespace) -> list[str]:
    data = _OVERLAPPING if options.overlapping else _SAME
    if options.disjoint:
        data = (
            "as was stated, no unit is in two of the data sets, and "
            f"{_apart(runs[0].guarantee.adjacency)}"
        )
    return [*ASSUMED, data]


def _apart(adjacency: Adjacency) -> str:
    """The condition under which data sets that share no unit compose as disjoint ones, in words."""
    match adjacency:
        case Adjacency.ZERO_OUT:
            return "who is in which is public or was decided without looking at the data"
        case Adjacency.ADD_REMOVE:
            return (
                "which one a unit is in follows from that unit alone, or from chance, and from "
                "nobody else's data"
            )
        case Adjacency.REPLACE_ONE:
            return "whoever replaces a unit is in the set that the unit was in"
        case _:
            assert_never(adjacency)


def _curve(together: ComposedRuns, runs: Sequence[KnownRun], epsilon: float) -> dict[str, Any]:
    """δ(ε) of all runs together on a grid, to a little beyond the statement's ε."""
    top = epsilon if math.isfinite(epsilon) else max(each.limits.epsilon[-1] for each in runs)
    grid = max(1.5 * top, 1e-3) * np.linspace(0.0, 1.0, 121)
    grid = np.unique(np.append(grid, epsilon)) if math.isfinite(epsilon) else grid
    remove, add = (np.maximum(side, SMALLEST_DELTA) for side in together.delta(grid))
    return {"epsilon": grid.tolist(), "remove": remove.tolist(), "add": add.tolist()}
