"""The cost of choosing among runs: a few composed, or the best of a random number of them.

    PYTHONPATH=. python scripts/bench/choice.py [--json FILE]

A run is DP-SGD with Poisson sampling of probability 0.01 for 2,000 steps, calibrated to ε at
δ = 1e-5, at which all statements are made. Beside our bounds for a random number stands that of
Papernot & Steinke 2022 (arXiv 2110.03620) by Rényi divergences, as dp_accounting computes it.
"""

from __future__ import annotations

import argparse
import math
import pathlib
from typing import Any

import dp_accounting
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from tqdm import tqdm

from dptrain.accounting import (
    NegativeBinomialTrials,
    PoissonTrials,
    TradeOff,
    TrialCount,
    calibrate,
    compose_runs,
    select_run,
    trade_off,
)
from dptrain.sampling import Poisson
from dptrain.strategies import Identity
from scripts import results

DELTA, PROBABILITY, STEPS = 1e-5, 0.01, 2000
SIZE = 50_000
TARGETS, MEANS = (1.0, 3.0, 8.0), (3, 10, 30)
COLUMNS = (
    ("ε of one run", "{epsilon:g}"),
    ("runs", "{runs}"),
    ("all together", "{composed:.2f}"),
    *((law, f"{{random.{law}.epsilon:.2f}}") for law in ("logarithmic", "geometric", "poisson")),
    ("geometric, by Rényi", "{random.geometric.renyi:.2f}"),
)


def laws(mean: float) -> dict[str, tuple[TrialCount, float]]:
    """Each law of the number of runs, and its shape in dp_accounting."""
    return {
        "logarithmic": (NegativeBinomialTrials.with_mean(mean, shape=0.0), 0.0),
        "geometric": (NegativeBinomialTrials.with_mean(mean), 1.0),
        "poisson": (PoissonTrials(mean), math.inf),
    }


def by_renyi(sigma: float, mean: float, shape: float) -> float:
    """ε of Papernot & Steinke's theorems."""
    step = dp_accounting.PoissonSampledDpEvent(PROBABILITY, dp_accounting.GaussianDpEvent(sigma))
    run = dp_accounting.SelfComposedDpEvent(step, STEPS)
    event = dp_event.RepeatAndSelectDpEvent(run, mean, shape)
    return float(RdpAccountant().compose(event).get_epsilon(DELTA))


def measure(target: float) -> list[dict[str, Any]]:
    """One run's ε, and what becomes of it, by the number of runs."""
    scheme = Poisson(dataset_size=SIZE, steps=STEPS, probability=PROBABILITY)
    found = calibrate(scheme=scheme, strategy=Identity(), epsilon=target, delta=DELTA)
    run: TradeOff = trade_off(found.mechanism, found.guarantee, floor=1e-11, points=801)
    sigma = found.mechanism.noise_multiplier
    rows = []
    for mean in MEANS:
        random: dict[str, Any] = {}
        for name, (law, shape) in laws(mean).items():
            random[name] = {
                "epsilon": select_run(run, law, delta=DELTA).epsilon,
                "renyi": by_renyi(sigma, mean, shape),
                "median": law.quantile(0.5),
                "most": law.quantile(0.95),
            }
        rows.append(
            {
                "epsilon": target,
                "noise_multiplier": sigma,
                "runs": mean,
                "composed": compose_runs([run] * mean, delta=DELTA).epsilon,
                "random": random,
            }
        )
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    arguments = parser.parse_args()
    setting = {"delta": DELTA, "probability": PROBABILITY, "steps": STEPS}
    rows = [row for target in tqdm(TARGETS, desc="ε", delay=2) for row in measure(target)]
    table = results.Table(COLUMNS, rows)
    results.publish(arguments.json, {"choice": table}, script=__file__, setting=setting)


if __name__ == "__main__":
    main()
