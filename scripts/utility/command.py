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
    base: pathlib.Path | Mapping[str, pathlib.Path],
    root: pathlib.Path | None = None,
) -> None:
    """Everything that is missing, or what the arguments leave of it.

    Args:
        contest: what is compared; of several, by name, the first argument takes one.
        description: first paragraph of the help.
        base: path of the results without their endings, unless the arguments name another; as many
            as contests.
        root: folder of the data, unless the arguments name one.
    """
    contests = contest if isinstance(contest, Mapping) else {"": contest}
    bases = base if isinstance(base, Mapping) else {"": base}
    parser = argparse.ArgumentParser(description=description)
    if isinstance(contest, Mapping):
        parser.add_argument("part", choices=list(contests), help="which contest")
    parser.set_defaults(part="")
    parser.add_argument(
        "--root", type=pathlib.Path, default=root, help="folder of the data; none: table only"
    )
    parser.add_argument("--results", type=pathlib.Path, help="path without an ending")
    parser.add_argument("--processes", type=int, default=2, help="runs at once, a thread each")
    parser.add_argument("--device", default="cpu", help="that runs train on, e.g. cuda")
    parser.add_argument("--epsilons", type=float, nargs="+", help="some of them")
    parser.add_argument("--methods", nargs="+", help="some of them, by name")
    parser.add_argument("--seeds", type=int, nargs="+", help="others, or some of them")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="run the chosen learning rates again, in files of their own (--results)",
    )
    options = parser.parse_args()
    if reason := unusable(options.device):
        parser.error(f"--device {options.device}: {reason}")
    contest, base = contests[options.part], bases[options.part]
    seeds = tuple(options.seeds or contest.seeds)
    warnings.simplefilter("ignore")
    # The table is of the seeds that were asked for.
    shown = dataclasses.replace(contest, seeds=seeds)
    results = Results(shown, options.results or base)
    pairs = [
        (method, epsilon)
        for epsilon in options.epsilons or contest.epsilons
        for method in contest.methods(epsilon)
        if not options.methods or method in options.methods
    ]
    if not pairs:
        known = ", ".join(contest.methods(contest.epsilons[0]))
        parser.error(f"--methods {options.methods}: none of {known}")
    chosen = Results(contest, base) if options.fresh else results
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
    rows = results.rows(chosen)
    results.publish(rows)
    cells = [cell for row in rows for cell in row.values() if "seeds" in cell]
    draw(
        rows,
        {name: method.title for name, method in contest.methods(contest.epsilons[0]).items()},
        delta=contest.delta,
        title=f"{contest.title}\nmean of up to {max((cell['seeds'] for cell in cells), default=0)} "
        "seeds, 95 % intervals",
        path=results.beside(".png"),
        score=contest.score,
    )
