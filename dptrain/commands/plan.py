"""``dptrain plan``: which scheme and strategy to train with."""

from __future__ import annotations

import argparse
import pathlib
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tqdm.auto import tqdm

from dptrain.commands.outputs import check_outputs, draw, read_graph, write_json
from dptrain.commands.parser import declare
from dptrain.planning import (
    BOUNDS,
    DEFAULT_BANDS,
    Plan,
    Question,
    compare,
    plan_users,
    training_yaml,
)
from dptrain.reporting import plot_plan, plot_user_plan
from dptrain.strategies import PREFIX_SUMS, MomentumSGD

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_EXAMPLE = r"""
dptrain plan --epsilon 8 --dataset-size 1500 --batch-size 150 --epochs 10 --max-bands 4 \
    --out run.yaml"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = declare(commands, "plan", run, example=_EXAMPLE)
    add_plan_arguments(parser)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that ``run`` reads."""
    parser.add_argument("--epsilon", type=float, required=True, help="target ε")
    parser.add_argument("--delta", type=float, help="target δ (default 1/(2N))")
    parser.add_argument("--dataset-size", type=int, help="N, number of examples")
    parser.add_argument(
        "--users",
        type=pathlib.Path,
        help="instead of --dataset-size: text file with one line per example listing the ids of "
        "its users separated by blanks; compares schemes that protect users",
    )
    parser.add_argument(
        "--bounds", type=int, nargs="+", help="with --users: bounds on a user's examples "
        f"to compare (default {' '.join(map(str, BOUNDS))})",
    )  # fmt: skip
    parser.add_argument(
        "--alignment", type=float, help="with --users: mean inner product of two gradients of one "
        "user, divided by an example's mean squared norm, 0 to 1 (default 1; do not compute it "
        "from private data)",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=float, required=True, help="B̄, expected")
    parser.add_argument("--epochs", type=float, help="expected passes over the data")
    parser.add_argument("--steps", type=int, help="instead of --epochs")
    parser.add_argument(
        "--max-bands",
        type=int,
        help=f"largest number of bands of a strategy (default {DEFAULT_BANDS})",
    )
    parser.add_argument(
        "--buffers",
        type=int,
        default=3,
        help="buffers of the BLT that is compared (default 3; 0: no BLT)",
    )
    parser.add_argument("--momentum", type=float, default=0.0, help="of SGD; the workload follows")
    parser.add_argument("--parameters", type=int, default=10_000_000, help="size of the model")
    parser.add_argument(
        "--physical-batch-size", type=int, help="number of rows that the device holds at once"
    )
    parser.add_argument("--memory", type=_bytes, help="most noise state, e.g. 4GB")
    parser.add_argument(
        "--fixed-size", action="store_true", help="choose a scheme with batches of constant size"
    )
    parser.add_argument("--accountant", help="the only one to ask, by name")
    parser.add_argument(
        "--slow", action="store_true", help="also ask accountants that take minutes a pair"
    )
    parser.add_argument(
        "--certify", action="store_true", help="certify the best by simulation (minutes)"
    )
    parser.add_argument(
        "--certificates", type=pathlib.Path, help="folder for the certificate; training reuses it"
    )
    parser.add_argument("--no-time", action="store_true", help="do not time the steps of noise")
    parser.add_argument(
        "--out", type=pathlib.Path, help="write a YAML configuration that trains with the best"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the comparison to a PNG")


def run(
    options: argparse.Namespace,
    *,
    program: str = "dptrain plan",
    more: Callable[[Question], Mapping[str, Any]] | None = None,
    usage: str | None = None,
) -> None:
    """Compare schemes and strategies at equal privacy, and write the YAML to train the best."""
    if (options.users is None) == (options.dataset_size is None):
        raise ValueError("give exactly one of --dataset-size and --users")
    if options.users is not None:
        _plan_users(options)
        return
    if options.bounds is not None:
        raise ValueError("--bounds without --users: it bounds the examples of users")
    if options.alignment is not None:
        raise ValueError("--alignment without --users: it describes the gradients of one user")
    if options.dataset_size < 1:
        raise ValueError(f"dataset_size={options.dataset_size}: must be at least 1")
    delta = 1 / (2 * options.dataset_size) if options.delta is None else options.delta
    if options.out is not None and delta >= 1 / options.dataset_size:
        raise ValueError(
            f"--delta {delta:g} with --out: training requires δ below 1/N = "
            f"{1 / options.dataset_size:g}; use half of that or less, or leave out --out"
        )
    question = Question.of_run(
        epsilon=options.epsilon,
        delta=delta,
        dataset_size=options.dataset_size,
        batch_size=options.batch_size,
        epochs=options.epochs,
        steps=options.steps,
        max_bands=options.max_bands,
        workload=MomentumSGD(momentum=options.momentum) if options.momentum else PREFIX_SUMS,
        buffers=options.buffers,
        parameters=options.parameters,
        physical_batch_size=options.physical_batch_size,
        memory=options.memory,
        fixed_size=options.fixed_size,
    )
    check_outputs(options.out, options.json, plot=options.plot)
    so_far = _SoFar()
    try:
        plan = compare(
            question,
            accountant=options.accountant,
            slow=options.slow,
            timed=not options.no_time,
            certify=options.certify,
            certificates=options.certificates,
            found=so_far,
        )
    except KeyboardInterrupt:
        if so_far.plan is not None and so_far.plan.rows:
            print(so_far.plan)
            raise KeyboardInterrupt(so_far.interruption) from None
        raise
    print(plan)
    write_json(options.json, plan.to_dict())
    draw(options.plot, plot_plan, plan)
    if options.out is None:
        return
    if plan.best is None:
        raise ValueError(f"--out {options.out}: nothing is eligible, so there is nothing to write")
    folder = None if options.certificates is None else str(options.certificates)
    text = training_yaml(
        question,
        plan.best,
        command=_command(program, options),
        certificates=folder,
        more=None if more is None else more(question),
        usage=usage,
    )
    options.out.write_text(text, encoding="utf-8")
    print(f"configuration: {options.out}")


class _SoFar:
    """Keeps the plan as it grows, and says on standard error when something better was found.

    A plan may take minutes, and most of them go to what is not chosen in the end.
    """

    interruption = "the comparison ended early with these results, and nothing was written"

    def __init__(self) -> None:
        self.plan: Plan | None = None

    def __call__(self, plan: Plan) -> None:
        before, best = None if self.plan is None else self.plan.best, plan.best
        self.plan = plan
        if best is None or (before is not None and best.error >= before.error):
            return
        about = "≈" if best.is_estimate else "="
        pair = f"{best.candidate.scheme_name} with {best.candidate.strategy_name}"
        tqdm.write(
            f"best so far: {pair}, σ {about} {best.noise_multiplier:.4g}, error {best.error:.4g}",
            file=sys.stderr,
        )


# Arguments that say nothing about a plan for users, with what they are if they are not given.
_NOT_FOR_USERS = {
    "buffers": 3, "physical_batch_size": None, "memory": None, "fixed_size": False,
    "accountant": None, "slow": False, "certify": False, "certificates": None, "out": None,
}  # fmt: skip


def _plan_users(options: argparse.Namespace) -> None:
    """Compare ways to protect the users of a file."""
    for name, usual in _NOT_FOR_USERS.items():
        if getattr(options, name) != usual:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag} with --users: the comparison of users does not support it; leave it out"
            )
    check_outputs(options.json, plot=options.plot)
    graph = read_graph(options.users)
    if (options.epochs is None) == (options.steps is None):
        raise ValueError("give exactly one of --epochs and --steps")
    if not options.batch_size.is_integer():
        raise ValueError(f"--batch-size {options.batch_size:g}: must be an integer with --users")
    size = int(options.batch_size)
    steps = options.steps or max(1, round(options.epochs * graph.examples / size))
    plan = plan_users(
        graph,
        epsilon=options.epsilon,
        delta=1 / (2 * graph.users) if options.delta is None else options.delta,
        batch_size=size,
        steps=steps,
        bounds=options.bounds or BOUNDS,
        alignment=1.0 if options.alignment is None else options.alignment,
        max_bands=DEFAULT_BANDS if options.max_bands is None else options.max_bands,
        workload=MomentumSGD(momentum=options.momentum) if options.momentum else PREFIX_SUMS,
    )
    print(plan)
    write_json(options.json, plan.to_dict())
    draw(options.plot, plot_user_plan, plan)


def _command(program: str, options: argparse.Namespace) -> str:
    """The command line again, with the arguments that decide the plan."""
    words = program.split()
    for module in getattr(options, "modules", []):
        words[1:1] = ["--import", module]
    for name, value in vars(options).items():
        if (
            name in ("command", "run", "modules", "out", "json", "plot")
            or value is None
            or value is False
        ):
            continue
        flag = f"--{name.replace('_', '-')}"
        words.append(flag)
        if value is not True:
            words.append(f"{value:g}" if isinstance(value, float) else str(value))
    return shlex.join(words)


def _bytes(text: str) -> float:
    """``"4GB"`` in bytes; units of 1000."""
    for unit in ("kB", "MB", "GB", "TB", "B"):
        if text.strip().endswith(unit):
            try:
                return float(text.strip().removesuffix(unit)) * _UNITS[unit]
            except ValueError:
                break
    raise argparse.ArgumentTypeError(
        f"{text!r}: must be a number and B, kB, MB, GB or TB, e.g. 4GB"
    )
