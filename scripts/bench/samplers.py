"""Time and memory of drawing batches, against the size of the dataset.

All streams of a size take turns within a round, after they have reached their stationary state;
printed are the median and the largest time of a batch over the rounds. Opening is construction and
the first batch (an order may be drawn there). Memory is that of a process of its own per stream, as
traced by tracemalloc, in bytes an example: the peak of opening it, and what it then holds.

Rows are functions of N that return a scheme; add one to ``ROWS`` to have it measured. With
jax_privacy installed its b-min-sep takes its turn in the same rounds.

    PYTHONPATH=. python scripts/bench/samplers.py [--examples 100000 1000000 10000000] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import pathlib
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
from tqdm import tqdm

from dptrain.sampling import (
    BallsInBins,
    CyclicPoisson,
    MinSep,
    Poisson,
    RandomAllocation,
    Scheme,
    Shuffled,
)
from scripts import results

COLUMNS = (
    ("scheme", "{scheme}"),
    ("construction", "{open_s:time}"),
    ("peak, an example", "{peak_bytes:.1f} B"),
    ("a batch", "{batch_ms:.2f} ms"),
)
BATCH = 1024
WARM_UP = 600  # more than two separations: the order of a pool is then that of long use
STEPS = 1 << 20
OPEN_SECONDS, BYTES = 10.0, 16.0  # targets for all rows


def separation(n: int) -> int:
    """256, or less where so large a batch leaves no room for it: p is at most about 1/2."""
    return min(256, n // (2 * BATCH))


def poisson(n: int) -> Scheme:
    """Independent coins."""
    return Poisson.for_batch_size(batch_size=BATCH, dataset_size=n, steps=STEPS)


def truncated_poisson(n: int) -> Scheme:
    """Cut at the expected size, so that half of the batches are."""
    return Poisson.for_batch_size(
        batch_size=BATCH, dataset_size=n, steps=STEPS, max_batch_size=BATCH
    )


def cyclic_poisson(n: int) -> Scheme:
    """As many parts as the separation."""
    return CyclicPoisson.for_batch_size(
        batch_size=BATCH, dataset_size=n, cycle=separation(n), steps=STEPS
    )


def balls_in_bins(n: int) -> Scheme:
    """One bin an example."""
    return BallsInBins.for_batch_size(
        batch_size=BATCH, dataset_size=n, epochs=-(-STEPS * BATCH // n)
    )


def random_allocation(n: int, participations: int = 1) -> Scheme:
    """One step of every epoch."""
    return RandomAllocation.for_batch_size(
        batch_size=BATCH,
        dataset_size=n,
        epochs=-(-STEPS * BATCH // n),
        participations=participations,
    )


def random_allocation_8(n: int) -> Scheme:
    """Eight steps of every epoch: up to eight groups of examples to draw from."""
    return random_allocation(n, participations=8)


def min_sep(n: int) -> Scheme:
    """Warm start."""
    return MinSep.for_batch_size(
        batch_size=BATCH, dataset_size=n, min_sep=separation(n), steps=STEPS
    )


def truncated_min_sep(n: int) -> Scheme:
    """Cut at the expected size, so that half of the batches are."""
    return MinSep.for_batch_size(
        batch_size=BATCH,
        dataset_size=n,
        min_sep=separation(n),
        steps=STEPS,
        max_batch_size=BATCH,
    )


def shuffled(n: int) -> Scheme:
    """A new order every epoch; the time of drawing it is in the opening."""
    return Shuffled(batch_size=BATCH, dataset_size=n, epochs=-(-STEPS * BATCH // n))


@dataclasses.dataclass(frozen=True)
class Row:
    """The cases, and the milliseconds that a batch may take (``None``: no target)."""

    make: Callable[[int], Scheme]
    target: float | None = None


ROWS = {
    "Poisson": Row(poisson, 2.0),
    "Poisson, max_batch_size": Row(truncated_poisson, 5.0),
    "CyclicPoisson": Row(cyclic_poisson),
    "BallsInBins": Row(balls_in_bins),
    "RandomAllocation": Row(random_allocation),
    "RandomAllocation, 8 picks": Row(random_allocation_8),
    "MinSep": Row(min_sep, 5.0),
    "MinSep, max_batch_size": Row(truncated_min_sep, 5.0),
    "Shuffled": Row(shuffled),
}
PEER = "jax_privacy b-min-sep"


def peer(n: int) -> Iterator[np.ndarray]:
    """The batches of jax_privacy's b-min-sep of the same law as ``min_sep``."""
    from jax_privacy.batch_selection import BMinSepSampling

    scheme = min_sep(n)
    assert isinstance(scheme, MinSep)
    sampling = BMinSepSampling(
        sampling_prob=scheme.probability, iterations=STEPS, min_sep=scheme.min_sep
    )
    return sampling.batch_iterator(n, rng=0)


