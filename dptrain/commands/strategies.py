"""``dptrain strategies``: the strategy families side by side."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from dptrain.commands.outputs import check_outputs, draw, write_json
from dptrain.commands.parser import declare
from dptrain.planning import compare_strategies
from dptrain.reporting import plot_strategies
from dptrain.strategies import PREFIX_SUMS, MomentumSGD

_EXAMPLE = "dptrain strategies --steps 200 --epochs 4 --bands 1 4 16 --parameters 100000"


def add(commands: Any) -> None:
    """Declare the command."""
    parser = declare(commands, "strategies", run, example=_EXAMPLE)
    parser.add_argument("--steps", type=int, required=True, help="n, optimizer steps of the run")
    parser.add_argument(
        "--epochs", type=int, help="number of participations of an example (default 1)"
    )
    parser.add_argument("--max-participations", type=int, help="instead of --epochs")
    parser.add_argument(
        "--min-sep", type=int, help="with --max-participations: least number of steps between two"
    )
    parser.add_argument(
        "--bands",
        type=int,
        nargs="+",
        help="default: those of 1 4 16 64 that do not exceed the steps",
    )
    parser.add_argument("--momentum", type=float, default=0.0, help="of SGD; the workload follows")
    parser.add_argument("--parameters", type=int, default=10_000_000, help="size of the model")
    parser.add_argument(
        "--dense", action="store_true", help="add the families that optimize every entry (slow)"
    )
    parser.add_argument("--no-time", action="store_true", help="do not time the steps of noise")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    parser.add_argument("--plot", type=pathlib.Path, help="plot errors and correlations to a PNG")


def run(options: argparse.Namespace) -> None:
    """Compare the strategy families: error at fixed privacy, memory and time of their noise."""
    workload = MomentumSGD(momentum=options.momentum) if options.momentum else PREFIX_SUMS
    bands = options.bands or [count for count in (1, 4, 16, 64) if count <= options.steps]
    check_outputs(options.json, plot=options.plot)
    found = compare_strategies(
        steps=options.steps,
        epochs=options.epochs,
        max_participations=options.max_participations,
        min_sep=options.min_sep,
        bands=bands,
        workload=workload,
        parameters=options.parameters,
        timed=not options.no_time,
        dense=options.dense,
    )
    print(found)
    write_json(options.json, found.to_dict())
    draw(options.plot, plot_strategies, found)
