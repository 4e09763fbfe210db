"""The command line: ``dptrain strategies``."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.table import table
from dptrain.strategies.workload import PREFIX_SUMS

_IMAGES = (".png", ".pdf", ".svg")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2 for a mistake in the arguments)."""
    parser = argparse.ArgumentParser(prog="dptrain", description="Differentially private training.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_strategies(
        commands.add_parser("strategies", help=_strategies.__doc__, description=_strategies.__doc__)
    )
    options = parser.parse_args(argv)
    try:
        options.run(options)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        print(f"dptrain {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _add_strategies(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, required=True, help="n, optimiser steps of the run")
    parser.add_argument("--epochs", type=int, help="times that an example takes part (default 1)")
    parser.add_argument("--max-participations", type=int, help="instead of --epochs")
    parser.add_argument("--min-sep", type=int, help="with --max-participations: steps between two")
    parser.add_argument(
        "--bands", type=int, nargs="+", help="default: those of 1 4 16 64 that fit the steps"
    )
    parser.add_argument("--momentum", type=float, default=0.0, help="of SGD; the workload follows")
    parser.add_argument("--parameters", type=int, default=10_000_000, help="size of the model")
    parser.add_argument(
        "--dense", action="store_true", help="add the families optimised entry by entry (slow)"
    )
    parser.add_argument("--no-time", action="store_true", help="do not time the steps of noise")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    parser.add_argument("--plot", type=pathlib.Path, help="draw errors and correlations to a PNG")
    parser.set_defaults(run=_strategies)


def _strategies(options: argparse.Namespace) -> None:
    """Compare the strategy families: error at fixed privacy, memory and time of their noise."""
    workload = MomentumSGD(momentum=options.momentum) if options.momentum else PREFIX_SUMS
    bands = options.bands or [count for count in (1, 4, 16, 64) if count <= options.steps]
    for path in (options.json, options.plot):  # found out now rather than after the work
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
    if options.plot is not None and options.plot.suffix.lower() not in _IMAGES:
        raise ValueError(f"--plot {options.plot}: end the name in one of {', '.join(_IMAGES)}")
    found = table(
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
    if options.json is not None:
        options.json.write_text(json.dumps(found.to_dict(), indent=2) + "\n", encoding="utf-8")
        print(f"figures: {options.json}")
    if options.plot is not None:
        from dptrain.plots import plot_strategies

        plot_strategies(found, options.plot)
        print(f"plot: {options.plot}")
