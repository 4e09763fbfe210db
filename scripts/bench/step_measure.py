"""Times the sides of one model in one process, and prints the result as JSON.

``step_time.py`` starts this with the allocator's settings in the environment, which the C library
reads before anything else runs. A round takes the sides in random order; each first makes a step
that is not timed, which brings back the memory and the caches that the side before has used. Rounds
during which others used more of the machine than ``--max-load`` cores are made again, up to three
times as many as asked for; then those with the least load count.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm import tqdm

from scripts.bench.step_load import OtherLoad
from scripts.bench.step_models import CASES
from scripts.bench.step_sides import ORDINARY, SIDES, Side, open_side, quiet, reason

WARM_UP = 2
PATIENCE = 3

Round = tuple[float, dict[str, float]]  # others' load, and seconds by side


def once(side: Side, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one step."""
    side.prepare()
    _wait(side.device)
    start = clock()
    side.step()
    _wait(side.device)
    return clock() - start


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def round_of(
    sides: dict[str, Side], order: Sequence[str], clock: Callable[[], float] = time.perf_counter
) -> Round:
    """One round: the load of the machine, and every side's seconds."""
    load = OtherLoad()
    seconds = {}
    for name in order:
        once(sides[name])
        seconds[name] = once(sides[name], clock)
        # What a side still holds (2.7 GB of per-example gradients) would add up over the sides.
        sides[name].optimizer.zero_grad()
    return load.read(), seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return dict.fromkeys(("q1", "median", "q3"), values[0])
    q1, median, q3 = statistics.quantiles(values, method="inclusive")
    return {"q1": q1, "median": median, "q3": q3}


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Median seconds, and the spread over rounds of the ratio to the ordinary step of the round."""
    names = list(rounds[0][1])
    ratios = {
        name: spread([seconds[name] / seconds[ORDINARY] for _, seconds in rounds])
        for name in names
        if ORDINARY in names
    }
    return {
        "rounds": len(rounds),
        "other_load": statistics.fmean(load for load, _ in rounds),
        "seconds": {name: statistics.median(s[name] for _, s in rounds) for name in names},
        "ratio": ratios,
    }


def measure(
    model: str,
    names: Sequence[str],
    *,
    rounds: int,
    device: str,
    max_load: float,
    processor: bool = False,
) -> dict[str, Any]:
    """One row of the table, and why sides are missing."""
    sides, failures = {}, {}
    for name in names:
        try:
            sides[name] = open_side(name, model, device)
        except Exception as error:  # what a library refuses belongs in the table, with its reason
            failures[name] = reason(error)
    done: list[Round] = []
    clock = time.process_time if processor else time.perf_counter
    if sides:
        generator = random.Random(0)
        order = list(sides)
        bar = tqdm(total=rounds, desc=model, unit="round", leave=False, file=sys.stderr)
        for number in range(PATIENCE * rounds + WARM_UP):
            generator.shuffle(order)
            found = round_of(sides, order, clock)
            if number < WARM_UP:
                continue
            done.append(found)
            still = sum(load <= max_load for load, _ in done)
            bar.update(still - bar.n)
            if still >= rounds:
                break
        bar.close()
        done = sorted(done, key=lambda found: found[0])[:rounds]
    return {
        "model": model,
        "batch": CASES[model].batch,
        "clock": "processor" if processor else "wall",
        "threads": torch.get_num_threads(),
        "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "failures": failures,
        **(summary(done) if done else {}),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=list(CASES), required=True)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-load", type=float, default=0.2)
    parser.add_argument("--processor", action="store_true")
    options = parser.parse_args(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    quiet()
    row = measure(
        options.model,
        options.sides,
        rounds=options.rounds,
        device=options.device,
        max_load=options.max_load,
        processor=options.processor,
    )
    print(json.dumps(row))


if __name__ == "__main__":
    main()
