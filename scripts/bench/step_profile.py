"""The time of a private step by part: forward, backward, clipped sums, noise, update, ledger.

The parts are timed within whole steps, which take turns with ordinary ones in one process; medians
over rounds, and each part as a share of the ordinary step. On a machine that others use,
``--least`` takes the least of the rounds instead, part by part, and ``--processor`` the seconds
that this process had a core (with ``--threads 1``, for threads that wait count as well). What no
part covers is under "rest". With ``--trace`` also torch's own profile of both, by operator.

    PYTHONPATH=. python scripts/bench/step_profile.py [--models vgg bert mlp]
        [--sides bookkeeping hooks] [--rounds 15] [--threads 2] [--least] [--processor]
        [--trace 15]
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from scripts.bench.step_models import CASES, ON_CPU, call
from scripts.bench.step_sides import ORDINARY, SIDES, Side, open_side, quiet, reason

TOTAL = "step"
NESTED = {"noise: release", "norms"}  # lie within other parts


class Clock:
    """Adds up the seconds of named parts, and keeps a row of them a step."""

    def __init__(self, device: str, *, processor: bool = False) -> None:
        self.cuda = device.startswith("cuda")
        self.read = time.process_time if processor else time.perf_counter
        self.parts: dict[str, float] = collections.defaultdict(float)
        self.rows: list[dict[str, float]] = []

    def now(self) -> float:
        """Seconds, once the device has done what it was asked to."""
        if self.cuda:
            torch.cuda.synchronize()
        return self.read()

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added to a part."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.parts[part] += self.now() - start

        return timed

    def end_step(self, total: float, *, keep: bool) -> None:
        """Close a step's row."""
        if keep:
            covered = sum(v for name, v in self.parts.items() if name not in NESTED)
            self.rows.append({**self.parts, "rest": total - covered, TOTAL: total})
        self.parts.clear()

    def summary(self, choose: Callable[[list[float]], float]) -> dict[str, float]:
        """Seconds of each part, of the rest and of the whole step."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        return {name: choose([row.get(name, 0.0) for row in self.rows]) for name in names}


def instrument(side: Side, clock: Clock) -> None:
    """Put the clock around the parts of a dptrain optimizer's step."""
    optimizer = side.optimizer
    optimizer.noise.release = clock.wrap("noise: release", optimizer.noise.release)
    if hasattr(optimizer.clipper, "record"):
        optimizer.clipper.record = clock.wrap("norms", optimizer.clipper.record)
    optimizer.clipper.clipped_sum = clock.wrap("clipped sums", optimizer.clipper.clipped_sum)
    optimizer.add_noise = clock.wrap("noise", optimizer.add_noise)
    optimizer.scale_grad = clock.wrap("scale", optimizer.scale_grad)
    optimizer.original_optimizer.step = clock.wrap("update", optimizer.original_optimizer.step)
    optimizer.ledger.record = clock.wrap("ledger: record", optimizer.ledger.record)


def run_step(side: Side, clock: Clock, *, keep: bool) -> None:
    """One step, by its parts."""
    side.prepare()
    start = clock.now()
    clock.wrap("zero_grad", side.optimizer.zero_grad)()
    logits = clock.wrap("forward", call)(side.module, side.inputs)
    loss = clock.wrap("loss", side.loss)(logits, side.labels)
    del logits
    clock.wrap("backward", loss.backward)()
    del loss
    step = (
        side.optimizer.step
        if side.batches is not None
        else clock.wrap("update", side.optimizer.step)
    )
    step()
    clock.end_step(clock.now() - start, keep=keep)


def profile(
    model: str,
    names: list[str],
    rounds: int,
    device: str,
    choose: Callable[[list[float]], float] = statistics.median,
    *,
    processor: bool = False,
) -> dict[str, dict[str, float]]:
    """Seconds by part, for every side that runs and the ordinary one."""
    sides, clocks = {}, {}
    for name in [ORDINARY, *names]:
        try:
            sides[name] = open_side(name, model, device)
        except Exception as error:  # a side that the library refuses is left out, with its reason
            print(f"{model}, {name}: {reason(error)}", file=sys.stderr)
            continue
        clocks[name] = Clock(device, processor=processor)
        if name != ORDINARY:
            instrument(sides[name], clocks[name])
    inside = importlib.import_module("dptrain.engine.optimizer")  # to time a part of a step
    checksum = inside.checksum
    for turn in range(rounds + 2):
        for name in sides if turn % 2 else reversed(sides):
            clock = clocks[name]
            inside.checksum = clock.wrap("checksum", checksum)
            run_step(sides[name], clock, keep=False)  # brings back its memory that others used
            run_step(sides[name], clock, keep=turn >= 2)
    inside.checksum = checksum
    return {name: clock.summary(choose) for name, clock in clocks.items()}


def show(model: str, found: dict[str, dict[str, float]]) -> None:
    """A table: parts down, sides across, ms and per cent of the ordinary step."""
    whole = found[ORDINARY][TOTAL]
    parts = dict.fromkeys(part for row in found.values() for part in row)
    parts = [*(p for p in parts if p not in (TOTAL, "rest")), "rest", TOTAL]
    print(f"\n{CASES[model].title}, batch {CASES[model].batch}")
    print(f"{'':18}" + "".join(f"{name:>24}" for name in found))
    for part in parts:
        cells = "".join(
            f"{1e3 * row[part]:14.2f} ms {100 * row[part] / whole:5.1f} %"
            if part in row
            else f"{'':24}"
            for row in found.values()
        )
        print(f"{part:18}{cells}")
    sys.stdout.flush()


def trace(model: str, names: list[str], rows: int, device: str) -> None:
    """torch's profile of three steps of each side, by operator."""
    for name in [ORDINARY, *names]:
        side = open_side(name, model, device)
        clock = Clock(device)
        run_step(side, clock, keep=False)
        with torch.profiler.profile() as found:
            for _ in range(3):
                run_step(side, clock, keep=False)
        key = "self_device_time_total" if clock.cuda else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=key, row_limit=rows, max_name_column_width=48)
        print(f"\n{model}, {name}, three steps\n{table}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ours = [name for name, (kind, _) in SIDES.items() if kind == "dptrain"]
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(ON_CPU))
    parser.add_argument("--sides", nargs="+", choices=ours, default=["bookkeeping"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="torch's; as torch chooses if left out")
    parser.add_argument("--least", action="store_true", help="of the rounds, not the median")
    parser.add_argument("--processor", action="store_true", help="processor time")
    parser.add_argument("--trace", type=int, metavar="ROWS", help="also operators, so many")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    quiet()
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads")
    for model in options.models:
        choose = min if options.least else statistics.median
        found = profile(
            model,
            options.sides,
            options.rounds,
            options.device,
            choose,
            processor=options.processor,
        )
        show(model, found)
        if options.trace:
            trace(
                model, [name for name in found if name != ORDINARY], options.trace, options.device
            )


if __name__ == "__main__":
    main()
