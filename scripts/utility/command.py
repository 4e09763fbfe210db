"""The command line of a contest: calibrate, tune, run, print the table, draw it."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import warnings
from collections.abc import Mapping

from recipes.device import unusable
from scripts.utility.contest import Contest, Job
from scripts.utility.figure import draw
from scripts.utility.results import Results


def run_contest(
    contest: Contest | Mapping[str, Contest],
    description: str,
    folder: pathlib.Path | Mapping[str, pathlib.Path],
) -> None:
    """Everything that is missing, or what the arguments leave of it.

    Args:
        contest: what is compared; of several, by name, the first argument takes one.
        description: first paragraph of the help.
        folder: of the results, unless the arguments name another; as many as contests.
    """
    contests = contest if isinstance(contest, Mapping) else {"": contest}
    folders = folder if isinstance(folder, Mapping) else {"": folder}
    parser = argparse.ArgumentParser(description=description)
    if isinstance(contest, Mapping):
        parser.add_argument("part", choices=list(contests), help="which contest")
    parser.set_defaults(part="")
    parser.add_argument("--root", type=pathlib.Path, help="folder of the data; none: table only")
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("--processes", type=int, default=2, help="runs at once, a thread each")
    parser.add_argument("--device", default="cpu", help="that runs train on, e.g. cuda")
    parser.add_argument("--epsilons", type=float, nargs="+", help="some of them")
    parser.add_argument("--methods", nargs="+", help="some of them, by name")
    parser.add_argument("--seeds", type=int, nargs="+", help="others, or some of them")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="run the chosen learning rates again, in a folder of its own (--results)",
    )
    options = parser.parse_args()
    if reason := unusable(options.device):
        parser.error(f"--device {options.device}: {reason}")
    contest, folder = contests[options.part], folders[options.part]
    seeds = tuple(options.seeds or contest.seeds)
    warnings.simplefilter("ignore")
    # The table is of the seeds that were asked for.
    shown = dataclasses.replace(contest, seeds=seeds)
    results = Results(shown, options.results or folder)
    pairs = [
        (method, epsilon)
        for epsilon in options.epsilons or contest.epsilons
        for method in contest.methods(epsilon)
        if not options.methods or method in options.methods
    ]
    if not pairs:
        known = ", ".join(contest.methods(contest.epsilons[0]))
        parser.error(f"--methods {options.methods}: none of {known}")
    chosen = Results(contest, folder) if options.fresh else results
    if options.root is not None:
        while not options.fresh and (tuning := [job for p in pairs for job in results.tuning(*p)]):
            results.complete(tuning, options.root, options.processes, options.device)
        final = [
            Job(method=m, epsilon=e, rate=rate, seed=seed, tuning=False)
            for seed in seeds
            for m, e in pairs
            if (rate := chosen.best_rate(m, e)) is not None
        ]
        results.complete(final, options.root, options.processes, options.device)
    table = results.table(chosen)
    most = max((cell["seeds"] for cell in table["cells"].values()), default=0)
    draw(
        table["cells"],
        {name: method.title for name, method in contest.methods(contest.epsilons[0]).items()},
        epsilons=contest.epsilons,
        delta=contest.delta,
        title=f"{contest.title}\nmean of up to {most} seeds, 95 % intervals",
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
    seconds = ", ".join(f"{median:.0f} s, {name}" for name, median in cell["seconds"].items())
    return (
        f"{factor * cell['mean']:.{digits}f}{half} "
        f"(lr {cell['lr']:g}, {cell['seeds']} seeds, {seconds})"
    )
