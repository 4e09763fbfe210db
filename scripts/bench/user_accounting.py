"""A user's ε at arXiv's size by every accountant of ``UserMinSep``, side by side.

The setting of Dong & Ganesh 2026, section 7.3: 300,000 papers, k = 2, B̄ = 1,024, n = 1,000 steps,
b = 16 with 16 bands, δ = 1/500,000. Papers stand in a circle and every user has two of them; d, the
most outside neighbors of any user (``dptrain.accounting.users.importance``), is 0 (pairs), 2 (a
circle), 4 (three users a paper), or what is asked for (one paper has many users). p follows from
the graph and B̄. The time grows with the samples; 60/δ = 30 million give the tightest
answers.
Rows of an earlier run are kept unless they are made anew.

    PYTHONPATH=. python scripts/bench/user_accounting.py [--json FILE] [--samples S]
        [--sigmas …] [--neighbors …]
"""

from __future__ import annotations

import argparse
import pathlib
import time

import numpy as np

from dptrain import AttributionGraph, BandMF, MatrixMechanism, UserMinSep
from dptrain.accounting import UnsampledGaussian
from dptrain.accounting.base import DeterministicAccountant
from dptrain.accounting.simulation import SimulatedAccountant
from dptrain.accounting.users import (
    RevealedDraws,
    UserMinSepImportance,
    neighbor_facts,
)
from scripts import results

PAPERS, STEPS, BATCH, BANDS, DELTA = 300_000, 1000, 1024.0, 16, 1 / 500_000
OUT = pathlib.Path(__file__).parent / "results" / "user_accounting.json"


def graph(neighbors: int) -> AttributionGraph:
    """A graph of ``PAPERS`` papers, two a user: users are the edges of a graph on papers.

    There are no triangles, so d of a user is the number of other edges at both its papers. It is
    0, 2, 4 or, with a paper of many users, any number from 6 on.
    """
    paper = np.arange(PAPERS)
    if neighbors == 0:
        pairs = [(paper[::2], paper[1::2])]
    else:
        pairs = [(paper, (paper + 1) % PAPERS)]
        if neighbors > 2:
            pairs.append((paper[: PAPERS // 2], paper[: PAPERS // 2] + PAPERS // 2))
        if neighbors > 5:
            far = 1000 + 7 * np.arange(neighbors - 5)
            pairs.append((np.zeros_like(far), far))
    ends = np.concatenate([np.stack(pair, axis=1) for pair in pairs])
    users = np.repeat(np.arange(len(ends)), 2)
    return AttributionGraph.from_pairs(ends.ravel(), users, dataset_size=PAPERS)  # type: ignore[arg-type]


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, default=OUT)
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--neighbors", type=int, nargs="+", default=[0, 2, 4, 16, 64])
    arguments = parser.parse_args()
    rows = results.read(arguments.json).get("answers", [])
    for neighbors in arguments.neighbors:
        built = graph(neighbors)
        found = neighbor_facts(built).neighbors
        scheme = UserMinSep.for_batch_size(
            graph=built, batch_size=BATCH, min_sep=BANDS, steps=STEPS
        )
        share = 1 - (1 - scheme.probability) ** ((BANDS - 1) * found)
        members: list[DeterministicAccountant | SimulatedAccountant] = [
            RevealedDraws(),
            UnsampledGaussian(),
            UserMinSepImportance(seed=0),
        ]
        for sigma in arguments.sigmas:
            mechanism = MatrixMechanism(
                scheme=scheme, strategy=BandMF(bands=BANDS).bind(STEPS), noise_multiplier=sigma
            )
            for member in members:
                if member.refusal(mechanism):
                    continue
                start = time.perf_counter()
                epsilon = member.guarantee(mechanism, delta=DELTA).epsilon
                seconds = time.perf_counter() - start
                key = {"neighbors": found, "sigma": sigma, "accountant": member.name}
                rows = [row for row in rows if any(row[name] != key[name] for name in key)]
                rows.append(
                    {
                        "neighbors": found,
                        "probability": scheme.probability,
                        "exposed": share,
                        "sigma": sigma,
                        "accountant": member.name,
                        "kind": member.kind.value,
                        "epsilon": epsilon,
                        "seconds": seconds,
                    }
                )
                print(f"d = {found}, σ = {sigma}, {member.name}: ε = {epsilon:.3f}", flush=True)
                table = results.pivoted(rows, {"sigma": "σ"}, "accountant", "{@.epsilon:.2f}")
                results.publish(
                    arguments.json,
                    {"user_accounting": table},
                    script=__file__,
                    quiet=True,
                    answers=rows,
                )


if __name__ == "__main__":
    main()
