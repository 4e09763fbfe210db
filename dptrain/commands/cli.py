"""The command line: ``dptrain`` and its commands, their errors in one line, their exit status."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

import shtab

from dptrain import __version__
from dptrain.commands import account, audit, calibrate, plan, report, strategies, train, verify
from dptrain.commands.parser import CommandParser
from dptrain.commands.several import compose, odometer
from dptrain.core import in_words


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0 if all went well, 1 if a statement is refuted or not reproduced or a
        ledger refuses a release, 2 for a mistake in the arguments, 130 if interrupted.
    """
    parser = CommandParser(
        prog="dptrain",
        description="Differentially private training.",
        example="dptrain plan --help",
        epilog="exit status: 0 if all went well, 1 if a statement is refuted or not reproduced or "
        "a ledger refuses a release, 2 for a mistake in the arguments, 130 if interrupted",
    )
    parser.add_argument("--version", action="version", version=f"dptrain {__version__}")
    shtab.add_argument_to(
        parser, "--print-completion", help="print the shell code that completes these commands"
    )
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="import a module that registers your own schemes, strategies or accountants",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    several = (compose, odometer)
    for member in (plan, strategies, calibrate, account, audit, train, report, verify, *several):
        member.add(commands)
    options = parser.parse_args(argv)
    for module in options.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"dptrain: --import {module}: {in_words(error)}", file=sys.stderr)
            return 2
    name = f"dptrain {options.command}"

    said: set[str] = set()

    def told(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(message) not in said:  # each step of a search says the same
            said.add(str(message))
            print(f"{name}: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = told
        try:
            status: int | None = options.run(options)
        except (ValueError, ModuleNotFoundError, OSError) as error:
            print(f"{name}: {in_words(error)}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as error:
            # A certificate under way says in its message where its samples are kept.
            print(f"{name}: interrupted{f': {error}' if str(error) else ''}", file=sys.stderr)
            return 130
    return status or 0
