"""Time and memory of individual privacy, beside what a user would otherwise do.

ε of every example from counts of its norms (60,000 examples × 10,000 steps), and,
in turns, the ε of a few of them by one composition for each example: ours
(``HeterogeneousComposition``) and dp_accounting's. What those would take for all is extrapolated
from the few and labelled as such. ε is compared for the same few.

    PYTHONPATH=. python scripts/bench/individual.py [--examples N] [--steps T]
        [--probability q] [--sigma σ] [--delta δ] [--few K] [--seed S] [--json]
"""

from __future__ import annotations

import argparse
import pathlib
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from dptrain.accounting.losses import HeterogeneousComposition, spread, subsampled_gaussian_on_grid
from dptrain.contrib.individual import NormGrid
from scripts import results
from scripts.paper.individual_losses import IndividualPLD

OUT = pathlib.Path(__file__).parent / "results" / "individual.json"
Counts = npt.NDArray[np.uint16]
Row = dict[str, Any]
QUANTILES = ("least", "quarter", "median", "three_quarters", "most")
COLUMNS = (
    ("accountant", "{title}"),
    ("time for all", "{seconds:time}", "{extrapolated_hours_for_all:,.0f} h (extrapolated)"),
    ("peak memory", "{peak_mib:,.0f} MiB", ""),
    (
        "result",
        "ε from {epsilon.least:.3g} to {epsilon.most:.3g}",
        "our ε over theirs: {least:.4f} to {most:.4f}",
    ),
)
TARGET = {"seconds": 60, "peak_mib": 2048, "cores": 2}


def random_counts(grid: NormGrid, examples: int, steps: int, seed: int) -> Counts:
    """Norms lognormal about each example's own, which are lognormal; clipped at 1.

    The medians are e^{N(log 0.3, 1)} of the clipping norm, the spreads of the logarithm uniform in
    [0.2, 0.8]: about 12 % of the examples have most of their norms clipped.
    """
    rng = np.random.default_rng(seed)
    counts = np.zeros((examples, len(grid.values)), np.uint16)
    for start in range(0, examples, 5000):
        rows = slice(start, min(start + 5000, examples))
        size = rows.stop - rows.start
        median = rng.normal(np.log(0.3), 1.0, (size, 1))
        share = ndtr((np.log(grid.values[1:]) - median) / rng.uniform(0.2, 0.8, (size, 1)))
        share[:, -1] = 1.0
        counts[rows, 1:] = rng.multinomial(steps, np.diff(share, axis=1, prepend=0.0))
    return counts


def composed(options: argparse.Namespace, grid: NormGrid, counts: Counts) -> float:
    """ε of one example by our composition of different losses, both directions."""
    columns = np.flatnonzero(counts)
    sigmas = options.sigma / grid.values[columns]
    found = []
    for remove in (True, False):
        q = options.probability
        spreads = [spread(probability=q, sigma=float(s), remove=remove) for s in sigmas]
        total = sum(int(n) * s.variance for n, s in zip(counts[columns], spreads, strict=True))
        window = max(20 * total**0.5, *(s.high - s.low for s in spreads))
        spacing = max((total / options.steps) ** 0.5 / 100, window / (1 << 16))
        parts = (
            (subsampled_gaussian_on_grid(probability=q, sigma=float(s), spacing=spacing,
                                         remove=remove), int(n))
            for s, n in zip(sigmas, counts[columns], strict=True)
        )  # fmt: skip
        found.append(HeterogeneousComposition(parts).epsilon(options.delta))
    return max(found)


def dp_accounting(options: argparse.Namespace, grid: NormGrid, counts: Counts) -> float:
    """ε of one example by dp_accounting, at a spacing of 1e-4."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    total = None
    for column in np.flatnonzero(counts):
        step = pld.from_gaussian_mechanism(
            options.sigma / grid.values[column], sampling_prob=options.probability,
            value_discretization_interval=1e-4,
        )  # fmt: skip
        step = step.self_compose(int(counts[column]))
        total = step if total is None else total.compose(step)
    assert total is not None
    return float(total.get_epsilon_for_delta(options.delta))


def accountant(options: argparse.Namespace) -> Row:
    """ε of all examples; then a few of them by the alternatives, in turns."""
    grid = NormGrid()
    counts = random_counts(grid, options.examples, options.steps, options.seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    seconds, cpu = time.perf_counter(), time.process_time()
    ours = IndividualPLD(
        probability=options.probability, noise_multiplier=options.sigma, grid=grid
    ).epsilon(counts, options.delta)
    seconds, cpu = time.perf_counter() - seconds, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    row: Row = {
        "title": "dptrain", "examples": options.examples, "steps": options.steps,
        "probability": options.probability, "sigma": options.sigma, "delta": options.delta,
        "grid": len(grid.values),
        "seconds": seconds, "cpu_seconds": cpu, "peak_mib": peak, "peak_mib_before": before,
        "epsilon": dict(zip(QUANTILES, np.quantile(ours, [0, 0.25, 0.5, 0.75, 1]), strict=True)),
        "target": TARGET, "alternatives": [],
    }  # fmt: skip
    print(f"{options.examples} examples × {options.steps} steps: {seconds:.1f} s ({cpu:.1f} s of "
          f"all cores), peak {peak} MiB ({before} MiB with the counts only); target "
          f"{TARGET['seconds']} s and {TARGET['peak_mib']} MiB")  # fmt: skip
    others: dict[str, Callable[..., float]] = {
        "HeterogeneousComposition": composed, "dp_accounting": dp_accounting
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in others}
    ratios: dict[str, list[float]] = {name: [] for name in others}
    few = np.random.default_rng(options.seed + 1).choice(options.examples, options.few, False)
    for example in few:
        for name, call in others.items():
            start = time.perf_counter()
            theirs = call(options, grid, counts[example])
            times[name].append(time.perf_counter() - start)
            ratios[name].append(float(ours[example]) / theirs)
    for name, found in ratios.items():
        median = float(np.median(times[name]))
        hours = median * options.examples / 3600
        row["alternatives"].append({
            "title": f"{name}, one composition an example",
            "examples_measured": len(found), "median_seconds_an_example": median,
            "extrapolated_hours_for_all": hours, "extrapolated_ratio": 3600 * hours / seconds,
            "least": min(found), "most": max(found),
        })  # fmt: skip
        print(f"{name}: {median:.2f} s an example (median of {len(found)}); extrapolated to all "
              f"{hours:.1f} h, {3600 * hours / seconds:.0f} times ours; our ε over theirs "
              f"{min(found):.5f} to {max(found):.5f}")  # fmt: skip
    return row


def main() -> None:
    """Measure, print, and write it when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=60_000)
    parser.add_argument("--steps", type=int, default=10_000, help="at most 65,535")
    parser.add_argument("--probability", type=float, default=0.01)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--few", type=int, default=4, help="examples for the alternatives")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help=f"write the row into {OUT.name}")
    options = parser.parse_args()
    row = accountant(options)
    if options.json:
        row["machine"] = results.machine("numpy", "scipy", "dp-accounting", load=True)
        table = results.Table(COLUMNS, [row, *row["alternatives"]])
        results.publish(
            OUT, {"individual": table}, script=__file__, machine=row["machine"], accountant=row
        )


if __name__ == "__main__":
    main()
