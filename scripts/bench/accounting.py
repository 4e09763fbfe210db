"""Time of every accountant at the sizes of its target; samples/s of those that simulate.

Each row runs in a process of its own (its peak memory beside it), after one small call that loads
and compiles. Where dp_accounting has the same quantity both run in turns, and the ratio is printed.

    PYTHONPATH=. python scripts/bench/accounting.py [--only PART …] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from dptrain.accounting.simulation import default_threads
from scripts import results

OUT = pathlib.Path(__file__).parent / "results" / "accounting.json"
Row = dict[str, Any]
COLUMNS = (
    ("accountant", "{accountant}"),
    ("case", "{case}"),
    ("time", "{seconds:time}", ""),
    (
        "result",
        "{rate:,.0f} samples a second",
        "{samples_a_direction:,} samples a direction",
        "{symbol} = {value:.4g}",
        "ε = {allocation_epsilon:.4f}",
        "ε = {epsilon:.4g}",
        "",
    ),
    (
        "beside it",
        "plain simulation: {plain_samples_a_direction:,} samples",
        "published bracket: {low:g} to {high:g}",
        "dp_accounting: {dp_accounting_seconds:time}, {symbol} = {dp_accounting_value:.4g}",
        "",
    ),
)


def timed(call: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """Least wall-clock seconds of some calls, and the last result."""
    best, result = float("inf"), None
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - start)
    return best, result


def losses_a_second(simulation: Any, samples: int) -> float:
    """Losses of both directions a second; one loss is one sample."""
    from dptrain.accounting.simulation import loss_chunks

    def run(count: int) -> int:
        options = {"seed": [1], "samples": count, "threads": default_threads()}
        return sum(b.size for b in loss_chunks(simulation, [5.0], **options))

    run(simulation.lanes)
    seconds, drawn = timed(lambda: run(samples))
    return drawn / seconds


def balls_in_bins_losses() -> list[Row]:
    """Balls-in-bins: n = 1,000, b = 100; target 2,000,000/s."""
    from dptrain.accounting.balls_in_bins import BallsInBinsLosses
    from dptrain.strategies import BSR, SquareRoot

    return [
        {
            "accountant": "balls-in-bins losses",
            "case": name,
            "rate": losses_a_second(BallsInBinsLosses(strategy.bind(1000), 1000, 100), 4_000_000),
            "target": 2_000_000,
        }
        for name, strategy in (("BSR(4)", BSR(bands=4)), ("dense", SquareRoot()))
    ]


def certificate() -> list[Row]:
    """σ of b-min-sep (n = 1,000, 16 bands, p = .01) for ε = 2, and the samples behind it."""
    from dptrain.accounting.min_sep import MinSepImportance

    mechanism = min_sep(1000)
    found = []
    for delta in (1e-5, 1e-6):
        accountant = MinSepImportance(seed=1, progress=False)
        seconds, shown = timed(lambda: accountant.calibrate(mechanism, epsilon=2.0, delta=delta))  # noqa: B023
        evidence = shown.certificate
        assert evidence is not None
        sides = [row[side] for row in evidence["grid"] for side in ("remove", "add") if row[side]]
        most = max(side["samples"] for side in sides)
        violated, failure = evidence["violated"], evidence["failure_probability"]
        plain = math.ceil(4.2 * math.log(12 / failure) / violated)  # of terms in [0, 1]
        found.append({
            "accountant": "b-min-sep certificate", "case": f"δ = {delta:g}",
            "seconds": seconds, "sigma": shown.noise_multiplier,
            "deterministic_sigma": evidence["ceiling"], "samples_a_direction": most,
            "plain_samples_a_direction": plain, "fewer": plain / most,
            "target": "10 times fewer than 123 million at 1e-6",
        })  # fmt: skip
    return found


def min_sep(steps: int) -> Any:
    """b-min-sep sampling with BandMF(16)."""
    from dptrain import BandMF, MatrixMechanism, MinSep

    scheme = MinSep(probability=0.01, min_sep=16, dataset_size=50_000, steps=steps)
    return MatrixMechanism(scheme=scheme, strategy=BandMF(bands=16), noise_multiplier=2.0)


def poisson(strategy: Any, steps: int, sigma: float, probability: float = 0.01) -> Any:
    """Poisson sampling."""
    from dptrain import MatrixMechanism, Poisson

    scheme = Poisson(probability=probability, dataset_size=50_000, steps=steps)
    return MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)


def mmcc() -> list[Row]:
    """MMCC: n = 2,000; target 300 s dense, 30 s banded, 1e-3 in ε for C = I."""
    from dptrain.accounting.mmcc import MMCC
    from dptrain.accounting.poisson import PoissonPLD
    from dptrain.strategies import BSR, Identity, SquareRoot

    rows: list[Row] = []
    for name, strategy, sigma, target in (
        ("square root", SquareRoot(), 50.0, 300), ("BSR(16)", BSR(bands=16), 8.0, 30)
    ):  # fmt: skip
        pair = poisson(strategy, 2000, sigma)
        seconds, shown = timed(lambda: MMCC().guarantee(pair, delta=1e-6))  # noqa: B023
        rows.append({
            "accountant": "MMCC", "case": name, "seconds": seconds, "epsilon": shown.epsilon,
            "sigma": sigma, "target": target,
        })  # fmt: skip
    same = poisson(Identity(), 2000, 1.0)
    ours, theirs = (each.guarantee(same, delta=1e-6).epsilon for each in (MMCC(), PoissonPLD()))
    difference = {"mmcc": ours, "poisson": theirs, "difference": ours - theirs}
    return [*rows, {"case": "MMCC, C = I", **difference, "target": 1e-3}]


def renyi() -> list[Row]:
    """Rényi divergences: C = I, b = 1,000, α ≤ 256 in .5 s; p = 4, b = 100, α ≤ 22 in 15 s."""
    from dptrain.accounting.renyi import banded_log_sums, gram_matrix, independent_log_sums
    from dptrain.strategies import BSR

    plain, _ = timed(lambda: independent_log_sums(np.full(1000, 0.25), 256), repeats=5)
    gram = gram_matrix(BSR(bands=4).bind(100), steps=100, bins=100) / 4.0
    banded, _ = timed(lambda: banded_log_sums(gram, 4, 22), repeats=3)
    return [
        {"accountant": "balls-in-bins Rényi", "case": case, "seconds": seconds, "target": target}
        for case, seconds, target in (("C = I", plain, 0.5), ("banded", banded, 15))
    ]


def plain_profile() -> list[Row]:
    """``profile`` of plain DP-SGD (q = 1/300, n = 1,500), 201 ε; target 1 s, 500 MB in all."""
    from dptrain.accounting import profile
    from dptrain.strategies import Identity

    rows, before = [], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    for sigma in (0.4778, 0.6):
        pair = poisson(Identity(), 1500, sigma, 1 / 300)
        seconds, found = timed(lambda: profile(pair, np.linspace(0.0, 50.0, 201)))  # noqa: B023
        rows.append({
            "case": f"profile, σ = {sigma:g}", "seconds": seconds,
            "delta_at_4": float(found.delta[16]), "mib_before": before,
            "target": {"seconds": 1.0, "peak_mib": 500},
        })  # fmt: skip
    return rows


def conditional_composition() -> list[Row]:
    """Conditional composition: n = 1,000, b = 100; target 60 s."""
    from dptrain import BallsInBins, MatrixMechanism
    from dptrain.accounting.balls_in_bins import ConditionalComposition
    from dptrain.strategies import BSR, SquareRoot

    scheme = BallsInBins(bins=100, epochs=10, dataset_size=50_000)
    rows = []
    for name, strategy in (("BSR(4)", BSR(bands=4)), ("square root", SquareRoot())):
        pair = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=20.0)
        seconds, shown = timed(lambda: ConditionalComposition().guarantee(pair, delta=1e-5))  # noqa: B023
        rows.append({
            "accountant": "conditional composition", "case": name, "seconds": seconds,
            "epsilon": shown.epsilon, "target": 60,
        })  # fmt: skip
    return rows


def allocation() -> list[Row]:
    """Random allocation, C = I, t = 100: the near-exact distribution and the known brackets."""
    from dptrain import BallsInBins, Identity, MatrixMechanism
    from dptrain.accounting.balls_in_bins import AllocationPLD

    scheme = BallsInBins(bins=100, epochs=1, dataset_size=50_000)
    rows = []
    for sigma, low, high in ((1.0, 0.6176, 0.6239), (2.0, 0.1712, 0.175), (0.6, 3.4303, 3.432)):
        pair = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)
        seconds, shown = timed(lambda: AllocationPLD().guarantee(pair, delta=1e-5))  # noqa: B023
        rows.append({
            "accountant": "random allocation", "case": f"σ = {sigma:g}", "seconds": seconds,
            "allocation_epsilon": shown.epsilon, "low": low, "high": high,
        })  # fmt: skip
    return rows


def truncated_poisson() -> list[Row]:
    """Truncated Poisson, T = 1,000, against dp_accounting's event; target 2 s, never looser."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    from dptrain import Identity, MatrixMechanism, Poisson
    from dptrain.accounting import account, to_dp_event

    scheme = Poisson(probability=0.01, dataset_size=10_000, steps=1000, max_batch_size=110)
    pair = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
    event = to_dp_event(pair)
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE

    def peer() -> float:
        return float(PLDAccountant(relation).compose(event).get_epsilon(1e-5))

    row = against(lambda: account(pair, delta=1e-5).epsilon, peer, target=2.0)
    return [{"accountant": "truncated Poisson", "case": "", "symbol": "ε", **row}]


