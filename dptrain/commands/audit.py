"""``dptrain audit``: try to refute what a mechanism is stated to guarantee."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import secrets
from typing import Any

import numpy as np

from dptrain.accounting import account, profile
from dptrain.auditing import (
    StatedCurve,
    audit_canaries,
    audit_mechanism,
    audit_users,
    run_canaries,
    run_user_canaries,
)
from dptrain.commands.account import add_accountant_arguments
from dptrain.commands.arguments import (
    add_mechanism_arguments,
    read_mechanism,
    read_privacy,
    stated_delta,
)
from dptrain.commands.outputs import check_outputs, draw, read_graph, write_json
from dptrain.commands.parser import declare
from dptrain.core import Adjacency
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import plot_audit, plot_canaries
from dptrain.sampling import UserScheme

REFUTED = 1
_MOST_CANARIES = 5000  # each has a coordinate of the model and a row of so many numbers
_GRID = 37  # points of ε up to 1.5 times the stated one, of which one is that

_EXAMPLE = r"""
dptrain audit --scheme Poisson batch_size=20 --strategy Identity --dataset-size 1000 \
    --steps 50 --noise-multiplier 1 --delta 1e-5 --samples 5000 --runs 5000"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = declare(
        commands,
        "audit",
        run,
        example=_EXAMPLE,
        epilog="exit status: 0 if nothing contradicts the statement, 1 if something does, 2 for a "
        "mistake in the arguments",
    )
    add_mechanism_arguments(parser)
    parser.add_argument("--noise-multiplier", "--sigma", type=float, help="σ, if no file says it")
    parser.add_argument("--delta", type=float, help="δ of the statement")
    parser.add_argument("--epsilon", type=float, help="audit this ε; default: the accountant's")
    add_accountant_arguments(parser)
    parser.add_argument(
        "--samples",
        type=int,
        default=40_000,
        help="number of weighted runs, for δ by the likelihood ratio",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=40_000,
        help="number of runs with and without the example, for counting",
    )
    parser.add_argument(
        "--canaries",
        action="store_true",
        help="instead of --samples and --runs, train once with the real engine on canaries alone "
        "(clipping, divisor and optimizer included); with --users, users are the canaries",
    )
    parser.add_argument(
        "--users",
        type=pathlib.Path,
        help="for a scheme that protects users: text file of its graph, with one line per example "
        "listing the ids of its users separated by blanks",
    )
    parser.add_argument(
        "--user",
        type=int,
        help="with --users: index of the audited user in the graph; default: the most exposed",
    )
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.99,
        help="probability that a true statement passes (default .99)",
    )
    parser.add_argument("--seed", type=int, help="seed of the audit's draws; default: a fresh one")
    parser.add_argument(
        "--no-curve",
        action="store_true",
        help="compare counts with ε and δ alone, not with the accountant's whole curve",
    )
    parser.add_argument(
        "--plot", type=pathlib.Path, help="plot the stated curve and the audit's findings"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the findings to this file")


def run(options: argparse.Namespace) -> int:
    """Try to refute the guarantee of a mechanism by its own samplers and noise, or by canaries."""
    check_outputs(options.json, plot=options.plot)
    privacy = read_privacy(options)
    mechanism = _attached(options, read_mechanism(options, options.noise_multiplier))
    delta = stated_delta(options, mechanism.scheme)
    adjacency = None if options.adjacency is None else Adjacency(options.adjacency)
    if options.canaries:
        _check_canaries(options, mechanism, adjacency or mechanism.adjacency)
    who: dict[str, Any] = {
        "accountant": options.accountant or privacy.get("accountant"),
        "adjacency": adjacency,
    }
    epsilon, curve = options.epsilon, None
    if epsilon is None:
        shown = account(mechanism, delta=delta, **who)
        print(shown, end="\n\n")
        epsilon = shown.epsilon
    if epsilon == float("inf"):
        raise ValueError("ε = ∞: there is no statement to refute; use more noise")
    if not options.no_curve and options.epsilon is None:
        stated = profile(mechanism, np.linspace(0.0, 1.5 * max(epsilon, 0.1), _GRID), **who)
        curve = StatedCurve(epsilon=stated.epsilon, remove=stated.remove, add=stated.add)
    seed = secrets.randbits(64) if options.seed is None else options.seed
    stated_of = {"epsilon": epsilon, "delta": delta, "curve": curve}
    if options.canaries:
        return _by_canaries(options, mechanism, seed, stated_of)
    drawn: dict[str, Any] = {
        "samples": options.samples,
        "runs": options.runs,
        "confidence": options.confidence,
        "seed": seed,
    }
    if options.users is not None:
        found = audit_users(mechanism, user=options.user, **stated_of, **drawn)
    else:
        found = audit_mechanism(
            mechanism, adjacency=adjacency or mechanism.adjacency, **stated_of, **drawn
        )
    print(found)
    write_json(options.json, json.loads(found.to_json()))
    draw(options.plot, plot_audit, found, stated=curve)
    return 0 if found.passed else REFUTED


def _attached(options: argparse.Namespace, mechanism: MatrixMechanism) -> MatrixMechanism:
    """The mechanism with the edges of ``--users``, which its file lacks."""
    scheme = mechanism.scheme
    protects_users = isinstance(scheme, UserScheme) and scheme.participants is scheme
    if options.users is None:
        if protects_users:
            raise ValueError(
                f"{type(scheme).__name__} protects users: give the graph of its examples as --users"
            )
        if options.user is not None:
            raise ValueError(
                f"--user {options.user} without --users: an index is defined for users only"
            )
        return mechanism
    if not protects_users:
        raise ValueError(f"--users with {type(scheme).__name__}: leave --users out")
    if options.canaries and options.user is not None:
        raise ValueError(
            f"--user {options.user} with --canaries: many users are canaries; leave one of the two "
            "out"
        )
    if options.adjacency not in (None, Adjacency.ZERO_OUT.value):
        raise ValueError(
            f"--adjacency {options.adjacency} with --users: this audit supports only 'zero_out'; "
            "leave it out"
        )
    assert isinstance(scheme, UserScheme)
    graph = read_graph(options.users)
    try:
        return dataclasses.replace(mechanism, scheme=scheme.attach(graph))
    except ValueError as error:
        raise ValueError(f"--users {options.users}: {error}") from error


def _by_canaries(
    options: argparse.Namespace,
    mechanism: MatrixMechanism,
    seed: int,
    stated: dict[str, Any],
) -> int:
    train = run_canaries if options.users is None else run_user_canaries
    released = train(mechanism, seed=seed)
    found = audit_canaries(mechanism, released, confidence=options.confidence, **stated)
    print(found)
    write_json(options.json, {"seed": seed, **json.loads(found.to_json())})
    draw(options.plot, plot_canaries, found, released, mechanism, stated=stated["curve"])
    return 0 if found.passed else REFUTED


def _check_canaries(
    options: argparse.Namespace, mechanism: MatrixMechanism, adjacency: Adjacency
) -> None:
    """Refuse settings that canaries cannot audit, before ε is worked out."""
    size = mechanism.scheme.dataset_size
    if options.users is None and size > _MOST_CANARIES:
        raise ValueError(
            f"--canaries with a data set of {size}: the whole data set would consist of canaries, "
            f"and at most {_MOST_CANARIES} fit; audit a scheme of the same sampling rate with "
            f"--dataset-size {_MOST_CANARIES} or less"
        )
    if adjacency is not Adjacency.ZERO_OUT:
        raise ValueError(
            f"--canaries with adjacency={adjacency.value!r}: canaries that are out have gradients "
            "of zero, which corresponds to 'zero_out'; leave --canaries out"
        )
