"""σ of b-min-sep sampling at the size of production, by the default accountant: seconds and memory.

Each case runs in a process of its own, so that its peak memory is its own, and is stopped after
``--limit`` seconds. Compilation is left out: every process first calibrates a case of 70 steps.

    PYTHONPATH=. python scripts/bench/accounting_scale.py [--only CASE …] [--limit 900] [--json F]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any

from dptrain import BandMF, MinSep
from dptrain.accounting import calibrate
from scripts import results

OUT = pathlib.Path(__file__).parent / "results" / "accounting_scale.json"

# N, batch size, n, b, bands, ε, δ; the first is Dong & Ganesh 2026 (arXiv 2602.09338), section 7.4.
CASES: dict[str, tuple[int, int, int, int, int, float, float]] = {
    "section-7.4": (14_745_600, 1793, 7200, 256, 256, 10.0, 1.301e-8),
    "section-7.4-truncated": (14_745_600, 1793, 7200, 256, 256, 10.0, 1.301e-8),
    "few-bands": (50_000, 512, 2000, 64, 16, 8.0, 1e-5),
    **{
        f"few-bands-{epsilon:g}": (50_000, 512, 2000, 64, 16, epsilon, 1e-5)
        for epsilon in (0.5, 1.0, 2.0, 4.0, 16.0)
    },
    "small-epsilon": (200_000, 512, 2000, 64, 64, 1.0, 1e-6),
    "long": (100_000_000, 4096, 100_000, 512, 512, 8.0, 1e-9),
}
RUN = "{dataset_size:,} examples, batches of {batch_size:,}, {steps:,} steps"
COLUMNS = (
    ("run", f"{RUN}, cut to {{max_batch_size:,}}", RUN),
    ("b", "{min_sep}, {bands} bands"),
    ("(ε, δ)", "({epsilon:g}, {delta:g})"),
    ("σ", "{sigma:.4f}"),
    ("kind", "{kind}, {samples:,} samples", "{kind}", "stopped"),
    ("time", "{seconds:time}", "over {stopped_after:time}"),
    ("memory", "{peak_mib:,} MiB", ""),
)
# Largest batches; the others cut none.
CAPS = {"section-7.4-truncated": 2048}


def solve(
    case: tuple[int, int, int, int, int, float, float], cap: int | None = None
) -> dict[str, Any]:
    """σ, what kind of statement it is, and how long it took."""
    size, batch, steps, min_sep, bands, epsilon, delta = case
    scheme = MinSep.for_batch_size(
        batch_size=batch, dataset_size=size, min_sep=min_sep, steps=steps, max_batch_size=cap
    )
    start = time.perf_counter()
    found = calibrate(scheme=scheme, strategy=BandMF(bands=bands), epsilon=epsilon, delta=delta)
    seconds = time.perf_counter() - start
    rows = (found.guarantee.certificate or {}).get("grid", [])
    samples = sum(row["remove"]["samples"] for row in rows)
    samples += rows[0]["add"]["samples"] if rows else 0  # one verdict for all of them
    return {
        "sigma": found.mechanism.noise_multiplier,
        "kind": found.guarantee.kind.value,
        "accountant": found.guarantee.accountant,
        "samples": samples or None,
        "seconds": seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    """Run the cases, print each as it ends, and write all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--limit", type=float, default=900.0, help="seconds a case")
    parser.add_argument("--json", type=pathlib.Path, default=OUT)
    parser.add_argument("--child", choices=sorted(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        solve((1000, 50, 70, 2, 2, 4.0, 1e-4))
        print(json.dumps(solve(CASES[options.child], CAPS.get(options.child))))
        return
    machine = results.machine("numpy", "scipy", "numba", load=True)
    rows = {row["case"]: row for row in results.rows_of(options.json, "accounting_scale")}
    for name in options.only:
        size, batch, steps, min_sep, bands, epsilon, delta = CASES[name]
        case: dict[str, Any] = {
            "case": name, "dataset_size": size, "batch_size": batch, "steps": steps,
            "min_sep": min_sep, "bands": bands, "epsilon": epsilon, "delta": delta,
            "max_batch_size": CAPS.get(name),
        }  # fmt: skip
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--child", name],
                check=True, stdout=subprocess.PIPE, text=True, timeout=options.limit,
            )  # fmt: skip
            case |= json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            case["stopped_after"] = options.limit
        rows[name] = case
        print(json.dumps(case, ensure_ascii=False), flush=True)
        table = results.Table(COLUMNS, list(rows.values()))
        results.publish(
            options.json, {"accounting_scale": table}, script=__file__, machine=machine, quiet=True
        )


if __name__ == "__main__":
    main()
