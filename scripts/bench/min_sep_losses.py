"""Privacy losses a second: b-min-sep, p = .01, by default n = 2,000 and 16 bands.

Each direction asked alone, then both together, which the accountants do: one loss is one sample,
so a pass over shared normals yields two.

Run: PYTHONPATH=. python scripts/bench/min_sep_losses.py [--samples 400000] [--threads 2]
[--engine auto] [--steps 2000] [--bands 16] [--device cpu]; ``--device cuda`` draws on a GPU.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

import numpy as np
import torch

from dptrain.accounting.min_sep import MinSepLaw, MinSepLosses
from dptrain.accounting.simulation import default_threads, loss_chunks
from dptrain.strategies import BandMF


def main() -> None:
    """Print one line a direction and number of σ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=400_000)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--engine", choices=("auto", "numpy", "numba"), default="auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--bands", type=int, default=16)
    options = parser.parse_args()
    steps, bands, probability = options.steps, options.bands, 0.01
    law = MinSepLaw(
        coefficients=BandMF(bands=bands).bind(steps).first_column(steps),
        probability=probability,
        min_sep=bands,
        steps=steps,
        warm_start=True,
    )
    simulation = MinSepLosses(law, "cuda" if options.device == "cuda" else options.engine)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(
        f"cores {default_threads()}, threads {options.threads}, "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}, "
        f"torch {torch.__version__} with {torch.get_num_threads()} threads, "
        f"engine {simulation.engine}, chunks of {simulation.lanes} samples, "
        f"load before the run {load:.1f}"
    )
    start = time.perf_counter()
    simulation.draw([2.0], "both", np.random.Generator(np.random.SFC64(1)), 1)
    print(f"first draw (compilation, unless cached): {time.perf_counter() - start:.1f} s")
    for sigmas in ([2.0], [1.9, 2.0, 2.1, 2.2]):
        start, cpu, losses = time.perf_counter(), time.process_time(), 0
        for block in loss_chunks(
            simulation, sigmas, seed=[1], samples=options.samples, threads=options.threads
        ):
            losses += block.size // len(sigmas)
        wall, busy = time.perf_counter() - start, time.process_time() - cpu
        print(
            f"both directions, {len(sigmas)} σ: {losses / wall:9,.0f} samples/s, "
            f"{losses / busy:9,.0f} samples per CPU-second"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"largest resident memory: {peak / 1024:,.0f} MB")


if __name__ == "__main__":
    main()
