"""Weighted samples a second of b-min-sep sampling, p = .01, by default n = 2,000 and 16 bands.

Each direction by itself, at ε = 2 and σ = 2. The first draw also computes the messages.

Run: PYTHONPATH=. python scripts/bench/min_sep_terms.py [--samples 200000] [--threads 2]
[--steps 2000] [--bands 16] [--device cpu]; ``--device cuda`` draws noise and losses on a GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import resource
import time

import numpy as np

from dptrain.accounting.min_sep import MinSepImportance
from dptrain.accounting.simulation import DIRECTIONS, default_threads
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep
from dptrain.strategies import BandMF


def main() -> None:
    """Print one line a direction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--bands", type=int, default=16)
    options = parser.parse_args()
    scheme = MinSep(
        dataset_size=60_000, steps=options.steps, probability=0.01, min_sep=options.bands
    )
    mechanism = MatrixMechanism(
        scheme=scheme, strategy=BandMF(bands=options.bands), noise_multiplier=2.0
    )
    engine = "cuda" if options.device == "cuda" else "auto"
    both = MinSepImportance(engine=engine).law(mechanism).terms(2.0)(2.0)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"threads {options.threads}, load before the run {load:.1f}")
    for direction in DIRECTIONS:
        terms = both[direction]
        start = time.perf_counter()
        terms.draw(_stream(1), 1)
        first = time.perf_counter() - start
        start, cpu = time.perf_counter(), time.process_time()
        seeds = range(2, 2 + -(-options.samples // terms.lanes))
        with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
            drawn = sum(
                pool.map(
                    lambda seed, terms=terms: terms.draw(_stream(seed), terms.lanes).size, seeds
                )
            )
        wall, busy = time.perf_counter() - start, time.process_time() - cpu
        print(
            f"{direction}: first draw (messages, compilation unless cached) {first:.1f} s, then "
            f"{drawn / wall:9,.0f} samples/s, "
            f"{drawn / busy:9,.0f} samples per CPU-second"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"largest resident memory: {peak / 1024:,.0f} MB")


def _stream(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(seed))


if __name__ == "__main__":
    main()
