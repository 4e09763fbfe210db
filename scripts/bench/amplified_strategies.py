"""RMSE·σ/B̄ of BandMF chosen for the sampling, beside the best ordinary pair of scheme and strategy.

The runs are those of Dong & Ganesh 2026 (arXiv 2602.09338): section 7.2 (CINIC-10: n = 1,500 steps,
N/B̄ = 300, SGD with momentum .95 and its schedule of learning rates, δ = 1/(2N), N = 90,000) at five
ε, and section 7.4 (``--only production``). At most 64 bands (256 in 7.4).

Ordinary: balls in bins and b-min-sep with BandMF of 1, 2, 4, … bands, then the best of these with
wider separations. Chosen: overlap and its decay at the best separation, then the separations once
more. All laws are compared by estimates of one kind, at the end from fresh samples; σ of the best
of both sides comes from the accountant that answers by default, whose answers are 1 % apart. These
are errors and σ, no times: a busy machine changes nothing. A run's row is written when its
estimates are there and again after each certificate.

    PYTHONPATH=. python scripts/bench/amplified_strategies.py [--only 8 4 …] [--estimates]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from dptrain import (
    BallsInBins,
    BandMF,
    MatrixMechanism,
    MinSep,
)
from dptrain.accounting import calibrate
from dptrain.accounting.min_sep import TiltedEstimate, min_sep_law
from dptrain.planning import amplified_band_mf
from dptrain.sampling import Scheme
from dptrain.strategies import PREFIX_SUMS, MomentumSGD, Workload
from scripts import results

OUT = pathlib.Path(__file__).parent / "results" / "amplified_strategies.json"
COLUMNS = (
    ("run", "({epsilon:g}, {delta:.3g}), {steps:,} steps"),
    ("ordinary", "{ordinary.pair}"),
    ("error", "{ordinary.shown:figures4}"),
    ("chosen", "{chosen.pair}"),
    ("error", "{chosen.shown:figures4}"),
    ("less error", "{gain:.1f} %"),
    ("σ by", "{sigma_by}"),
)
Row = dict[str, Any]
_SAMPLES = 2048
Pair = tuple[Scheme, BandMF]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run to plan."""

    epsilon: float
    delta: float
    dataset_size: int
    batch_size: float
    steps: int
    bands: int
    workload: Workload

    def min_sep(self, separation: int) -> MinSep:
        """B-min-sep sampling with that separation."""
        return MinSep.for_batch_size(
            batch_size=self.batch_size,
            dataset_size=self.dataset_size,
            min_sep=separation,
            steps=self.steps,
        )

    def band_mf(self, bands: int) -> BandMF:
        """The ordinary one."""
        return BandMF(bands=bands, workload=self.workload).bind(self.steps)

    def error(self, pair: Pair, sigma: float) -> float:
        """RMSE·σ/B̄."""
        scheme, strategy = pair
        return strategy.rmse(self.steps, self.workload) * sigma / scheme.expected_batch_size


# The base rate up to n/4, a twentieth of it from 3n/4, linear between: their schedule.
_RATES = tuple(np.interp(np.arange(1500), [375, 1125], [1.0, 0.05]).tolist())
_CINIC = {
    "dataset_size": 90_000, "batch_size": 300.0, "steps": 1500, "bands": 64, "delta": 1 / 180_000,
    "workload": MomentumSGD(momentum=0.95, learning_rates=_RATES),
}  # fmt: skip
RUNS = {
    **{f"{epsilon:g}": Run(epsilon=epsilon, **_CINIC) for epsilon in (8.0, 4.0, 2.0, 1.0, 0.5)},
    "production": Run(10.0, 1.301e-8, 14_745_600, 1793.0, 7200, 256, PREFIX_SUMS),
}


def estimated(run: Run, estimate: TiltedEstimate, pairs: list[Pair]) -> list[tuple[float, Pair]]:
    """Errors by estimated σ, the least first."""
    found, sigma = [], None
    for scheme, strategy in pairs:
        law = min_sep_law(MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0))
        sigma = estimate.noise(law, sigma)
        found.append((run.error((scheme, strategy), sigma), (scheme, strategy)))
    return sorted(found, key=lambda each: each[0])


