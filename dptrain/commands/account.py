"""``dptrain account``: what a mechanism guarantees."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

from dptrain.accounting import (
    account,
    accountants_for,
    find_accountants,
    profile,
    trade_off,
)
from dptrain.commands.arguments import (
    add_adjacency,
    add_mechanism_arguments,
    read_mechanism,
    read_privacy,
    stated_delta,
)
from dptrain.commands.outputs import check_outputs, draw, write_json
from dptrain.commands.parser import declare
from dptrain.core import Adjacency, aligned
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import as_markdown, as_shown, plot_attacks, plot_privacy, rows_of

_EXAMPLE = r"""
dptrain account --scheme Poisson batch_size=500 --strategy Identity --dataset-size 50000 \
    --epochs 10 --noise-multiplier 1 --delta 1e-6
dptrain account --support"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = declare(commands, "account", run, example=_EXAMPLE)
    add_mechanism_arguments(parser)
    parser.add_argument("--noise-multiplier", "--sigma", type=float, help="σ, if no file says it")
    parser.add_argument("--delta", type=float, help="δ: find the least ε")
    parser.add_argument("--epsilon", type=float, help="ε: find the least δ")
    add_accountant_arguments(parser)
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the accountants that cover the mechanism, and why others do not",
    )
    parser.add_argument("--support", action="store_true", help="print the table of all pairs")
    parser.add_argument("--profile", action="store_true", help="δ over a grid of ε as well")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the profile to a PNG")
    parser.add_argument(
        "--attacks", action="store_true", help="also show the reach of membership tests, and μ-GDP"
    )
    parser.add_argument("--attacks-plot", type=pathlib.Path, help="draw the attacks to a PNG")
    parser.add_argument(
        "--json", type=pathlib.Path, help="write guarantee, profile and attacks to this file"
    )


def add_accountant_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--accountant`` and ``--adjacency``."""
    parser.add_argument(
        "--accountant", help="name of the accountant (see account --list); default: the tightest"
    )
    add_adjacency(
        parser, "the neighboring relation (default: zero_out, or add_remove with a nominal_size)"
    )


def run(options: argparse.Namespace) -> None:
    """State the guarantee of a mechanism, its profile, or who can account for it."""
    if options.support:
        print(as_markdown())
        return
    adjacency = None if options.adjacency is None else Adjacency(options.adjacency)
    asked = options.delta is not None or options.epsilon is not None
    if options.list:
        # σ decides nothing about who answers.
        stated = 1.0 if options.mechanism is None else None
        print(listing(read_mechanism(options, options.noise_multiplier or stated), adjacency))
        if not asked:
            return
        print()
    from_file = not asked and options.config is not None
    if not from_file and (options.delta is None) == (options.epsilon is None):
        raise ValueError(
            f"give exactly one of --delta and --epsilon (got delta={options.delta}, "
            f"epsilon={options.epsilon})"
        )
    if options.plot is not None and not options.profile:
        raise ValueError(f"--plot {options.plot} draws the profile: add --profile")
    if options.attacks_plot is not None and not options.attacks:
        raise ValueError(f"--attacks-plot {options.attacks_plot} draws attacks: add --attacks")
    check_outputs(options.json, plot=options.plot)
    check_outputs(None, plot=options.attacks_plot)
    privacy = read_privacy(options)
    mechanism = read_mechanism(options, options.noise_multiplier)
    delta = stated_delta(options, mechanism.scheme) if from_file else options.delta
    name = options.accountant or privacy.get("accountant")
    who: dict[str, Any] = {"accountant": name, "adjacency": adjacency}
    shown = account(mechanism, delta=delta, epsilon=options.epsilon, **who)
    print(shown)
    value: dict[str, Any] = {"guarantee": json.loads(shown.to_json())}
    if options.profile:
        curve = as_shown(profile(mechanism, **who), shown)
        value["profile"] = {
            "accountant": curve.accountant,
            "kind": curve.kind.value,
            "failure_probability": curve.failure_probability,
            "epsilon": curve.epsilon.tolist(),
            "remove": curve.remove.tolist(),
            "add": curve.add.tolist(),
        }
        print(f"\nδ(ε) by {curve.accountant} ({curve.kind.value}):")
        lines = ["| ε | remove | add |", "|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in rows_of(curve, 11)]
        print(aligned("\n".join(lines), left=0))
        draw(options.plot, plot_privacy, curve, shown)
    if options.attacks:
        limits = trade_off(mechanism, shown, accountant=name)
        value["attacks"] = {**limits.summary(), "trade_off": json.loads(limits.to_json())}
        print(f"\n{limits}")
        draw(options.attacks_plot, plot_attacks, limits)
    write_json(options.json, value)


def listing(mechanism: MatrixMechanism, adjacency: Adjacency | None) -> str:
    """Every accountant for the adjacency: kind, cost, and whether it answers."""
    table = accountants_for(mechanism, adjacency=adjacency)
    chosen: set[str] = set()
    if any(each.reason is None for each in table):
        chosen = {member.name for member in find_accountants(mechanism, adjacency=adjacency)}
    lines = ["| accountant | shown as | cost | answers |", "|---|---|---|---|"]
    for each in table:
        kind = "" if each.kind is None else each.kind.value
        cost = "" if each.cost is None else each.cost.value
        if each.name in chosen:
            how = "yes"
        elif each.refusal:
            how = f"no: {each.refusal}"
        else:
            how = f"by name: {each.reserved or 'another answers first'}"
        lines.append(f"| {each.name} | {kind} | {cost} | {how} |")
    return aligned("\n".join(lines), left=4)
