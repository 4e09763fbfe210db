"""What a certificate is asked for on the command line: a mechanism, a target, who simulates."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from dptrain.accounting import accountant_named, registered_accountants
from dptrain.accounting.base import check_delta, check_epsilon
from dptrain.accounting.min_sep import MinSepMonteCarlo
from dptrain.accounting.simulation import MonteCarloAccountant, Simulation, check_folder
from dptrain.accounting.simulation.weighted import WeightedAccountant
from dptrain.mechanism import FORMAT, MatrixMechanism


def requested_simulation(options: argparse.Namespace) -> Simulation:
    """The pair of the mechanism that is named.

    Raises:
        ValueError: if arguments are missing or out of range, or no accountant simulates it.
        OSError: if the file cannot be read.
    """
    for option in ("mechanism", "epsilon", "delta"):
        if getattr(options, option) is None:
            flag = option if option == "mechanism" else f"--{option}"
            raise ValueError(f"{flag}: missing; it is needed unless --merge is given")
    if options.threads is not None and options.threads < 1:
        raise ValueError(f"--threads {options.threads}: must be at least 1")
    check_folder("--out", options.out)
    mechanism = read_mechanism(options.mechanism)
    check_epsilon(options.epsilon)
    check_delta(options.delta, mechanism.scheme)
    mechanism = mechanism.participants
    accountant = _accountant(options.accountant, mechanism)
    if options.device == "cuda":
        if not isinstance(accountant, MinSepMonteCarlo):
            raise ValueError(f"--device cuda: {accountant.name!r} runs on the cpu; leave it out")
        if not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no CUDA device; use --device cpu")
        accountant = dataclasses.replace(accountant, engine="cuda")
    return accountant.checked(mechanism)


def read_mechanism(path: Path) -> MatrixMechanism:
    """Scheme and strategy from ``MatrixMechanism.to_json`` or the same as YAML; σ may be left out.

    Raises:
        ValueError: if the file holds something else.
        FileNotFoundError: if there is none.
    """
    try:
        if path.suffix.lower() in (".yaml", ".yml"):
            from dptrain.configuration import read_yaml  # needs PyYAML

            value = read_yaml(path)
        else:
            value = json.loads(path.read_text(encoding="utf-8"))
        return MatrixMechanism.from_dict({"format": FORMAT, "noise_multiplier": 1.0, **value})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path}: not a mechanism ({error}); see MatrixMechanism.to_json"
        ) from error


def _accountant(name: str | None, mechanism: MatrixMechanism) -> MonteCarloAccountant:
    known = registered_accountants()
    simulating = {each.name: each for each in known if isinstance(each, MonteCarloAccountant)}
    if name is not None:
        named = accountant_named(name)
        if isinstance(named, MonteCarloAccountant):
            return named
        why = "proves without simulation, so it needs no certificate"
        if isinstance(named, WeightedAccountant):
            why = "certifies in one process: use dptrain calibrate --certificates"
        raise ValueError(f"--accountant {name!r} {why}; those that simulate: {list(simulating)}")
    reasons = {each: member.obstacle(mechanism) for each, member in simulating.items()}
    covering = [each for each, reason in reasons.items() if reason is None]
    if not covering:
        why = "; ".join(f"{each}: {reason}" for each, reason in reasons.items())
        raise ValueError(f"no accountant that simulates covers this mechanism: {why}")
    preferred = [each for each in covering if simulating[each].reserved(mechanism) is None]
    return simulating[(preferred or covering)[0]]
