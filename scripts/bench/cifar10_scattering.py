"""The best of CIFAR-10 that two cores reach at ε = 8, from the folders of finished runs.

    python -m recipes.vision --config configs/cifar10_scattering.yaml data.root=DIR --output RUN
    PYTHONPATH=. python scripts/bench/cifar10_scattering.py RUN [RUN ...]

Only the evaluation after a run's last step is taken, on the whole test set. Runs of other settings
that the file holds already are kept.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from typing import Any

import yaml

from dptrain.reporting import STATEMENT, read_metrics
from recipes.runfolder import CONFIG, METRICS
from recipes.task import TEST

OUT = pathlib.Path(__file__).parent / "results" / "cifar10_scattering.json"


def outcome(folder: pathlib.Path) -> dict[str, Any]:
    """Accuracy, and what was promised.

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
    settings = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    return {
        "channels": settings["model"]["channels"],
        "views": settings["data"]["views"],
        "mirrored": settings["data"]["mirrored"],
        "autocast": settings["autocast"],
        "ema": settings["optimizer"]["ema"],
        "learning_rate": settings["optimizer"]["lr"],
        # Of training batches of the last hundred steps, by the models then: CIFAR-10 is public.
        "training_accuracy": statistics.mean(row["accuracy"] for row in rows[-100:]),
        "accuracy": found["accuracy"],
        "loss": found["loss"],
        "epsilon": promised["epsilon"],
        "delta": promised["delta"],
        **{name: promised[name] for name in ("noise_multiplier", "scheme", "strategy", "kind")},
    }


def main() -> None:
    """Read and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN")
    parser.add_argument("--json", type=pathlib.Path, default=OUT)
    options = parser.parse_args()
    new = {_settings(run): run for run in map(outcome, options.runs)}
    old = json.loads(options.json.read_text(encoding="utf-8"))["runs"]
    runs = list(({_settings(run): run for run in old} | new).values())
    options.json.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    for run in runs:
        print(
            f"{run['accuracy']:.4f} at ε = {run['epsilon']:.3f}, δ = {run['delta']:g}, views "
            f"{run['views']}"
        )


def _settings(run: dict[str, Any]) -> str:
    names = ("channels", "views", "mirrored", "autocast", "ema", "learning_rate")
    names += ("scheme", "strategy")
    return json.dumps([run[name] for name in names], sort_keys=True)


if __name__ == "__main__":
    main()
