"""Accuracy on CIFAR-10 at ε = 8 after a quarter and half an hour of two cores.

    PYTHONPATH=. python scripts/bench/cifar10_scattering.py quarter half errors
        --root DIR --output RUNS

Each budget is a run of the recipe by ``configs/cifar10_scattering.yaml`` with settings beside it,
of which the processor time is taken. A run that was interrupted goes on, and one that is finished
is read. Only the evaluation after the last step is taken, on the whole test set. Budgets of the
file that are not named are kept.

``errors`` in place of a budget predicts what larger batches or more steps would bring, as
``scripts/paper/cifar10_bands.py`` does; nothing of it looks at the data.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys
from typing import Any

from dptrain import BandMF, MinSep, calibrate
from dptrain.configuration import expected_batch_size
from dptrain.reporting import STATEMENT, read_metrics
from recipes.config import load_config
from recipes.runfolder import CONFIG, METRICS, SUMMARY
from recipes.task import TEST
from recipes.vision import VisionSettings
from scripts import results

ROOT = pathlib.Path(__file__).parents[2]
CONFIGURATION = ROOT / "configs" / "cifar10_scattering.yaml"
OUT = pathlib.Path(__file__).parent / "results" / "cifar10_scattering.json"
PRECISION = "autocast=bfloat16"
TWICE = ["scheme.epoch_length=null", "scheme.batch_size=1333", "scheme.min_sep=18"]
BUDGETS = {"quarter": [PRECISION], "half": [*TWICE, "strategy.bands=16", PRECISION]}
"""Settings beside the configuration's, by name: ``half`` has batches of twice as many images."""
TIME = "processor_seconds.json"
RUNS, ERRORS = "cifar10_scattering", "errors"
COLUMNS = (
    ("batch", "{batch:,}"),
    ("products", "{autocast}", "float32"),
    ("training accuracy, %", "{training_accuracy:% .1f}"),
    ("test accuracy, %", "{accuracy:% .1f}"),
    ("minutes of a core", "{processor_seconds:minutes .0f}"),
    ("ε", "{epsilon:.2f}"),
    ("δ", "{delta:figures3}"),
    ("σ", "{noise_multiplier:.3f}"),
    ("steps", "{scheme.steps:,}"),
)
ERROR_COLUMNS = (
    ("steps", "{steps:,}"),
    ("batch", "{batch:,}"),
    ("bands", "{bands}"),
    ("separation", "{min_sep}"),
    ("σ", "{noise_multiplier:.3f}"),
    ("predicted error", "{ratio:.2f}"),
)
SIZE, EPSILON = 50_000, 8.0
# Steps, batch, separation and bands: of the runs; of twice the batch, with half the separation and
# bands, where the error is less than with as many; of twice the steps.
PLANS = ((1500, 667, 37, 32), (1500, 1333, 18, 16), (3000, 667, 37, 32))


def train(folder: pathlib.Path, settings: list[str], root: str) -> None:
    """Run the recipe in a process of its own, on from where it was, and keep what time it took."""
    command = [sys.executable, "-m", "recipes.vision", "--config", str(CONFIGURATION)]
    command += [f"data.root={root}", *settings, "--output", str(folder)]
    spent: float | None = 0.0
    if folder.exists():
        command.append("--resume")
        spent = _spent(folder)
        (folder / TIME).unlink(missing_ok=True)  # of no use if this process does not live to add
    before = _children()
    try:
        subprocess.run(command, check=True, cwd=ROOT)
    finally:
        if folder.exists() and spent is not None:
            text = json.dumps(spent + _children() - before)
            (folder / TIME).write_text(text, encoding="utf-8")


def _spent(folder: pathlib.Path) -> float | None:
    """Processor seconds so far; ``None`` where a part of them is not known."""
    path = folder / TIME
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def outcome(folder: pathlib.Path) -> dict[str, Any]:
    """Accuracy, processor time, and what was promised.

    Raises:
        ValueError: if the run is not finished, or was not evaluated on the test set.
    """
    statement = json.loads((folder / STATEMENT).read_text(encoding="utf-8"))
    promised = statement["guarantee"]
    steps = promised["steps_planned"]
    last = [row for row in read_metrics(folder / METRICS) if row["step"] == steps]
    found = next((row for row in last if row["split"] == TEST), None)
    if found is None:
        raise ValueError(f"{folder}: no evaluation on the test set after step {steps}")
    rows = [row for row in read_metrics(folder / METRICS) if row["split"] == "train"]
    settings = load_config(VisionSettings, folder / CONFIG)
    return {
        "channels": settings.model.channels,
        "batch": round(expected_batch_size(settings.scheme, SIZE)),
        "autocast": settings.autocast,
        "processor_seconds": _spent(folder),
        # Of training batches of the last hundred steps, by the models then: CIFAR-10 is public.
        "training_accuracy": statistics.mean(row["accuracy"] for row in rows[-100:]),
        "accuracy": found["accuracy"],
        "loss": found["loss"],
        "epsilon": promised["epsilon"],
        "delta": promised["delta"],
        **{name: promised[name] for name in ("noise_multiplier", "scheme", "strategy", "kind")},
    }


def errors() -> list[dict[str, float]]:
    """Root mean square error of the prefix sums of averaged gradients, per unit of R and step.

    Noise in the sums of a run, over the number of its steps: the learning rate of a longer run is
    smaller in proportion.
    """
    rows = []
    for steps, batch, separation, bands in PLANS:
        scheme = MinSep.for_batch_size(
            min_sep=separation, batch_size=batch, dataset_size=SIZE, steps=steps
        )
        strategy = BandMF(bands=bands, objective="mean")
        found = calibrate(
            scheme=scheme, strategy=strategy, epsilon=EPSILON, delta=1 / (2 * SIZE)
        ).mechanism
        noise = found.strategy.rmse(steps) * found.noise_multiplier
        rows.append(
            {
                "steps": steps,
                "batch": batch,
                "min_sep": separation,
                "bands": bands,
                "noise_multiplier": found.noise_multiplier,
                "error": noise / found.scheme.expected_batch_size / steps,
            }
        )
    return [row | {"ratio": row["error"] / rows[0]["error"]} for row in rows]


def main() -> None:
    """Train, read and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("budgets", nargs="+", choices=(*BUDGETS, ERRORS), metavar="BUDGET")
    parser.add_argument("--root", metavar="DIR", help="CIFAR-10")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs"), metavar="RUNS")
    parser.add_argument("--json", type=pathlib.Path, default=OUT)
    options = parser.parse_args()
    named = [name for name in options.budgets if name != ERRORS]
    if named and options.root is None:
        parser.error(f"--root: budgets {', '.join(named)} train on CIFAR-10; name its folder")
    runs = {run["budget"]: run for run in results.rows_of(options.json, RUNS)}
    found = results.rows_of(options.json, f"{RUNS}_errors")
    for budget in options.budgets:
        if budget == ERRORS:
            found = errors()
        else:
            folder = options.output.resolve() / f"cifar10_{budget}"
            if not (folder / SUMMARY).exists():
                train(folder, BUDGETS[budget], str(pathlib.Path(options.root).resolve()))
            runs[budget] = {"budget": budget, **outcome(folder)}
        tables = {
            RUNS: results.Table(COLUMNS, [runs[name] for name in BUDGETS if name in runs]),
            f"{RUNS}_errors": results.Table(ERROR_COLUMNS, found),
        }
        results.publish(options.json, tables, script=__file__)


if __name__ == "__main__":
    main()
