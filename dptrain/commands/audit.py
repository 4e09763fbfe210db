"""``dptrain audit``: try to refute what a mechanism is stated to guarantee."""

from __future__ import annotations

import argparse
import json
import pathlib
import secrets
from typing import Any

import numpy as np

from dptrain.accounting import account, profile
from dptrain.auditing import StatedCurve, audit_canaries, audit_mechanism, run_canaries
from dptrain.commands.account import add_accountant_arguments
from dptrain.commands.arguments import (
    add_mechanism_arguments,
    number,
    read_mechanism,
    read_privacy,
    stated_delta,
)
from dptrain.commands.outputs import check_outputs, write_json
from dptrain.core import Adjacency
from dptrain.mechanism import MatrixMechanism

REFUTED = 1
_MOST_CANARIES = 5000  # each has a coordinate of the model and a row of so many numbers
_GRID = 37  # points of ε up to 1.5 times the stated one, of which one is that

_EXAMPLE = r"""
dptrain audit --scheme Poisson batch_size=20 --strategy Identity --dataset-size 1000 \
    --steps 50 --noise-multiplier 1 --delta 1e-5 --samples 5000 --runs 5000"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "audit",
        help=run.__doc__,
        description=run.__doc__,
        example=_EXAMPLE,
        epilog="exit status: 0 if nothing contradicts the statement, 1 if something does, 2 for a "
        "mistake in the arguments",
    )
    add_mechanism_arguments(parser)
    parser.add_argument("--noise-multiplier", "--sigma", type=float, help="σ, if no file says it")
    parser.add_argument("--delta", type=float, help="δ of the statement")
    parser.add_argument(
        "--epsilon", type=float, help="audit this ε; default: the one that the accountant states"
    )
    add_accountant_arguments(parser)
    parser.add_argument(
        "--samples", type=int, default=40_000, help="tilted runs, for δ by the likelihood ratio"
    )
    parser.add_argument(
        "--runs", type=int, default=40_000, help="with and without the example, for counting"
    )
    parser.add_argument(
        "--canaries",
        action="store_true",
        help="train once by the real engine on nothing but canaries (clipping, divisor and "
        "optimizer included), in place of --samples and --runs",
    )
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.99,
        help="chance that a true statement passes (default .99)",
    )
    parser.add_argument("--seed", type=int, help="of the audit's draws; default: a fresh one")
    parser.add_argument(
        "--no-curve",
        action="store_true",
        help="count against ε and δ alone, not against the accountant's whole curve",
    )
    parser.add_argument("--plot", type=pathlib.Path, help="draw what is stated and what was found")
    parser.add_argument("--json", type=pathlib.Path, help="write what was found to this file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Try to refute the guarantee of a mechanism by its own samplers and noise, or by canaries."""
    check_outputs(options.json, plot=options.plot)
    privacy = read_privacy(options)
    sigma = options.noise_multiplier
    if sigma is None and privacy.get("noise_multiplier") is not None:
        sigma = number("privacy.noise_multiplier", privacy["noise_multiplier"])
    mechanism = read_mechanism(options, sigma)
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
        raise ValueError("ε = ∞: nothing is stated that could be refuted; give more noise")
    if not options.no_curve and options.epsilon is None:
        stated = profile(mechanism, np.linspace(0.0, 1.5 * max(epsilon, 0.1), _GRID), **who)
        curve = StatedCurve(epsilon=stated.epsilon, remove=stated.remove, add=stated.add)
    seed = secrets.randbits(64) if options.seed is None else options.seed
    stated_of = {"epsilon": epsilon, "delta": delta, "curve": curve}
    if options.canaries:
        return _by_canaries(options, mechanism, seed, stated_of)
    found = audit_mechanism(
        mechanism,
        **stated_of,
        adjacency=adjacency or mechanism.adjacency,
        samples=options.samples,
        runs=options.runs,
        confidence=options.confidence,
        seed=seed,
    )
    print(found)
    write_json(options.json, json.loads(found.to_json()))
    if options.plot is not None:
        from dptrain.reporting import plot_audit

        plot_audit(found, options.plot, stated=curve)
        print(f"plot: {options.plot}")
    return 0 if found.passed else REFUTED


def _by_canaries(
    options: argparse.Namespace,
    mechanism: MatrixMechanism,
    seed: int,
    stated: dict[str, Any],
) -> int:
    released = run_canaries(mechanism, seed=seed)
    found = audit_canaries(mechanism, released, confidence=options.confidence, **stated)
    print(found)
    write_json(options.json, {"seed": seed, **json.loads(found.to_json())})
    if options.plot is not None:
        from dptrain.reporting import plot_canaries

        plot_canaries(found, released, mechanism, options.plot, stated=stated["curve"])
        print(f"plot: {options.plot}")
    return 0 if found.passed else REFUTED


def _check_canaries(
    options: argparse.Namespace, mechanism: MatrixMechanism, adjacency: Adjacency
) -> None:
    """Refuse what canaries cannot be about, before ε is worked out.

    Raises:
        ValueError: saying what to do instead.
    """
    size = mechanism.scheme.dataset_size
    if size > _MOST_CANARIES:
        raise ValueError(
            f"--canaries with a data set of {size}: all of it would be canaries, and at most "
            f"{_MOST_CANARIES} fit; audit a scheme of the same rate with --dataset-size "
            f"{_MOST_CANARIES} or less"
        )
    if adjacency is not Adjacency.ZERO_OUT:
        raise ValueError(
            f"--canaries with adjacency={adjacency.value!r}: canaries that are out have gradients "
            "of zero, which is 'zero_out'; leave --canaries out"
        )
