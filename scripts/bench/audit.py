"""Tightness of audits of the mechanism: their bounds beside those of accountants, both directions.

Pairs of 200 steps are calibrated to an ε and a δ. The accountant's δ at that ε and σ, in both
directions, stands beside the estimate by exact likelihood ratios and tilted runs of the real
samplers and noise, which shares no code with the accountants. The last columns are the ε that
counting shows with a million ordinary runs, half with the example and half without, and the ε that
so many could show at best. What a simulating accountant states is a confidence bound, whose margin
over the truth is its own samples': it is asked with forty times as many as by default.

Run: PYTHONPATH=. python scripts/bench/audit.py [--pairs Poisson MinSep] [--epsilons 1]
     [--deltas 1e-5] [--samples 100000] [--runs 1000000] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import time
import warnings
from typing import Any

import numpy as np
from tqdm import tqdm

from dptrain import (
    BSR,
    BallsInBins,
    BandMF,
    CyclicPoisson,
    Identity,
    MatrixMechanism,
    MinSep,
    Poisson,
    calibrate,
    profile,
)
from dptrain.accounting import find_accountants
from dptrain.accounting.simulation import SimulatedAccountant
from dptrain.auditing import StatedCurve, audit_mechanism
from scripts import results

OUT = pathlib.Path(__file__).parent / "results" / "audit.json"
N, STEPS, BATCH = 5000, 200, 100
PAIRS = {
    "Poisson": (Poisson.for_batch_size(batch_size=BATCH, dataset_size=N, steps=STEPS), Identity()),
    "CyclicPoisson": (
        CyclicPoisson.for_batch_size(batch_size=BATCH, dataset_size=N, cycle=8, steps=STEPS),
        BandMF(bands=8),
    ),
    "MinSep": (
        MinSep.for_batch_size(batch_size=BATCH, dataset_size=N, min_sep=8, steps=STEPS),
        BandMF(bands=8),
    ),
    "BallsInBins": (
        BallsInBins.for_batch_size(batch_size=BATCH, dataset_size=N, steps=STEPS),
        BSR(bands=8),
    ),
}
EPSILONS, DELTAS = (1.0, 4.0, 8.0), (1e-3, 1e-5)
SHARPER = 40  # times the samples of a profile
DIRECTIONS = ("remove", "add")
COLUMNS = (
    ("pair", "{scheme}, {strategy}"),
    ("ε", "{epsilon:g}"),
    ("target δ", "{delta:g}"),
    ("accountant", "{accountant}"),
    ("stated δ", "{stated_delta:.3g}"),
    ("found / stated", "{ratio:.3f} ± {ratio_standard_error:.3f}"),
    ("ε found", "{epsilon_estimate:.3f}"),
    ("ε at least", "{epsilon_lower:.3f}"),
    ("by counting", "{counting.epsilon_lower:.2f}"),
    ("at best", "{counting.most:.2f}"),
)
Row = dict[str, Any]


def stated_at(mechanism: MatrixMechanism, epsilon: float) -> dict[str, float]:
    """The accountant's bounds in both directions, tightened by samples where possible."""
    accountant = find_accountants(mechanism)[0]
    if isinstance(accountant, SimulatedAccountant):
        samples = SHARPER * accountant.profile_samples
        accountant = dataclasses.replace(accountant, profile_samples=samples)
    found = profile(mechanism, np.array([epsilon]), accountant=accountant)
    return {"remove": float(found.remove[0]), "add": float(found.add[0])}


def audited(name: str, epsilon: float, delta: float, samples: int, runs: int) -> Row:
    """One line: calibrate, ask the accountant for both directions, audit."""
    scheme, strategy = PAIRS[name]
    found = calibrate(scheme=scheme, strategy=strategy, epsilon=epsilon, delta=delta)
    mechanism: MatrixMechanism = found.mechanism
    stated = profile(mechanism, np.linspace(0.0, 1.5 * epsilon, 13))
    curve = StatedCurve(epsilon=stated.epsilon, remove=stated.remove, add=stated.add)
    theirs = stated_at(mechanism, epsilon)
    start = time.perf_counter()
    audit = audit_mechanism(
        mechanism,
        epsilon=epsilon,
        delta=max(theirs.values()),
        curve=curve,
        samples=samples,
        runs=runs // 2,
        seed=20,
    )
    seconds = time.perf_counter() - start
    ours = {each.direction: each for each in audit.estimates}
    most = max(audit.estimates, key=lambda each: each.delta)
    return {
        "scheme": name,
        "strategy": f"{type(strategy).__name__}({mechanism.strategy.bands})",
        "epsilon": epsilon,
        "delta": delta,
        "sigma": mechanism.noise_multiplier,
        "accountant": stated.accountant,
        "kind": stated.kind.value,
        "stated": theirs,
        "stated_delta": max(theirs.values()),
        "estimated": {
            each: {
                "delta": ours[each].delta,
                "standard_error": ours[each].standard_error,
                "lower": ours[each].lower,
                "measured": ours[each].measured,
            }
            for each in DIRECTIONS
        },
        "ratio": most.delta / max(theirs.values()),
        "ratio_standard_error": most.standard_error / max(theirs.values()),
        "epsilon_estimate": audit.epsilon_estimate,
        "epsilon_lower": audit.epsilon_lower,
        "counting": {
            "epsilon_lower": audit.shown.epsilon_lower,
            "most": audit.counted.most,
            "runs": runs,
        },
        "violations": list(audit.violations),
        "samples": samples,
        "seconds": seconds,
    }


def main() -> None:
    """Print a line for each pair and target; with ``--json`` write them too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--epsilons", type=float, nargs="+", choices=EPSILONS, default=EPSILONS)
    parser.add_argument("--deltas", type=float, nargs="+", choices=DELTAS, default=DELTAS)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # δ = 1e-3 is more than 1/N here: these are no guarantees for anybody.
    warnings.filterwarnings("ignore", message="delta=0.001 is not below 1/N")
    key, order = ("scheme", "epsilon", "delta"), list(PAIRS)
    rows = {tuple(row[k] for k in key): row for row in results.rows_of(OUT, "audit")}
    cases = list(itertools.product(options.pairs, options.epsilons, options.deltas))
    for case in tqdm(cases, delay=2, unit="case"):
        row = audited(*case, options.samples, options.runs)
        rows[case] = row
        places = sorted(rows, key=lambda at: (order.index(at[0]), at[1], -at[2]))
        table = results.Table(COLUMNS, [rows[at] for at in places])
        tqdm.write(
            f"{row['scheme']} ε={row['epsilon']:g} δ={row['delta']:g}: δ̂/δ = {row['ratio']:.3f} ± "
            f"{row['ratio_standard_error']:.3f}, ε̂ = {row['epsilon_estimate']}, counting "
            f"{row['counting']['epsilon_lower']:.3f} of at most {row['counting']['most']:.2f} "
            f"{row['violations']} ({row['seconds']:.0f} s)"
        )
        if options.json:
            here = results.machine("torch", "numpy")
            results.publish(OUT, {"audit": table}, script=__file__, machine=here, quiet=True)


if __name__ == "__main__":
    main()
