"""Weighted samples a second of b-min-sep sampling, which its default accountant certifies by.

The run is that of Dong & Ganesh 2026 (arXiv 2602.09338), section 7.4: 7,200 steps, b = 256 bands,
batches of 1,793 of 14,745,600 examples. A sample is a draw of the outputs and their privacy loss.

Run: PYTHONPATH=. python scripts/bench/weighted_samples.py [--rounds 5] [--samples 8192]
[--threads 2] [--min-sep 256] [--sigma 0.47] [--engine cuda]
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dptrain import BandMF, MatrixMechanism, MinSep
from dptrain.accounting.min_sep import MinSepImportance
from dptrain.accounting.simulation import default_threads


def main() -> None:
    """Print the samples a second of every round, and their median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--min-sep", type=int, default=256)
    parser.add_argument("--sigma", type=float, default=0.47)
    parser.add_argument("--engine", choices=("auto", "cuda"), default="auto")
    options = parser.parse_args()
    scheme = MinSep.for_batch_size(
        batch_size=1793, dataset_size=14_745_600, min_sep=options.min_sep, steps=7200
    )
    mechanism = MatrixMechanism(
        scheme=scheme, strategy=BandMF(bands=options.min_sep), noise_multiplier=options.sigma
    )
    start = time.perf_counter()
    accountant = MinSepImportance(engine=options.engine)
    terms = accountant.law(mechanism).terms(options.sigma)(10.0)["remove"]
    terms.draw(np.random.default_rng(0), terms.lanes)
    print(f"moments, messages and the first {terms.lanes}: {time.perf_counter() - start:.1f} s")

    def chunk(seed: int) -> int:
        return terms.draw(np.random.default_rng(seed), terms.lanes).size

    rates = []
    for round_ in range(options.rounds):
        start = time.perf_counter()
        with ThreadPoolExecutor(options.threads) as pool:
            drawn = sum(pool.map(chunk, range(-(-options.samples // terms.lanes))))
        rates.append(drawn / (time.perf_counter() - start))
        print(f"round {round_}: {rates[-1]:,.0f} samples/s")
    print(f"median {statistics.median(rates):,.0f} samples/s with {options.threads} threads")


if __name__ == "__main__":
    main()
