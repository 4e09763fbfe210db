"""``dptrain report``: what a run has reached and promises, from the files it left."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dptrain.commands.outputs import check_outputs, read_json, write_json
from dptrain.commands.parser import declare
from dptrain.core import Guarantee, aligned
from dptrain.engine import check_seal
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import (
    STATEMENT,
    html_page,
    model_card,
    plot_curves,
    read_metrics,
    registry_record,
)

_CHECKPOINT, _METRICS = "checkpoint.pt", "metrics.jsonl"
_MARKS = ("step", "split", "not_for_release")
_PRIVATE = {
    _CHECKPOINT: "contains seeds and states, with which anyone can remove the noise",
    "ledger.jsonl": "contains the release of each step, for resuming",
    _METRICS: "contains metrics of training batches among others",
    "tensorboard": "contains metrics of training batches among others",
    "curves.png": "plots metrics of training batches too",
    "config.yaml": "contains the seed, if one was set",
    "individual_NOT_FOR_RELEASE": "what each example has spent",
}
_EXAMPLE = "dptrain report runs/vision"


def add(commands: Any) -> None:
    """Declare the command."""
    parser = declare(commands, "report", run, example=_EXAMPLE)
    parser.add_argument(
        "path",
        type=pathlib.Path,
        metavar="RUN",
        help=f"a run's folder, finished or not, or a {STATEMENT}",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the report to this file")
    parser.add_argument("--plot", type=pathlib.Path, help="plot the metrics to a PNG")
    parser.add_argument(
        "--html", type=pathlib.Path, help="write the statement to one HTML page with its plots"
    )
    parser.add_argument(
        "--model-card",
        type=pathlib.Path,
        help="write the text for a model card on the Hugging Face hub: metadata and a section",
    )
    parser.add_argument(
        "--registry",
        type=pathlib.Path,
        help="write a draft for the public registry of DP deployments (YAML)",
    )


def run(options: argparse.Namespace) -> None:
    """Tell how far a run has come, what it promises, and which of its files may be published."""
    path: pathlib.Path = options.path
    folder = path if path.is_dir() else path.parent
    pages: dict[Callable[[Any], str], pathlib.Path | None] = {
        html_page: options.html,
        model_card: options.model_card,
        registry_record: options.registry,
    }
    check_outputs(options.json, *pages.values(), plot=options.plot)
    written = _pages(path, pages)
    guarantees, done, planned = _stated(path)
    metrics = folder / _METRICS
    records = read_metrics(metrics) if path.is_dir() and metrics.is_file() else []
    if options.plot is not None and not records:
        raise ValueError(f"--plot {options.plot}: there are no metrics in {folder} to plot")
    if done is not None and done < planned:
        what = "the statement below covers them and all planned steps"
        if not guarantees:
            what = "a run without a target ε states its guarantee at the end; use dptrain account"
        print(f"{done:,} of {planned:,} steps have run; {what}.\n")
    for guarantee in guarantees:
        print(f"{guarantee}\n")
    last = _last(records)
    if last:
        lines = ["| step | of | measured | |", "|---|---|---|---|"]
        for record in last:
            measured = ", ".join(f"{k} {v:.4g}" for k, v in record.items() if k not in _MARKS)
            private = "not for release" if record.get("not_for_release") else ""
            lines.append(f"| {record['step']} | {record['split']} | {measured} | {private} |")
        print(aligned("\n".join(lines), left=4) + "\n")
    kept = {name: why for name, why in _PRIVATE.items() if path.is_dir() and (path / name).exists()}
    if kept:
        print("Not for release:")
        print("\n".join(f"- {name}: {why}" for name, why in kept.items()))
    if options.plot is not None:
        plot_curves(records, options.plot)
        print(f"plot: {options.plot}")
    for file, text in written.items():
        file.write_text(text, encoding="utf-8")
        print(f"written: {file}")
    value = {
        "steps_executed": done,
        "steps_planned": planned,
        "guarantees": [json.loads(guarantee.to_json()) for guarantee in guarantees],
        "metrics": last,
        "not_for_release": kept,
    }
    write_json(options.json, value)


def _pages(
    path: pathlib.Path, pages: Mapping[Callable[[Any], str], pathlib.Path | None]
) -> dict[pathlib.Path, str]:
    """Texts of the pages that are asked for, by their files."""
    asked = [(make, file) for make, file in pages.items() if file is not None]
    if not asked:
        return {}
    statement = path / STATEMENT if path.is_dir() else path
    if not statement.is_file():
        raise ValueError(f"{asked[0][1]}: it is created from {statement}, which does not exist")
    value = read_json(statement)
    try:
        return {file: make(value) for make, file in asked}
    except ValueError as error:
        raise ValueError(f"{statement}: {error}") from error


def _stated(path: pathlib.Path) -> tuple[list[Guarantee], int | None, int]:
    """Guarantees, steps that ran and steps planned, by the statement or else by the checkpoint."""
    statement = path / STATEMENT if path.is_dir() else path
    if statement.is_file() and statement.suffix == ".json":
        value = read_json(statement)
        if not isinstance(value, dict) or "guarantee" not in value:
            raise ValueError(
                f"{statement}: it is not a privacy statement, since it has no 'guarantee'"
            )
        found = Guarantee.from_json(json.dumps(value["guarantee"]))
        return [found], found.steps_executed, found.steps_planned
    checkpoint = path / _CHECKPOINT
    if not checkpoint.is_file():
        raise ValueError(
            f"{path} contains neither {STATEMENT} nor {_CHECKPOINT}; name the folder of a run, or "
            "a statement"
        )
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:  # zipfile's, pickle's and torch's own kinds
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{checkpoint} is damaged ({type(error).__name__}: {reason})") from error
    check_seal(state, str(checkpoint))
    state = state.get("run", state)  # a recipe's holds more than the engine's
    guarantees = [Guarantee.from_json(text) for text in state["guarantees"]]
    return guarantees, state["steps_executed"], MatrixMechanism.from_dict(state["mechanism"]).steps


def _last(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last record of every split."""
    return list({record["split"]: record for record in records}.values())
