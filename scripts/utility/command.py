"""The command line of a contest: calibrate, tune, run, print the table, draw it."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import warnings

from scripts.utility.contest import Contest, Job
from scripts.utility.figure import draw
from scripts.utility.results import Results


def run_contest(contest: Contest, description: str, folder: pathlib.Path) -> None:
    """Everything that is missing, or what the arguments leave of it.

    Args:
        contest: what is compared.
        description: first paragraph of the help.
        folder: of the results, unless the arguments name another.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--root", type=pathlib.Path, help="folder of the data; none: table only")
    parser.add_argument("--results", type=pathlib.Path, default=folder)
    parser.add_argument("--processes", type=int, default=2, help="runs at once, a thread each")
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(contest.epsilons))
    parser.add_argument("--methods", nargs="+", help="some of them, by name")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(contest.seeds))
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="run the chosen learning rates again, in a folder of its own (--results)",
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    # The table is of the seeds that were asked for.
    shown = dataclasses.replace(contest, seeds=tuple(options.seeds))
    results = Results(shown, options.results)
    pairs = [
        (method, epsilon)
        for epsilon in options.epsilons
        for method in contest.methods(epsilon)
        if not options.methods or method in options.methods
    ]
    if not pairs:
        known = ", ".join(contest.methods(contest.epsilons[0]))
        parser.error(f"--methods {options.methods}: none of {known}")
    chosen = Results(contest, folder) if options.fresh else results
    if options.root is not None:
        if not options.fresh:
            tuning = [
                Job(method=m, epsilon=e, rate=rate, seed=seed, tuning=True)
                for m, e in pairs
                for rate in contest.rates
                for seed in contest.tuning_seeds
            ]
            results.complete(tuning, options.root, options.processes)
        final = [
            Job(method=m, epsilon=e, rate=rate, seed=seed, tuning=False)
            for seed in options.seeds
            for m, e in pairs
            if (rate := chosen.best_rate(m, e)) is not None
        ]
        results.complete(final, options.root, options.processes)
    table = results.table(chosen)
    seeds = max((cell["seeds"] for cell in table["cells"].values()), default=0)
    draw(
        table["cells"],
        {name: method.title for name, method in contest.methods(contest.epsilons[0]).items()},
        epsilons=contest.epsilons,
        delta=contest.delta,
        title=f"{contest.title}: mean of up to {seeds} seeds, 95 % intervals",
        path=results.beside(".png"),
        score=contest.score,
    )
    print(as_text(contest, table))


def as_text(contest: Contest, table: dict) -> str:
    """Accuracies in per cent, or losses, a line for each ε."""
    methods = contest.methods(contest.epsilons[0])
    lines = ["| ε | " + " | ".join(each.title for each in methods.values()) + " |"]
    lines.append("|---|" + "---|" * len(methods))
    for epsilon in contest.epsilons:
        cells = [table["cells"].get(f"{name} {epsilon:g}") for name in methods]
        if any(cells):
            lines.append(
                f"| {epsilon:g} | "
                + " | ".join(cell_text(cell, contest.score) for cell in cells)
                + " |"
            )
    return "\n".join(lines)


def cell_text(cell: dict | None, score: str = "accuracy") -> str:
    """Mean and half-width, with seeds and seconds."""
    if cell is None:
        return "–"
    factor, digits = (100, 1) if score == "accuracy" else (1, 4)
    half = "" if cell["half_width"] is None else f" ± {factor * cell['half_width']:.{digits}f}"
    return (
        f"{factor * cell['mean']:.{digits}f}{half} "
        f"(lr {cell['lr']:g}, {cell['seeds']} seeds, {cell['seconds']:.0f} s)"
    )
