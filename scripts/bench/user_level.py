"""The cost of a user's guarantee: ε of user-level batches at arXiv's size, by every accountant.

The setting of Dong & Ganesh 2026, section 7.3: 300,000 papers, k = 2, B̄ = 1,024, n = 1,000 steps,
δ = 1/500,000, BandMF with b bands and a separation of b. The probability p depends on the graph:
here every paper has four papers in its neighborhood (itself included), about as many as the
bounded graph of ``graph.py`` has on average. PYTHONPATH=. python scripts/bench/user_level.py
[--json FILE]
"""

from __future__ import annotations

import argparse
import pathlib
import time

from scipy.optimize import brentq

from dptrain import AttributionGraph, BandMF, MatrixMechanism, UserMinSep, account
from scripts import results

PAPERS, USERS, STEPS, BATCH, DELTA = 300_000, 500_000, 1000, 1024.0, 1 / 500_000
NEIGHBORS = 4
ACCOUNTANTS = {
    "sampling": ("revealed-draws", "gaussian"),
    "participation": ("revealed-draws", "gaussian"),
}


def probability(min_sep: int) -> float | None:
    """The least p with p (1-p)^((b-1) |N|) N = B̄, if any; also used for participation."""

    def excess(p: float) -> float:
        return p * (1 - p) ** ((min_sep - 1) * NEIGHBORS) * PAPERS - BATCH

    peak = 1 / ((min_sep - 1) * NEIGHBORS + 1)
    return float(brentq(excess, 0.0, peak)) if excess(peak) >= 0 else None


def main() -> None:
    """Print the table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    # Facts are all that accountants read; no edges are needed.
    graph = AttributionGraph(
        examples=PAPERS, users=USERS, edges=2 * USERS, max_examples=2, fingerprint="a stand-in"
    )
    rows = []
    for b in (2, 4, 8, 16, 32):
        p = probability(b)
        if p is None:
            print(f"{b:>3} no p reaches batches of {BATCH:g}: exclusion leaves fewer")
            continue
        for exclusion, names in ACCOUNTANTS.items():
            scheme = UserMinSep(
                graph=graph,
                probability=p,
                min_sep=b,
                steps=STEPS,
                batch_size=BATCH,
                exclusion=exclusion,
            )
            strategy = BandMF(bands=b).bind(STEPS)
            for sigma in (0.5, 1.0, 2.0):
                mechanism = MatrixMechanism(
                    scheme=scheme, strategy=strategy, noise_multiplier=sigma
                )
                for name in names:
                    start = time.perf_counter()
                    epsilon = account(mechanism, delta=DELTA, accountant=name).epsilon
                    seconds = time.perf_counter() - start
                    rows.append(
                        {
                            "min_sep": b,
                            "probability": p,
                            "sigma": sigma,
                            "exclusion": exclusion,
                            "accountant": name,
                            "epsilon": epsilon,
                            "seconds": seconds,
                        }
                    )
    keys = {"min_sep": "b", "sigma": "σ", "exclusion": "exclusion"}
    table = results.pivoted(rows, keys, "accountant", "{@.epsilon:.2f}")
    results.publish(arguments.json, {"user_level": table}, script=__file__)


if __name__ == "__main__":
    main()
