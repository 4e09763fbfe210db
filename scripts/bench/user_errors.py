"""The cost of protecting every author of arXiv: schemes, bounds and bands at the same (ε, δ).

The setting of Dong & Ganesh 2026, section 7.3, on the papers of 1993 to 2019
(``arxiv_graph.py``): 50,000 held out, n = 1,000 steps, B̄ = 1,024, δ = 2e-6, prefix sums. Three
measurements, each of which keeps what the others wrote:

    PYTHONPATH=. python scripts/bench/user_errors.py --archive FOLDER table   # k = 2 with copies
    PYTHONPATH=. python scripts/bench/user_errors.py --archive FOLDER bounds  # k = 1, 2, 4, 8
    PYTHONPATH=. python scripts/bench/user_errors.py --archive FOLDER sizes   # seconds, memory

``sizes`` multiplies the bounded graph, users and all, until it has ten million rows; it measures
the partition (seconds, and the memory of the whole process), one calibration, and batches of
1,024.
"""

from __future__ import annotations

import argparse
import pathlib
import resource
import time
from typing import Any

import numpy as np

from dptrain import AttributionGraph, GraphPartition, Identity, UserCyclic, UserMinSep, calibrate
from dptrain.planning import UserPlan, plan_users
from dptrain.strategies import BandMF
from scripts import results
from scripts.bench.arxiv_graph import ArxivGraph, arxiv_graph

OUT = pathlib.Path(__file__).parent / "results" / "user_errors.json"
STEPS, BATCH, DELTA = 1000, 1024, 2e-6
EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)
MANY = 10_000_000
COLUMNS = (
    ("", "{name}"),
    *((f"ε = {epsilon:g}", f"{{error.{epsilon:g}:.4f}}") for epsilon in EPSILONS),
)
BOUND_COLUMNS = (
    ("k", "{max_examples}"),
    ("copies", "{duplicates}"),
    ("kept", "{kept:.1%}"),
    ("scheme", "`{called}`"),
    ("bands", "{bands}"),
    ("error", "{error:.4f}"),
    ("error / kept", "{error_over_kept:.4f}"),
)


def errors(plans: dict[float, UserPlan]) -> list[dict[str, Any]]:
    """The rows of all plans at every ε: what a plan lacks, refined for others, is calibrated."""
    found: dict[str, dict[str, Any]] = {}
    for epsilon, plan in plans.items():
        for row in plan.rows:
            key = f"{row.name}, {row.strategy_name}"
            if key not in found:
                found[key] = {"row": row, "error": {}}
            found[key]["error"][epsilon] = row.error
    entries = []
    for known in found.values():
        row, error = known["row"], known["error"]
        entry: dict[str, Any] = {**row.to_dict()}
        for name in ("noise_multiplier", "error_over_kept", "accountant", "kind", "norm"):
            del entry[name]
        entry["strategy"] = {"type": row.strategy_name}
        for epsilon in EPSILONS:
            if epsilon not in error:
                shown = calibrate(
                    scheme=row.mechanism.scheme, strategy=row.mechanism.strategy, epsilon=epsilon,
                    delta=DELTA, accountant=row.accountant,
                )  # fmt: skip
                error[epsilon] = row.rmse * shown.mechanism.noise_multiplier / BATCH
        entry["error"] = {f"{epsilon:g}": error[epsilon] for epsilon in EPSILONS}
        entries.append(entry)
    return entries


def table(found: ArxivGraph) -> list[dict[str, Any]]:
    """Every scheme at k = 2 with copies, and Poisson sampling as revealed draws account for it."""
    rows = errors(
        {
            epsilon: plan_users(
                found.bounded.source, epsilon=epsilon, delta=DELTA, batch_size=BATCH, steps=STEPS,
                bounds=(2,), duplicates=(True,), max_bands=128,
            )
            for epsilon in EPSILONS
        }
    )  # fmt: skip
    graph = found.bounded.graph
    plain = UserMinSep.for_batch_size(graph=graph, batch_size=BATCH, min_sep=1, steps=STEPS)
    strategy = Identity().bind(STEPS)
    revealed = {
        f"{epsilon:g}": strategy.rmse(STEPS)
        * calibrate(
            scheme=plain, strategy=strategy, epsilon=epsilon, delta=DELTA,
            accountant="revealed-draws",
        ).mechanism.noise_multiplier
        / BATCH
        for epsilon in EPSILONS
    }  # fmt: skip
    rows.append(
        {
            "max_examples": 2,
            "duplicates": True,
            "scheme": {"type": "UserMinSep", "min_sep": 1, "accountant": "revealed-draws"},
            "strategy": {"type": "Identity(1)"},
            "rows": graph.examples,
            "error": revealed,
        }
    )
    return rows


