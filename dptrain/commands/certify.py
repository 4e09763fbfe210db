"""Make a certificate on many processes or machines.

One machine, or several with a common network (counts are merged over gloo)::

    python -m dptrain.commands.certify mechanism.json --epsilon 8 --delta 1e-6 --out certificates
    torchrun --nproc-per-node 8 -m dptrain.commands.certify mechanism.json …

Without a common network, each process verifies a share, and the files it writes are merged::

    python -m dptrain.commands.certify mechanism.json … --seed 7 --shard 1/3 --out part1
    python -m dptrain.commands.certify --merge part*/partial-*.json --out certificates

``calibrate(…, cache="certificates")`` of the same accountant then finds the certificate, and so
does training. Interrupted, every process leaves what it has drawn in ``--out``; the same command
continues.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dptrain.accounting.simulation import (
    PartialCertificate,
    Simulation,
    certificate_cache,
    certificate_of,
    declare,
    default_threads,
    fresh_seed,
    load_certificate,
    merge,
    merge_partial_files,
    request_of,
    verify_chunks,
)
from dptrain.commands.certify_ranks import Group
from dptrain.commands.certify_request import requested_simulation
from dptrain.commands.outputs import check_outputs, write_json
from dptrain.commands.parser import CommandParser
from dptrain.core import in_words


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (2 for a mistake, 130 when interrupted)."""
    options = _parser().parse_args(argv)
    # torchrun and schedulers end processes by SIGTERM: keep what there is then, too.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if options.json is not None and options.shard is not None:
            raise ValueError(
                "--json with --shard: a share is no certificate yet; give it to --merge"
            )
        check_outputs(options.json)
        if options.merge:
            report: str | None = _merge(options)
        elif options.shard is not None:
            report = _shard(options)
        else:
            report = _certify(options)
    except (ValueError, ModuleNotFoundError, OSError, ArithmeticError) as error:
        print(f"certify: {in_words(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = f"what was verified is kept in {options.out}; the same command continues"
        if not any(options.out.glob("partial-*.json")):
            kept = "nothing was verified yet, so the same command begins again"
        print(f"certify: interrupted; {kept}", file=sys.stderr)
        return 130
    if report is not None:
        print(report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="dptrain.commands.certify",
        description=__doc__,
        example="python -m dptrain.commands.certify mechanism.json --epsilon 8 --delta 1e-6 "
        "--out kept",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mechanism", type=Path, nargs="?", help="JSON or YAML: scheme, strategy")
    parser.add_argument("--epsilon", type=float, help="target ε > 0")
    parser.add_argument("--delta", type=float, help="target δ in (0, 1)")
    parser.add_argument("--seed", type=int, help="of all streams (default: fresh)")
    parser.add_argument("--out", type=Path, required=True, help="directory of certificates")
    parser.add_argument("--accountant", help="its name (default: the first that simulates)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to draw")
    parser.add_argument("--threads", type=int, help="a process (default: the cores, shared)")
    parser.add_argument("--shard", help="i/k: verify only this share, for --merge later")
    parser.add_argument(
        "--merge", type=Path, nargs="+", help="partial certificates to put together"
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.add_argument("--json", type=Path, help="write the finished certificate to this file too")
    return parser


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _merge(options: argparse.Namespace) -> str:
    """Put the files of several shares together."""
    merged = merge_partial_files(options.merge)
    certificate = certificate_of(merged)
    certificate_cache.store(options.out, merged.declaration.request, certificate)
    return _report(options, certificate)


def _report(options: argparse.Namespace, certificate: dict[str, Any]) -> str:
    request = certificate["request"]
    write_json(options.json, certificate)
    return (
        f"certificate: {certificate_cache.path_of(options.out, request)}\n"
        f"σ = {certificate['noise_multiplier']:.6g} for ε = {request['epsilon']:g}, "
        f"δ = {request['delta']:g}"
    )


class _Start(NamedTuple):
    """What the first process finds before the work begins: all that others need to share it."""

    simulation: Simulation
    request: dict[str, Any]
    seed: int
    begun: PartialCertificate | None
    certificate: dict[str, Any] | None


def _certify(options: argparse.Namespace) -> str | None:
    """Make the certificate with all processes there are; the first one reports."""
    with Group.of_environment() as group:
        # Whatever goes wrong on the first process has to end the others as well.
        start = group.from_first(lambda: _start(options))
        certificate = start.certificate or _share_work(options, group, start)
        return _report(options, certificate) if group.rank == 0 else None


def _start(options: argparse.Namespace) -> _Start:
    """Find the certificate, or what is done of it already."""
    simulation = requested_simulation(options)
    request = request_of(simulation, options.epsilon, options.delta)
    found = load_certificate(options.out, simulation, request)
    main = certificate_cache.partial_path(options.out, request)
    begun, files = None, sorted(options.out.glob(f"{main.stem}*.json"))
    if files and found is None:
        begun = merge_partial_files(files)
        begun.declaration.check(simulation, request, where=f"{files[0]}: ")
        begun.store(main)
        for path in files:
            if path != main:
                path.unlink()
    return _Start(simulation, request, fresh_seed(options.seed), begun, found)


def _share_work(options: argparse.Namespace, group: Group, start: _Start) -> dict[str, Any]:
    """Estimate, declare, verify a part of the missing chunks each, and merge."""
    simulation, request, threads = start.simulation, start.request, _threads(options, group)
    progress = group.rank == 0 and not options.no_progress
    main = certificate_cache.partial_path(options.out, request)
    begun = start.begun
    if begun is None:
        declared = declare(
            simulation, request, start.seed, threads, progress, (group.rank, group.size), group.all
        )
        begun = group.from_first(lambda: _stored(PartialCertificate(declaration=declared), main))
    base, missing = begun, begun.missing
    first, end = (each * len(missing) // group.size for each in (group.rank, group.rank + 1))
    name, alone = f"{group.rank + 1}/{group.size}", group.size == 1
    place = main if alone else certificate_cache.partial_path(options.out, request, name)

    def verify() -> PartialCertificate:
        mine = request_of(simulation, request["epsilon"], request["delta"])
        base.declaration.check(simulation, mine)
        return verify_chunks(
            simulation,
            base,
            missing[first:end],
            threads=threads,
            progress=progress,
            keep=lambda new: (base.with_chunks(new) if alone else new).store(place),
            share=name,
        )

    parts = group.to_first(verify)

    def finish() -> dict[str, Any]:
        certificate = certificate_of(merge([base, *parts]))
        certificate_cache.store(options.out, request, certificate)
        main.unlink(missing_ok=True)
        return certificate

    certificate = group.from_first(finish)
    place.unlink(missing_ok=True)
    return certificate


def _stored(partial: PartialCertificate, path: Path) -> PartialCertificate:
    partial.store(path)
    return partial


def _threads(options: argparse.Namespace, group: Group) -> int:
    return options.threads or max(1, default_threads() // group.size_here)


def _shard(options: argparse.Namespace) -> str:
    """Verify one share of a certificate whose seed all shares were given."""
    index, count = _share(options.shard)
    if Group.of_environment().size > 1:
        raise ValueError("--shard: torchrun shares the work itself; give one of the two")
    if options.seed is None:
        raise ValueError("--shard: all shares need the same --seed, fresh for each certificate")
    simulation = requested_simulation(options)
    request = request_of(simulation, options.epsilon, options.delta)
    name = f"{index}/{count}"
    place = certificate_cache.partial_path(options.out, request, name)
    if place.exists():
        begun = PartialCertificate.load(place)
        begun.declaration.check(simulation, request, where=f"{place}: ")
        if begun.declaration.seed != options.seed:
            raise ValueError(f"--seed {options.seed}: {place} was begun with another seed")
    else:
        begun = PartialCertificate(
            declaration=declare(
                simulation,
                request,
                fresh_seed(options.seed),
                options.threads or default_threads(),
                not options.no_progress,
            )
        )
    chunks = begun.declaration.chunks
    todo = range((index - 1) * chunks // count, index * chunks // count)
    latest = begun

    def keep(new: PartialCertificate) -> None:
        nonlocal latest
        latest = begun.with_chunks(new)
        latest.store(place)

    verify_chunks(
        simulation,
        begun,
        [chunk for chunk in todo if chunk not in begun.done],
        threads=options.threads or default_threads(),
        progress=not options.no_progress,
        keep=keep,
        share=name,
    )
    return f"share: {place}\n{latest.progress()}; put the shares together with --merge"


def _share(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ValueError(f"--shard {text}: expected i/k with 1 ≤ i ≤ k, for instance 2/8")
    return int(index), int(count)


if __name__ == "__main__":
    sys.exit(main())
