"""Make a certificate on several processes, on one machine or on several with a common network::

    torchrun --nproc-per-node 8 -m dptrain.commands.certify mechanism.json --epsilon 8 \\
        --delta 1e-6 --out certificates

``calibrate(…, cache="certificates")`` of the same accountant then finds the certificate, and so
does training. Interrupted, what was drawn is left in ``--out``; the same command continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist

from dptrain.accounting import find_accountants
from dptrain.accounting.simulation import (
    Processes,
    SimulatedAccountant,
    check_folder,
    default_threads,
)
from dptrain.commands.outputs import check_outputs, write_json
from dptrain.commands.parser import CommandParser
from dptrain.core import in_words
from dptrain.mechanism import FORMAT, MatrixMechanism

T = TypeVar("T")
_PATIENCE = datetime.timedelta(days=30)  # the others wait while one is slow


class Group(Processes):
    """All processes that torchrun started, or this one alone; ``here`` of them on this machine."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.here = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.size)))

    def __enter__(self) -> Self:
        if self.size > 1:
            dist.init_process_group("gloo", timeout=_PATIENCE)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def from_first(self, work: Callable[[], T]) -> T:
        """The result of ``work`` on the first process, on all of them.

        If it fails there, all of them raise a ``ValueError``.
        """
        if self.size == 1:
            return work()
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box = [(work(), None)]
            except (ValueError, OSError, ArithmeticError, ModuleNotFoundError) as error:
                box = [(None, in_words(error))]
        dist.broadcast_object_list(box, src=0)
        result, failed = box[0]
        if failed is not None:
            raise ValueError(failed)
        found: T = result
        return found

    def all(self, value: T) -> list[T]:
        """The values of all processes, on each of them."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (2 for a mistake, 130 when interrupted)."""
    options = _parser().parse_args(argv)
    # torchrun and schedulers end processes by SIGTERM: keep what there is then, too.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        check_outputs(options.json)
        check_folder("--out", options.out)
        if options.threads is not None and options.threads < 1:
            raise ValueError(f"--threads {options.threads}: must be at least 1")
        with Group() as group:
            _certify(options, group)
    except (ValueError, ModuleNotFoundError, OSError, ArithmeticError) as error:
        print(f"certify: {in_words(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print(f"certify: interrupted; {stopped}", file=sys.stderr)
        return 130
    return 0


def _certify(options: argparse.Namespace, group: Group) -> None:
    """Make the certificate with all processes there are; the first one reports."""
    mechanism = read_mechanism(options.mechanism)
    (member, *others) = find_accountants(mechanism, options.accountant)
    if others or not isinstance(member, SimulatedAccountant):
        raise ValueError(
            f"--accountant {member.name!r} does not simulate, so it needs no certificate"
        )
    changes: dict[str, Any] = {
        "seed": options.seed,
        "cache": options.out,
        "threads": options.threads or max(1, default_threads() // group.here),
        "progress": group.rank == 0 and not options.no_progress,
        "together": group,
    }
    if options.max_samples is not None:
        changes["max_samples"] = options.max_samples
    if options.device == "cuda":
        if not hasattr(member, "engine"):
            raise ValueError(f"--device cuda: {member.name!r} runs on the cpu; leave it out")
        changes["engine"] = "cuda"
    member = dataclasses.replace(member, **changes)
    found = member.calibrate(mechanism, epsilon=options.epsilon, delta=options.delta)
    if group.rank == 0:
        write_json(options.json, found.certificate)
        print(
            f"certificate in {options.out}\nσ = {found.noise_multiplier:.6g} for "
            f"ε = {options.epsilon:g}, δ = {options.delta:g}"
        )


def read_mechanism(path: Path) -> MatrixMechanism:
    """The mechanism of a file: ``MatrixMechanism.to_json``, or that as YAML; σ may be left out."""
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


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="dptrain.commands.certify",
        description=__doc__,
        example="python -m dptrain.commands.certify mechanism.json --epsilon 8 --delta 1e-6 "
        "--out kept",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mechanism", type=Path, help="JSON or YAML: scheme, strategy")
    parser.add_argument("--epsilon", type=float, required=True, help="target ε > 0")
    parser.add_argument("--delta", type=float, required=True, help="target δ in (0, 1)")
    parser.add_argument("--seed", type=int, help="of all random streams (default: fresh)")
    parser.add_argument("--out", type=Path, required=True, help="directory of certificates")
    parser.add_argument("--accountant", help="its name (default: the one that answers)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to draw")
    parser.add_argument("--threads", type=int, help="a process (default: the cores, shared)")
    parser.add_argument("--max-samples", type=int, help="a direction (default: the accountant's)")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.add_argument("--json", type=Path, help="write the certificate to this file too")
    return parser


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