def bounds(found: ArxivGraph) -> list[dict[str, Any]]:
    """The best rows of every bound, with and without copies."""
    plan = plan_users(found.bounded.source, epsilon=8.0, delta=DELTA, batch_size=BATCH, steps=STEPS)
    best: dict[tuple[int, bool, str], Any] = {}
    for row in plan.rows:  # in ascending order of cost
        best.setdefault((row.bound, row.duplicates, type(row.mechanism.scheme).__name__), row)
    return [row.to_dict() for row in best.values()]


def sizes(found: ArxivGraph) -> dict[str, Any]:
    """Seconds and memory of partition, calibration and batches."""
    graph = found.bounded.graph
    result: dict[str, Any] = {"rows": graph.examples}
    start = time.perf_counter()
    partition = GraphPartition.of_graph(graph, cycle=16)
    result["partition_seconds"] = time.perf_counter() - start
    result["dropped"] = partition.dropped
    start = time.perf_counter()
    scheme = UserCyclic(partition=partition, batch_size=BATCH, steps=STEPS)
    calibrate(scheme=scheme, strategy=BandMF(bands=16), epsilon=8.0, delta=DELTA)
    result["calibration_seconds"] = time.perf_counter() - start
    times = -(-MANY // graph.examples)
    offsets = np.concatenate(([0], np.cumsum(np.tile(np.diff(graph.offsets), times))))
    shift = np.repeat(np.arange(times, dtype=np.int64) * graph.users, len(graph.members))
    many = AttributionGraph.from_csr(offsets, np.tile(graph.members, times) + shift)
    del offsets, shift
    result["many_rows"] = many.examples
    start = time.perf_counter()
    partition = GraphPartition.of_graph(many, cycle=64)
    result["many_partition_seconds"] = time.perf_counter() - start
    result["many_dropped"] = partition.dropped
    result["many_peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    stream = UserCyclic(partition=partition, batch_size=BATCH, steps=STEPS).stream(0)
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        next(stream)
        seconds.append(time.perf_counter() - start)
    result["many_batch_milliseconds"] = 1000 * float(np.median(seconds))
    return result


def main() -> None:
    """Run one measurement and write it beside the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("table", "bounds", "sizes"))
    parser.add_argument("--archive", type=pathlib.Path, required=True)
    parser.add_argument("--json", type=pathlib.Path, default=OUT)
    options = parser.parse_args()
    found = arxiv_graph(options.archive)
    value = {"table": table, "bounds": bounds, "sizes": sizes}[options.what](found)
    old = results.read(options.json)
    kept = {what: old[what] for what in ("table", "bounds", "sizes") if what in old}
    write({"graph": found.figures(), **kept, options.what: value}, options.json)


def write(kept: dict[str, Any], path: pathlib.Path) -> None:
    """Keep all measurements, with the best of each scheme and of each bound as tables."""
    tables = {
        "user_errors": results.Table(COLUMNS, best_schemes(kept.get("table", []))),
        "user_bounds": results.Table(BOUND_COLUMNS, best_of_bounds(kept.get("bounds", []))),
    }
    results.publish(path, tables, script=__file__, **kept)


def best_schemes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A scheme a row, with the least error of its settings at each ε, ordered by that at ε = 8."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        least = found.setdefault(title(row["scheme"]), dict(row["error"]))
        for epsilon, error in row["error"].items():
            least[epsilon] = min(least[epsilon], error)
    ordered = sorted(found.items(), key=lambda item: item[1]["8"])
    return [{"name": name, "error": error} for name, error in ordered]


def title(scheme: dict[str, Any]) -> str:
    """A scheme by name, with what tells it from others of its class."""
    name = f"`{scheme['type']}`"
    if "spread" in scheme:
        return f"{name}, spread over {scheme['spread']} slots"
    if scheme["type"] == "UserMinSep" and scheme["min_sep"] == 1:
        draws = "revealed" if "accountant" in scheme else "hidden"
        return f"{name}, `min_sep=1`, draws {draws}"
    return name


def best_of_bounds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every bound the scheme with the least error, as a user writes it."""
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    for row in rows:
        key = row["max_examples"], row["duplicates"]
        if key not in found or row["error_over_kept"] < found[key]["error_over_kept"]:
            given = ", ".join(f"{k}={v}" for k, v in row["scheme"].items() if k != "type")
            called = f"{row['scheme']['type']}({given})"
            found[key] = {**row, "called": called, "bands": row["strategy"].get("bands", 1)}
    return [row for _, row in sorted(found.items())]


if __name__ == "__main__":
    main()
