"""``dptrain calibrate``: the least noise for a target."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from typing import Any

from dptrain.accounting import Accountant, calibrate, find_accountants
from dptrain.accounting.base import check_epsilon
from dptrain.accounting.simulation import SimulatedAccountant, check_folder
from dptrain.commands.account import add_accountant_arguments
from dptrain.commands.arguments import (
    add_mechanism_arguments,
    number,
    read_pair,
    read_privacy,
    stated_delta,
)
from dptrain.commands.outputs import check_outputs, write_json
from dptrain.commands.parser import declare
from dptrain.core import Adjacency
from dptrain.mechanism import MatrixMechanism

_EXAMPLE = r"""
dptrain calibrate --scheme CyclicPoisson batch_size=500 cycle=4 --strategy BSR bands=4 \
    --dataset-size 50000 --epochs 10 --epsilon 8 --delta 1e-6 --out mechanism.json"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = declare(commands, "calibrate", run, example=_EXAMPLE)
    add_mechanism_arguments(parser)
    parser.add_argument("--epsilon", type=float, help="target ε, if no configuration gives it")
    parser.add_argument("--delta", type=float, help="target δ, if no configuration gives it")
    add_accountant_arguments(parser)
    parser.add_argument(
        "--certificates",
        type=pathlib.Path,
        help="folder in which certificates of simulations are kept",
    )
    parser.add_argument(
        "--recheck", action="store_true", help="draw the samples of an existing certificate again"
    )
    parser.add_argument("--out", type=pathlib.Path, help="write the mechanism to this JSON file")
    parser.add_argument("--json", type=pathlib.Path, help="write the guarantee to this file")


def run(options: argparse.Namespace) -> None:
    """Find the least noise multiplier with which a scheme and a strategy are (ε, δ)-private."""
    check_outputs(options.out, options.json)
    scheme, strategy = read_pair(options)
    privacy = read_privacy(options)
    epsilon = options.epsilon
    if epsilon is None:
        if privacy.get("epsilon") is None:
            raise ValueError("--epsilon is missing: set ε, or give a --config with it")
        epsilon = number("privacy.epsilon", privacy["epsilon"])
    check_epsilon(epsilon)
    delta = stated_delta(options, scheme)
    adjacency = None if options.adjacency is None else Adjacency(options.adjacency)
    name: str | None = options.accountant or privacy.get("accountant")
    who: str | Accountant | None = name
    folder = options.certificates or privacy.get("certificates")
    if folder is not None:
        pair = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
        who = keeping_certificates(pair, name, adjacency, pathlib.Path(folder))
        who = dataclasses.replace(who, recheck=options.recheck)
    elif options.recheck:
        raise ValueError("--recheck needs --certificates, which contains the certificates to check")
    found = calibrate(
        scheme=scheme,
        strategy=strategy,
        epsilon=epsilon,
        delta=delta,
        accountant=who,
        adjacency=adjacency,
    )
    print(f"noise multiplier σ = {found.mechanism.noise_multiplier:.6g}")
    print(found.guarantee)
    if options.out is not None:
        options.out.write_text(found.mechanism.to_json() + "\n", encoding="utf-8")
        print(f"mechanism: {options.out}")
    write_json(options.json, json.loads(found.guarantee.to_json()))


def keeping_certificates(
    mechanism: MatrixMechanism, name: str | None, adjacency: Adjacency | None, folder: pathlib.Path
) -> SimulatedAccountant:
    """The simulating accountant that answers, with a folder for its certificates."""
    members = find_accountants(mechanism, name, adjacency=adjacency)
    member = members[0]
    if len(members) > 1 or not isinstance(member, SimulatedAccountant):
        names = ", ".join(each.name for each in members)
        raise ValueError(
            f"--certificates {folder}: only simulations create certificates, but {names} covers "
            "this mechanism; leave it out, or name a simulating --accountant"
        )
    check_folder("--certificates", folder)
    return dataclasses.replace(member, cache=folder)
