"""Seconds and memory to load and bound a large attribution graph.

Two million examples of five users each, text ids of an author distribution with a heavy tail, as a
``datasets.Dataset`` on disk (memory-mapped), as one that was shuffled (indices mapping), and as
plain lists streamed from a file. Each is read in a process of its own; its peak memory is printed
beside the memory it held after the imports.

    PYTHONPATH=. python scripts/bench/graph.py [--examples 2000000] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from dptrain.reporting import plot_graph
from dptrain.sampling import AttributionGraph
from scripts import results

USERS_PER_EXAMPLE = 5
SECONDS, MEBIBYTES = 60, 1024
SOURCES = ("arrow", "arrow, shuffled", "lists")
COLUMNS = (
    ("source", "{source}"),
    ("load", "{load_seconds:time}"),
    ("bound", "{bound_seconds:time}"),
    ("peak memory", "{peak_mebibytes:,.0f} MiB"),
)
# (p, b) of which the expected batch size is shown.
DESIGNS = [(0.002, 2), (0.002, 8), (0.002, 32)]


def write_column(folder: pathlib.Path, examples: int, exponent: float) -> None:
    """The data set, as arrow and as lines of text."""
    rng = np.random.default_rng(4)
    edges = examples * USERS_PER_EXAMPLE
    # Author number = examples·U^exponent: the most frequent ones have thousands of examples.
    authors = (examples * rng.random(edges) ** exponent).astype(np.int64)
    text = pa.array([f"author-{number:07d}" for number in authors.tolist()])
    offsets = np.arange(0, edges + 1, USERS_PER_EXAMPLE, dtype=np.int32)
    table = pa.table({"authors": pa.ListArray.from_arrays(pa.array(offsets), text)})
    datasets.Dataset(table).save_to_disk(folder / "arrow")
    lines = text.to_numpy(zero_copy_only=False).reshape(examples, USERS_PER_EXAMPLE)
    with open(folder / "lists.txt", "w") as file:
        file.writelines(" ".join(line) + "\n" for line in lines)


def lines_of(path: pathlib.Path) -> Iterator[list[str]]:
    """One list of users a line."""
    with open(path) as file:
        for line in file:
            yield line.split()


def peak_mebibytes() -> float:
    """Most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result of ``run``, and its seconds."""
    start = time.perf_counter()
    return run(), time.perf_counter() - start


def in_new_process(*arguments: str) -> str:
    """The output of this script when run by itself.

    The caller must be small: a new process begins with the peak memory of the one it came from.
    """
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(source: str, folder: pathlib.Path, k: int, plot: pathlib.Path | None) -> dict[str, Any]:
    """In a process of its own: load, bound, then look at the neighborhoods."""
    baseline = peak_mebibytes()
    if source == "lists":
        graph, load = timed(lambda: AttributionGraph.from_lists(lines_of(folder / "lists.txt")))
    else:
        dataset = datasets.load_from_disk(folder / "arrow")
        if source == "arrow, shuffled":
            dataset = dataset.shuffle(seed=0)
        graph, load = timed(lambda: AttributionGraph.from_dataset(dataset, "authors"))
    after_load = peak_mebibytes()
    bounded, bound = timed(lambda: graph.bound(k, duplicates=True, seed=0))
    peak = peak_mebibytes()
    statistics, neighbors = timed(bounded.statistics)
    if plot is not None:
        plot_graph(statistics, plot)
    return {
        "source": source,
        "examples": graph.examples,
        "users": graph.users,
        "edges": graph.edges,
        "load_seconds": load,
        "bound_seconds": bound,
        "baseline_mebibytes": baseline,
        "load_mebibytes": after_load,
        "peak_mebibytes": peak,
        "statistics_seconds": neighbors,
        "statistics_mebibytes": peak_mebibytes(),
        "table": statistics.table(DESIGNS),
    }


def report(source: str, record: dict[str, Any]) -> str:
    """One line with the targets beside."""
    total = record["load_seconds"] + record["bound_seconds"]
    met = total <= SECONDS and record["peak_mebibytes"] <= MEBIBYTES
    return (
        f"{source:<16} load {record['load_seconds']:6.1f} s, bound {record['bound_seconds']:6.1f} s"
        f" (together {total:6.1f}, target {SECONDS})   peak {record['peak_mebibytes']:6.0f} MiB "
        f"(target {MEBIBYTES}; {record['baseline_mebibytes']:.0f} after imports)   "
        f"{'met' if met else 'NOT MET'}   statistics {record['statistics_seconds']:.1f} s, "
        f"{record['statistics_mebibytes']:.0f} MiB"
    )


def main() -> None:
    """Compare, unless this is a process that writes or measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=2_000_000)
    parser.add_argument("--exponent", type=float, default=2.0, help="skew; 1 is uniform")
    parser.add_argument("--bound", type=int, default=2, help="k")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    if options.source is not None:
        print(json.dumps(measure(options.source, options.folder, options.bound, options.plot)))
    elif options.folder is not None:
        write_column(options.folder, options.examples, options.exponent)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Write the column, measure every source, print and save."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        size = ("--examples", str(options.examples), "--exponent", str(options.exponent))
        in_new_process("--folder", folder, *size)
        for source in SOURCES:
            extra = ["--bound", str(options.bound)]
            if options.plot is not None and source == SOURCES[0]:
                extra += ["--plot", str(options.plot)]
            out = in_new_process("--folder", folder, "--source", source, *extra)
            records.append(json.loads(out.splitlines()[-1]))
            print(report(source, records[-1]), flush=True)
    print(records[0]["table"])
    table = results.Table(COLUMNS, records)
    targets = [SECONDS, MEBIBYTES]
    results.publish(
        options.json, {"graph": table}, script=__file__, machine=results.machine(), targets=targets
    )


if __name__ == "__main__":
    main()