def calibrate_poisson() -> list[Row]:
    """``calibrate``, Poisson, T = 10,000, against dp_accounting's; target 1.5 s."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    from dptrain import Identity, Poisson
    from dptrain.accounting import calibrate

    scheme = Poisson(probability=0.01, dataset_size=50_000, steps=10_000)

    def ours() -> float:
        found = calibrate(scheme=scheme, strategy=Identity(), epsilon=4.0, delta=1e-5)
        return found.mechanism.noise_multiplier

    def event(sigma: float) -> Any:
        step = dp_accounting.GaussianDpEvent(sigma)
        sampled = dp_accounting.PoissonSampledDpEvent(0.01, step)
        return dp_accounting.SelfComposedDpEvent(sampled, 10_000)

    def peer() -> float:
        interval = dp_accounting.ExplicitBracketInterval(0.5, 10.0)
        return float(
            dp_accounting.calibrate_dp_mechanism(
                PLDAccountant, event, 4.0, 1e-5, interval, tol=1e-4
            )
        )

    row = against(ours, peer, target=1.5)
    return [{"accountant": "calibrating Poisson", "case": "", "symbol": "σ", **row}]


def against(ours: Callable[[], float], peer: Callable[[], float], *, target: float) -> Row:
    """Both in turns, three times; medians and their ratio."""
    mine, other, values = [], [], (0.0, 0.0)
    for _ in range(3):
        first, a = timed(ours)
        second, b = timed(peer)
        mine.append(first)
        other.append(second)
        values = (a, b)
    seconds, peers = float(np.median(mine)), float(np.median(other))
    return {
        "seconds": seconds, "dp_accounting_seconds": peers, "ratio": peers / seconds,
        "value": values[0], "dp_accounting_value": values[1], "target": target,
    }  # fmt: skip


PARTS: dict[str, Callable[[], list[Row]]] = {
    each.__name__: each
    for each in (
        balls_in_bins_losses,
        certificate,
        renyi,
        plain_profile,
        allocation,
        conditional_composition,
        mmcc,
        truncated_poisson,
        calibrate_poisson,
    )
}


def main() -> None:
    """Run the parts, print each as it ends, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(PARTS), default=list(PARTS))
    parser.add_argument("--json", type=pathlib.Path, default=OUT)
    parser.add_argument("--child", choices=sorted(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        warnings.simplefilter("ignore", UserWarning)
        rows = PARTS[options.child]()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps([{"part": options.child, **row, "peak_mib": peak} for row in rows]))
        return
    machine = results.machine("numpy", "scipy", "torch", "dp-accounting", load=True)
    for name in options.only:
        command = [sys.executable, __file__, "--child", name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        new = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {(PARTS[name].__doc__ or '').splitlines()[0]}")
        print("   ", json.dumps(new, ensure_ascii=False))
        kept = results.rows_of(options.json, "accounting")
        kept += results.read(options.json).get("more", [])
        keep([row for row in kept if row["part"] != name] + new, options.json, machine)


def keep(rows: list[Row], path: pathlib.Path, machine: Row) -> None:
    """Write rows in the order of the parts; those of no accountant are not shown."""
    rows = sorted(rows, key=lambda row: list(PARTS).index(row["part"]))
    table = results.Table(COLUMNS, [row for row in rows if "accountant" in row])
    more = [row for row in rows if "accountant" not in row]
    results.publish(
        path, {"accounting": table}, script=__file__, machine=machine, quiet=True, more=more
    )


if __name__ == "__main__":
    main()
