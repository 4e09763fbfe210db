"""Time and memory of a step of noise whose history is in a file, against one in memory.

Both are streams of one process with equal seeds and take turns step by step; the threads that ask
for pages, some milliseconds a step, end before a step is timed. "Not cached": the
system is made to forget the file before the step and then has a pause to read ahead, as it has
while a model computes; "not cached, not read ahead" is the same without. Resident is what each
kind of stream adds to the memory of a process of its own, at most, over two turns of the ring.

    PYTHONPATH=. python scripts/bench/noise_offload.py FOLDER [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from dptrain.noise import FlatStream, noise_stream
from dptrain.strategies import BLT, BSR, Identity, Strategy
from scripts import results
from scripts.bench.step_memory import forget_peak, resident

STEPS = 4096
ENTRIES = 1 << 22
CASES: dict[str, Strategy] = {
    "BandMF, 17 bands": BSR(bands=17),
    "BLT, 4 buffers": BLT(
        buffers=4, theta=(0.9999, 0.998, 0.95, 0.5), omega=(0.01, 0.03, 0.1, 0.3)
    ),
}


def opened(name: str, folder: str | None) -> FlatStream:
    """A stream whose ring is full."""
    stream = noise_stream(
        CASES[name], steps=STEPS, like=[torch.empty(1).expand(ENTRIES)], seed=1, folder=folder
    )
    assert isinstance(stream, FlatStream)
    sums = [torch.zeros(ENTRIES)]
    for _ in range(2 * stream.buffer_bytes // (4 * ENTRIES)):
        stream.release(sums, 1.0)
    return stream


def history_of(stream: FlatStream) -> Any:
    """The file of a stream."""
    assert stream._history is not None
    return stream._history


def settle(*streams: FlatStream) -> None:
    """Let their threads end, for which there is time while a model computes."""
    for stream in streams:
        if (reader := history_of(stream)._reader) is not None:
            reader.join()


def forget(stream: FlatStream) -> None:
    """Write the file to the disk and have the system drop it from memory."""
    history = history_of(stream)
    os.fdatasync(history._file)
    history.drop()
    os.posix_fadvise(history._file, 0, 0, os.POSIX_FADV_DONTNEED)


def measure(name: str, folder: str, rounds: int, pause: float) -> dict[str, Any]:
    """Medians of a step's seconds, and of the ratios of sides that took turns."""
    memory, file, other = opened(name, None), opened(name, folder), opened(name, folder)

    def cold(ahead: bool) -> None:
        settle(other)
        forget(other)
        if ahead:
            history_of(other).read_ahead()
        time.sleep(pause)

    sides: dict[str, tuple[FlatStream, Callable[[], object]]] = {
        "memory": (memory, lambda: settle(file, other)),
        "file": (file, lambda: settle(file, other)),
        "cold": (other, lambda: cold(ahead=True)),
        "not ahead": (other, lambda: cold(ahead=False)),
    }
    took: dict[str, list[float]] = {side: [] for side in sides}
    rows: dict[int, list[torch.Tensor]] = {}
    for turn in range(rounds + 1):
        order = list(sides) if turn % 2 else list(reversed(sides))
        for side in order:
            stream, before = sides[side]
            before()
            row = torch.zeros(ENTRIES)
            start = time.perf_counter()
            stream.release([row], 1.0)
            seconds = time.perf_counter() - start
            if turn:  # the first warms up
                took[side].append(seconds)
            # Every step of a stream is looked at once, of both, as they are at different steps.
            rows.setdefault(stream.step, []).append(row[::4099].clone())
    for pair in rows.values():
        assert all(torch.equal(pair[0], each) for each in pair)
    return {
        "strategy": name,
        "entries": ENTRIES,
        "history_bytes": memory.buffer_bytes,
        "rounds": rounds,
        "pause": pause,
        "seconds": {side: statistics.median(each) for side, each in took.items()},
        "ratios": {
            side: statistics.median(a / b for a, b in zip(each, took["memory"], strict=True))
            for side, each in took.items()
        },
        "resident_bytes": {side: peak(name, at) for side, at in (("memory", ""), ("file", folder))},
    }


def peak(name: str, folder: str) -> int:
    """Bytes of a process of its own, above what it had before the stream was opened."""
    command = [sys.executable, __file__, folder, "--peak", name]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(printed.split()[-1])


def print_peak(name: str, folder: str) -> None:
    """The same, in this process."""
    # What draws and its tables are loaded before the count begins.
    sums = [torch.zeros(ENTRIES)]
    noise_stream(Identity(), steps=1, like=sums, seed=0).release(sums, 1.0)
    forget_peak()
    before = resident("VmRSS")
    opened(name, folder or None).release(sums, 1.0)
    print(resident("VmHWM") - before)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="on the disk; closed to others (mode 0700)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds to read ahead in")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak is not None:
        print_peak(args.peak, args.folder)
        return
    rows = [measure(name, args.folder, args.rounds, args.pause) for name in CASES]
    columns = (
        ("noise", "{strategy}"),
        ("history", "{history_bytes:MiB .0f} MiB"),
        ("resident, in memory", "{resident_bytes.memory:MiB .0f} MiB"),
        ("resident, in a file", "{resident_bytes.file:MiB .0f} MiB"),
        ("step, in memory", "{seconds.memory:time}"),
        ("in a file", "× {ratios.file:.2f}"),
        (f"not cached, {args.pause:g} s to read ahead", "× {ratios.cold:.2f}"),
        ("not cached, not read ahead", "× {ratios.not ahead:.2f}"),
    )
    results.publish(
        args.json,
        {"noise_offload": results.Table(columns, rows)},
        script=__file__,
        machine=results.machine("torch") | {"threads": 1},
    )


if __name__ == "__main__":
    main()
