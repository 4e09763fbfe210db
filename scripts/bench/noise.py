"""Time and memory of a release with noise, against what the memory and the generator allow.

The floor is the time to read (bands - 1) buffers once, as a sum over them, plus the time to draw
the normals. Streams and floor take turns within a round, each with an untimed run first; printed
are medians over the rounds, and the median over rounds of the ratio within a round. Peak memory is
that of a process of its own per stream, above what it had before the stream was opened.

    PYTHONPATH=. python scripts/bench/noise.py [--params 10000000] [--bands 16 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import math
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from dptrain.noise import FlatStream, noise_stream
from dptrain.noise.generators import Normals
from dptrain.strategies import BISR, BLT, BSR, Identity, Strategy, TreeRestart
from scripts import results

STEPS = 4096
_LEVELS_OF_TREE = 5  # 16 leaves: the min-sep of 16 bands


def strategies(bands: list[int]) -> dict[str, tuple[Strategy, dict[str, Any]]]:
    """The cases that are timed: (strategy, options) by name."""
    blt = BLT(buffers=3, theta=(0.9998, 0.98, 0.6), omega=(0.02, 0.08, 0.3))
    half: dict[str, Any] = {"dtype": torch.bfloat16}
    timed: dict[str, tuple[Strategy, dict[str, Any]]] = {"identity": (Identity(), {})}
    for count in bands:
        timed[f"ring, {count} bands"] = (BSR(bands=count), {})
        timed[f"ring, {count} bands, bfloat16"] = (BSR(bands=count), half)
    for count in bands[:1]:
        timed[f"ring, {count} bands, secure"] = (BSR(bands=count), {"secure": True})
        timed[f"convolution, {count} bands"] = (BISR(inverse_bands=count), {})
        timed[f"regenerated, {count} bands"] = (BISR(inverse_bands=count), {"regenerate": True})
    timed["BLT, 3 buffers"] = (blt, {})
    timed["BLT, 3 buffers, bfloat16"] = (blt, half)
    timed[f"tree, {_LEVELS_OF_TREE} levels"] = (TreeRestart(height=_LEVELS_OF_TREE), {})
    return timed


def open_stream(name: str, bands: list[int], like: list[torch.Tensor]) -> FlatStream:
    """A new stream; its ring is not filled yet."""
    strategy, options = strategies(bands)[name]
    return noise_stream(strategy, steps=STEPS, like=like, seed=1 << 100, **options)


def steps_to_fill(name: str, stream: FlatStream, options: argparse.Namespace) -> int:
    """Steps after which every row of the buffers has been written, or every draw is repeated."""
    if "regenerate" in strategies(options.bands)[name][1]:
        return options.bands[0]
    rows = stream.buffer_bytes / options.params  # times the bytes of a number, 2 or more
    return max(2, math.ceil(rows / 2) + 1)


def seconds(run: Callable[[], object], device: str) -> float:
    """Of one call, the device's queue included."""
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Medians over the rounds, in ms, and the ratio to the floor."""
    sums = [torch.zeros(options.params, device=options.device)]
    stream = open_stream(name, options.bands, sums)
    row = torch.empty(options.params, dtype=torch.float64, device=options.device)
    normal = torch.empty(options.params, device=options.device)
    # As many bytes as the buffers have, in float32 pieces that do not depend on their layout.
    count = max(1, stream.buffer_bytes // 4)
    buffer = torch.ones(count, device=options.device)
    sides: dict[str, Callable[[], object]] = {
        "step": lambda: stream.release(sums, 1.0),
        "read": lambda: buffer.sum() if stream.buffer_bytes else None,
        "draw": lambda: Normals(3).fill(row, group=0, step=4, bits=43),
        "torch normal_": normal.normal_,
    }
    slow = strategies(options.bands)[name][1].keys() & {"regenerate", "secure"}
    rounds = max(3, options.rounds // 3) if slow else options.rounds
    for _ in range(steps_to_fill(name, stream, options)):
        stream.release(sums, 1.0)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        for side, run in sides.items():
            took = 1e3 * seconds(run, options.device)
            if turn:
                times[side].append(took)
    floor = [r + d for r, d in zip(times["read"], times["draw"], strict=True)]
    result = {side: statistics.median(took) for side, took in times.items()}
    result["floor"] = statistics.median(floor)
    result["ratio"] = statistics.median(s / f for s, f in zip(times["step"], floor, strict=True))
    result["buffer MB"] = stream.buffer_bytes / 1e6
    return result


def peak_memory(name: str, options: argparse.Namespace) -> float:
    """MB above those of before, of a stream that has filled its ring."""
    if options.device != "cpu":
        like = [torch.zeros(options.params, device=options.device)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        stream = open_stream(name, options.bands, like)
        for _ in range(steps_to_fill(name, stream, options)):
            stream.release(like, 1.0)
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    arguments = [f"--params={options.params}", "--bands", *map(str, options.bands)]
    command = [sys.executable, __file__, *arguments, "--peak", name]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(printed.split()[-1])


def print_peak(name: str, options: argparse.Namespace) -> None:
    """The same, in this process."""
    like = [torch.zeros(options.params)]
    for _ in range(2):  # threads and libraries are loaded before the count begins
        small = [torch.zeros(1 << 20)]
        noise_stream(Identity(), steps=1, like=small, seed=0).release(small, 1.0)
    before = _status("VmRSS")
    stream = open_stream(name, options.bands, like)
    for _ in range(steps_to_fill(name, stream, options)):
        stream.release(like, 1.0)
    print(_status("VmHWM") - before)


def _status(field: str) -> float:
    """A field of this process's status, in MB. (``getrusage`` would count the parent's peak.)"""
    path = pathlib.Path("/proc/self/status")
    if not path.exists():
        return float("nan")
    line = next(line for line in path.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024 / 1e6


def main() -> None:
    """Print a line a stream; write all figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=10_000_000)
    parser.add_argument("--bands", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", help="names of streams, all unless given")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the figures to")
    parser.add_argument("--peak", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print_peak(options.peak, options)
        return
    facts = results.machine("torch", device=options.device, load=True)
    facts["threads"] = torch.get_num_threads()
    print(f"{results.words(facts)}; {options.params:,} parameters, float32")
    rows = []
    # On the CPU all normals are those of the cipher.
    known = [n for n in strategies(options.bands) if options.device != "cpu" or "secure" not in n]
    for name in tqdm(options.only or known, unit="stream"):
        figures = measure(name, options)
        rows.append({"stream": name, **figures, "peak MB": peak_memory(name, options)})
    digits = 0 if options.device == "cpu" else 1
    columns = (
        ("stream", "{stream}"),
        ("step", f"{{step:,.{digits}f}} ms"),
        ("read + draw", f"{{floor:,.{digits}f}} ms"),
        ("ratio", "{ratio:.2f}"),
        ("peak memory", "{peak MB:,.0f} MB"),
    )
    name = "noise" if options.device == "cpu" else "noise_gpu"
    results.publish(
        options.json,
        {name: results.Table(columns, rows)},
        script=__file__,
        machine=facts,
        params=options.params,
    )


if __name__ == "__main__":
    main()
