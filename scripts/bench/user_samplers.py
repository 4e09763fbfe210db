"""The cost of user-level batches: seconds and memory against the size of the graph.

    PYTHONPATH=. python scripts/bench/user_samplers.py [--examples 2000000] [--authors 5] [--k 2]
        [--batch 1024] [--min-sep 32] [--steps 200] [--json FILE]

Every example has ``authors`` users, drawn so that no user has more than k examples; B̄ = ``batch``.
Per batch: median and largest of the wall time of drawing one.
"""

from __future__ import annotations

import argparse
import pathlib
import resource
import statistics
import time
from typing import Any

import numpy as np

from dptrain.sampling import AttributionGraph, Scheme, UserFixed, UserMinSep
from dptrain.sampling.users import probability_for_batch_size
from scripts import results

COLUMNS = (
    ("", "{name}"),
    ("time", "{construction_s:time}", "{seconds:time}"),
    ("a batch", "{batch_ms_median:.2f} ms", ""),
    ("mean batch", "{mean_batch:,.1f}", ""),
)


def graph_of(examples: int, authors: int, k: int, seed: int = 0) -> AttributionGraph:
    """Every user has k places, which go to random examples; one drawn twice there has one less."""
    rng = np.random.default_rng(seed)
    places = np.repeat(np.arange(-(-examples * authors // k)), k)[: examples * authors]
    rows = np.repeat(np.arange(examples), authors)
    return AttributionGraph.from_pairs(rows, rng.permutation(places), dataset_size=examples)


def timed(scheme: Scheme, seed: int, steps: int) -> dict[str, Any]:
    """Construction and batches of a stream."""
    start = time.perf_counter()
    stream = scheme.stream(seed)
    construction = time.perf_counter() - start
    each, sizes = [], []
    for _ in range(min(steps, scheme.steps)):
        start = time.perf_counter()
        batch = next(stream)
        each.append(1e3 * (time.perf_counter() - start))
        sizes.append(len(batch))
    return {
        "construction_s": construction,
        "batch_ms_median": statistics.median(each),
        "batch_ms_largest": max(each),
        "mean_batch": statistics.fmean(sizes),
        "smallest_batch": min(sizes),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=2_000_000)
    parser.add_argument("--authors", type=int, default=5)
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--min-sep", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    batch, b, n = arguments.batch, arguments.min_sep, 1000

    start = time.perf_counter()
    graph = graph_of(arguments.examples, arguments.authors, arguments.k)
    facts: dict[str, Any] = {"graph_s": time.perf_counter() - start, "graph": graph.to_dict()}
    rows: list[dict[str, Any]] = []
    for exclusion in ("sampling", "participation"):
        start = time.perf_counter()
        p = probability_for_batch_size(graph, batch_size=batch, min_sep=b, exclusion=exclusion)
        found = {"p": p, "seconds": time.perf_counter() - start}
        rows.append({"name": f"finding p, {exclusion}", **found})
        scheme = UserMinSep(
            graph=graph,
            probability=p,
            min_sep=b,
            steps=n,
            batch_size=batch,
            exclusion=exclusion,
        )
        rows.append({"name": f"UserMinSep, {exclusion}", **timed(scheme, 1, arguments.steps)})
    start = time.perf_counter()
    p = probability_for_batch_size(graph, batch_size=batch, min_sep=b, method="simulation")
    run = UserMinSep(graph=graph, probability=p, min_sep=b, steps=1024, batch_size=batch)
    sizes = np.array([len(each) for each in run.stream(1)])
    means = sizes.reshape(16, -1).mean(axis=1)  # of blocks of two separations or more
    found = {"p": p, "seconds": time.perf_counter() - start, "mean again": float(np.mean(means))}
    found["standard error"] = float(np.std(means, ddof=1)) / 4
    rows.append({"name": "finding p by simulation", **found})
    for min_sep in (1, b, 8 * b):
        fixed = UserFixed(graph=graph, batch_size=batch, min_sep=min_sep, steps=n)
        rows.append({"name": f"UserFixed, b={min_sep}", **timed(fixed, 1, arguments.steps)})
    facts["peak_rss_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results.publish(
        arguments.json,
        {"user_samplers": results.Table(COLUMNS, rows)},
        script=__file__,
        machine=results.machine(),
        **facts,
    )


if __name__ == "__main__":
    main()
