"""``dptrain train``: the recipe that a configuration names, trained from start to statement."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from dptrain.commands.parser import CommandParser, declare
from dptrain.configuration import read_yaml
from dptrain.core import did_you_mean

_RECIPES = ("vision", "arxiv", "individual")
_EXAMPLE = r"""
dptrain train --config configs/digits_vgg_minsep.yaml privacy.epsilon=2 --output runs/tighter
dptrain train --config configs/digits_vgg_minsep.yaml privacy.epsilon=2 --output runs/tighter \
    --resume"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = declare(commands, "train", run, example=_EXAMPLE, verbatim=True)
    add_train_arguments(parser)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of every recipe."""
    parser.add_argument("--config", required=True, help="YAML file, e.g. configs/*.yaml")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument(
        "--accept-lost-ledger",
        action="store_true",
        help="with --resume: continue although ledger.jsonl is lost, which the statement then "
        "mentions",
    )
    parser.add_argument("--output", help="run folder (the field output)")
    parser.add_argument(
        "--simulate",
        type=float,
        metavar="FACTOR",
        help="divide batch size and noise by FACTOR: fast, for tuning, and NOT private",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the summary as one JSON document, and everything else to standard error",
    )
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="e.g. steps=100")


def run(options: argparse.Namespace) -> int:
    """Train what a configuration describes: model, privacy statement and plots in a folder."""
    parser = CommandParser(prog="dptrain train")
    add_train_arguments(parser)
    stated = parser.parse_intermixed_args(options.words)
    name = _recipe(pathlib.Path(stated.config), stated.overrides)
    if "" not in sys.path:
        sys.path.insert(0, "")  # the recipes lie beside the configurations, not in the package
    if importlib.util.find_spec("recipes") is None:
        raise ModuleNotFoundError(
            "dptrain train uses the folder recipes/ of the repository, which is not in the "
            "working directory: change to a clone, or train with dptrain.PrivacyEngine"
        )
    status: int = importlib.import_module(f"recipes.{name}").main(options.words)
    return status


def _recipe(config: pathlib.Path, overrides: Sequence[str]) -> str:
    """The recipe that the configuration, or an override, names."""
    stated = read_yaml(config)
    name = stated.get("recipe") if isinstance(stated, dict) else None
    for override in overrides:
        field, _, value = override.partition("=")
        name = value if field == "recipe" else name
    known = ", ".join(_RECIPES)
    if name is None:
        raise ValueError(
            f"--config {config} names no recipe: add the line 'recipe: vision' (images), or "
            f"another of {known}"
        )
    if name not in _RECIPES:
        raise ValueError(f"recipe={name}: {did_you_mean(str(name), _RECIPES)}choose one of {known}")
    return str(name)