def separations(run: Run, bands: int) -> list[int]:
    """The bands to which ``dptrain plan`` widens."""
    longest = math.floor(run.dataset_size / run.batch_size)
    return sorted(
        {b for b in (bands, 2 * bands, 4 * bands, 8 * bands, longest // 2) if bands <= b <= longest}
    )


def best_ordinary(run: Run, estimate: TiltedEstimate) -> tuple[dict[str, float], Pair]:
    """Error of the best ordinary pair of each scheme, and the best of all."""
    bands = [1 << i for i in range(run.bands.bit_length())]
    epoch = round(run.dataset_size / run.batch_size)
    known: dict[str, tuple[float, Pair]] = {}
    if run.steps % epoch == 0:
        bins = BallsInBins(bins=epoch, epochs=run.steps // epoch, dataset_size=run.dataset_size)
        every = [(bins, run.band_mf(count)) for count in bands]
        known["BallsInBins"] = estimated(run, estimate, every)[0]
    narrow = estimated(run, estimate, [(run.min_sep(b), run.band_mf(b)) for b in bands])[0]
    strategy = narrow[1][1]
    wide = [(run.min_sep(b), strategy) for b in separations(run, strategy.bands)]
    known["MinSep"] = min(narrow, estimated(run, estimate, wide)[0], key=lambda each: each[0])
    best = min(known.values(), key=lambda each: each[0])[1]
    return {name: error for name, (error, _) in known.items()}, best


def best_chosen(run: Run, estimate: TiltedEstimate, start: int) -> tuple[float, Pair]:
    """Chosen at one separation; then the separations, and chosen again where another is better."""
    found: dict[int, tuple[float, Pair]] = {}

    def choose(separation: int) -> tuple[float, Pair]:
        scheme = run.min_sep(separation)
        choice = amplified_band_mf(
            scheme=scheme, epsilon=run.epsilon, delta=run.delta, workload=run.workload,
            bands=min(run.bands, separation), certify=False,
            samples=_SAMPLES,
        )  # fmt: skip
        return estimated(run, estimate, [(scheme, choice.strategy)])[0]

    found[start] = choose(start)
    strategy = found[start][1][1]
    wide = [(run.min_sep(b), strategy) for b in separations(run, strategy.bands)]
    best = estimated(run, estimate, wide)[0]
    separation = best[1][0].min_sep
    if separation != start:
        found[separation] = choose(separation)
    return min([best, *found.values()], key=lambda each: each[0])


def written(pair: Pair) -> str:
    """Scheme and strategy as a user writes them, in short."""
    scheme, strategy = pair
    size = "bins" if isinstance(scheme, BallsInBins) else "min_sep"
    value = f"{type(scheme).__name__}({size}={getattr(scheme, size)}), {strategy.bands} bands"
    if strategy.overlap:
        value += f", overlap {strategy.overlap:g}, decay {strategy.overlap_decay:g}"
    return value


def measure(run: Run, certified: bool) -> Iterator[Row]:
    """One run's row: from estimates, and again after each certificate."""
    estimate = TiltedEstimate(run.epsilon, run.delta, samples=_SAMPLES)
    schemes, ordinary = best_ordinary(run, estimate)
    separation = min(ordinary[0].min_sep, math.floor(run.dataset_size / run.batch_size))
    _, chosen = best_chosen(run, estimate, max(separation, run.bands))
    row: Row = {
        "epsilon": run.epsilon, "delta": run.delta, "steps": run.steps,
        "best_of_schemes_estimated": schemes,
    }  # fmt: skip
    yield from compared(run, row, ordinary, chosen, certified)


def compared(run: Run, row: Row, ordinary: Pair, chosen: Pair, certified: bool) -> Iterator[Row]:
    """The row with both sides; the ordinary pair is what is left where the chosen one is no better.

    Both are estimated once more by other samples than those that they were found with.
    """
    fresh = TiltedEstimate(run.epsilon, run.delta, samples=4 * _SAMPLES, seed=1)
    sides = {"ordinary": ordinary, "chosen": chosen}
    errors = {name: estimated(run, fresh, [pair])[0][0] for name, pair in sides.items()}
    if errors["chosen"] >= errors["ordinary"]:
        sides["chosen"], errors["chosen"] = ordinary, errors["ordinary"]
    for name, pair in sides.items():
        row[name] = {
            "pair": written(pair), "rmse": pair[1].rmse(run.steps, run.workload),
            "estimated_error": errors[name],
        }  # fmt: skip
    yield row
    known: dict[Pair, Row] = {}
    for name, pair in sides.items() if certified else ():
        if pair not in known:
            found = calibrate(
                scheme=pair[0], strategy=pair[1], epsilon=run.epsilon, delta=run.delta
            )
            sigma = found.mechanism.noise_multiplier
            known[pair] = {
                "noise_multiplier": sigma, "kind": found.guarantee.kind.value,
                "error": run.error(pair, sigma),
            }  # fmt: skip
        row[name] |= known[pair]
        yield row
    if certified and row["chosen"]["error"] > row["ordinary"]["error"]:
        row["chosen"] = dict(row["ordinary"])
        yield row


def compared_by(row: Row) -> Row:
    """The row with the errors that are shown: by certified σ where both sides have one."""
    sides = row["ordinary"], row["chosen"]
    key = "error" if all("error" in side for side in sides) else "estimated_error"
    for side in sides:
        side["shown"] = side[key]
    gain = 100 * (1 - row["chosen"][key] / row["ordinary"][key])
    return {**row, "gain": gain, "sigma_by": sides[1]["kind"] if key == "error" else "estimate"}


def main() -> None:
    """Measure the runs, print each as it goes on, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--estimates", action="store_true", help="leave out what certifies")
    parser.add_argument("--json", type=pathlib.Path, default=OUT)
    options = parser.parse_args()
    rows = {row["run"]: row for row in results.rows_of(options.json, "amplified_strategies")}
    machine = results.machine("numpy", "scipy", "torch", load=True)
    for name in options.only:
        for row in measure(RUNS[name], not options.estimates):
            rows[name] = {"run": name, **compared_by(row)}
            print(f"ε = {name}:", json.dumps(row, ensure_ascii=False), flush=True)
            table = results.Table(COLUMNS, list(rows.values()))
            results.publish(
                options.json, {"amplified_strategies": table}, script=__file__, machine=machine,
                quiet=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
