"""``dptrain verify``: whether a privacy statement follows from the mechanism inside."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from dptrain.commands.outputs import check_outputs, read_json, write_json
from dptrain.commands.parser import declare
from dptrain.reporting import STATEMENT, Verification, read_statement, verify_statement

_EXAMPLE = r"""
dptrain calibrate --scheme Poisson batch_size=500 --strategy Identity --dataset-size 50000 \
    --epochs 10 --epsilon 2 --delta 1e-6 --json stated.json
dptrain verify stated.json"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = declare(commands, "verify", run, example=_EXAMPLE)
    parser.add_argument(
        "path",
        type=pathlib.Path,
        metavar="STATEMENT",
        help=f"a {STATEMENT}, another JSON file with a guarantee, or a run's folder; the .md file "
        "of the same name must agree with it",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the findings to this file")


def run(options: argparse.Namespace) -> int:
    """Work out a statement's guarantee again, and say which of its fields follow from it."""
    check_outputs(options.json)
    path: pathlib.Path = options.path
    path = path / STATEMENT if path.is_dir() else path
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise ValueError(
            f"there is no file {path}: name a {STATEMENT}, or the folder of a finished run"
        ) from None
    beside = path.with_suffix(".md")
    try:
        if path.name == STATEMENT:
            read_statement(value)  # not less than that
        text = beside.read_text(encoding="utf-8") if beside.is_file() else None
        found = verify_statement(value, text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    print(f"{found}\n\n{_verdict(found)}")
    write_json(
        options.json,
        {
            "reproduced": found.reproduced,
            "verified": list(found.verified),
            "declared": list(found.declared),
            "refuted": list(found.refuted),
        },
    )
    return 0 if found.reproduced else 1


def _verdict(found: Verification) -> str:
    stated = found.guarantee
    if not found.reproduced:
        return f"NOT REPRODUCED: {'; '.join(found.refuted)}."
    return (
        f"Reproduced: (ε = {stated.epsilon:.6g}, δ = {stated.delta:.6g}) for each "
        f"{stated.unit.noun} ({stated.adjacency.value}) follows from the mechanism "
        f"{stated.mechanism_hash}, {stated.kind.sentence}. Whether this mechanism actually ran "
        "cannot be verified; it is the author's word, like every other declared field."
    )
