"""How much slower secure normals are than fast ones: rows of both generators, in turn.

    PYTHONPATH=. python scripts/bench/secure_noise.py [--rounds 9] [--threads 2] [--json FILE]

Prints the median time per normal of each, and the median over rounds of the ratio within a round;
also that of the processor time, which other jobs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import time
from typing import Any

import torch

from dptrain.noise.generators import Normals, open_normals

SIZES = (1_000_000, 3_000_000, 10_000_000)


def seconds(normals: Normals, row: torch.Tensor, step: int) -> tuple[float, float]:
    """Wall and processor time of drawing one row."""
    wall, processor = time.perf_counter(), time.process_time()
    normals.fill(row, group=0, step=step)
    return time.perf_counter() - wall, time.process_time() - processor


def measure(size: int, rounds: int) -> dict[str, Any]:
    """Both generators take turns; the first round is not counted."""
    fast, secure = open_normals(1), open_normals(1, secure=True)
    row = torch.zeros(size)
    pairs = [(seconds(fast, row, t), seconds(secure, row, t)) for t in range(rounds + 1)][1:]
    result: dict[str, Any] = {"entries": size}
    for index, clock in enumerate(("wall", "processor")):
        ratios = sorted(b[index] / a[index] for a, b in pairs)
        result[clock] = {
            "fast_ns": 1e9 / size * statistics.median(a[index] for a, _ in pairs),
            "secure_ns": 1e9 / size * statistics.median(b[index] for _, b in pairs),
            "ratio": statistics.median(ratios),
            "lowest": ratios[0],
            "highest": ratios[-1],
        }
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, help="of torch; its own choice if left out")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    results = [measure(size, arguments.rounds) for size in SIZES]
    print(f"{torch.get_num_threads()} threads, {os.cpu_count()} cores, {platform.machine()}")
    for result in results:
        for clock in ("wall", "processor"):
            one = result[clock]
            print(
                f"{result['entries']:>10,} entries, {clock:>9} time: fast {one['fast_ns']:.1f} ns, "
                f"secure {one['secure_ns']:.1f} ns a normal, ratio {one['ratio']:.1f} "
                f"({one['lowest']:.1f} to {one['highest']:.1f})"
            )
    if arguments.json is not None:
        value = {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "results": results}
        arguments.json.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