def opened(name: str, n: int) -> Iterator[np.ndarray]:
    """A stream that has given its first batch."""
    stream = peer(n) if name == PEER else ROWS[name].make(n).stream(0)
    next(stream)
    return stream


def print_memory(name: str, n: int) -> None:
    """Peak of opening and bytes held after a few batches, an example, in this process."""
    opened(name, 4 * separation(10**5) * BATCH)  # what is loaded on first use is not the stream's
    gc.collect()
    tracemalloc.start()
    stream = opened(name, n)
    _, peak = tracemalloc.get_traced_memory()
    for _ in range(20):
        next(stream)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    print(peak / n, held / n)


def memory(name: str, n: int) -> dict[str, float]:
    """The same in a process of its own, which the others cannot disturb."""
    command = [sys.executable, __file__, "--memory", name, str(n)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak, held = map(float, printed.split()[-2:])
    return {"peak_bytes": peak, "held_bytes": held}


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """Of one call, and what it returned."""
    start = time.perf_counter()
    value = run()
    return time.perf_counter() - start, value


def measure(n: int, names: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Figures of every row at one size."""
    figures: dict[str, dict[str, float]] = {name: {} for name in names}
    streams = {}
    for name in names:
        figures[name]["open_s"], streams[name] = seconds(lambda name=name: opened(name, n))
    for name in tqdm(names, desc=f"N = {n:,}: warming up", delay=2):
        # The peer starts stationary and draws anew from all examples: a few batches suffice.
        for _ in range(5 if name == PEER else WARM_UP):
            next(streams[name])
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in tqdm(range(rounds), desc=f"N = {n:,}: rounds", delay=2):
        for name, stream in streams.items():
            took, _ = seconds(lambda stream=stream: next(stream))
            times[name].append(1e3 * took)
    streams.clear()
    for name in tqdm(names, desc=f"N = {n:,}: memory", delay=2):
        figures[name]["batch_ms"] = statistics.median(times[name])
        figures[name]["largest_ms"] = max(times[name])
        figures[name] |= memory(name, n)
    return figures


def missed(name: str, figures: dict[str, float]) -> list[str]:
    """The targets that a row misses."""
    limits = {"open_s": OPEN_SECONDS, "peak_bytes": BYTES}
    if name in ROWS and ROWS[name].target is not None:
        limits["batch_ms"] = ROWS[name].target
    return [key for key, limit in limits.items() if name != PEER and figures[key] > limit]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--only", nargs="+", choices=[*ROWS, PEER], help="all unless given")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the figures to")
    parser.add_argument("--memory", nargs=2, metavar=("NAME", "N"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print_memory(options.memory[0], int(options.memory[1]))
        return
    facts = results.machine("numpy", load=True)
    names = options.only or [*ROWS, PEER]
    if PEER in names and importlib.util.find_spec("jax_privacy") is None:
        names = [name for name in names if name != PEER]
        print("jax_privacy is not installed (extra `peer`): its b-min-sep is left out")
    elif PEER in names:
        facts["jax_privacy"] = version("jax_privacy")
    print(
        f"targets: open ≤ {OPEN_SECONDS:g} s, peak ≤ {BYTES:g} bytes an example; "
        f"medians over {options.rounds} rounds"
    )
    rows: list[dict[str, Any]] = []
    for n in options.examples:
        found = [
            {"scheme": name, "examples": n, **each, "misses": missed(name, each)}
            for name, each in measure(n, names, options.rounds).items()
        ]
        print(f"\nN = {n:,}, batches of {BATCH:,}, separation {separation(n)}")
        print(results.Table((*COLUMNS, ("misses", "{misses}")), found).markdown())
        rows += found
    largest = [row for row in rows if row["examples"] == max(options.examples)]
    results.publish(
        options.json,
        {"samplers": results.Table(COLUMNS, largest)},
        script=__file__,
        machine=facts,
        quiet=True,
        batch=BATCH,
        rounds=options.rounds,
        smaller=[row for row in rows if row not in largest],
    )


if __name__ == "__main__":
    main()
