"""The best of CIFAR-10 that two cores reach at ε = 8, from the folders of finished runs.

    python -m recipes.vision --config configs/cifar10_scattering.yaml data.root=DIR --output RUN
    PYTHONPATH=. python scripts/bench/cifar10_scattering.py RUN [RUN ...] [--root DIR]

Only the evaluation after a run's last step is taken, on the whole test set; with ``--root`` also
one of the saved model on images and their mirror images, as ``data.mirrored`` makes it. Runs of
other settings that the file holds already are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
from typing import Any

from safetensors.torch import load_model

from dptrain.reporting import STATEMENT, read_metrics
from recipes.config import load_config
from recipes.data import Split, cifar10
from recipes.data.scattered import scattered_test
from recipes.data.scattering import STRIDE
from recipes.models import vgg
from recipes.runfolder import CONFIG, METRICS, WEIGHTS
from recipes.task import TEST, evaluate
from recipes.vision import SIZES, VisionSettings, classification_task

CLASSES = 10
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
    settings = load_config(VisionSettings, folder / CONFIG)
    mirrored = settings.data.mirrored
    return {
        "channels": settings.model.channels,
        "views": settings.data.views,
        "autocast": settings.autocast,
        "ema": settings.optimizer.ema,
        "learning_rate": settings.optimizer.lr,
        # Of training batches of the last hundred steps, by the models then: CIFAR-10 is public.
        "training_accuracy": statistics.mean(row["accuracy"] for row in rows[-100:]),
        "accuracy": found.get("accuracy_alone", None if mirrored else found["accuracy"]),
        "accuracy_mirrored": found["accuracy"] if mirrored else None,
        "loss": found["loss"],
        "epsilon": promised["epsilon"],
        "delta": promised["delta"],
        **{name: promised[name] for name in ("noise_multiplier", "scheme", "strategy", "kind")},
    }


def together(folder: pathlib.Path, root: str) -> dict[str, float]:
    """Accuracies of a run's saved model, on test images alone and with their mirror images."""
    settings = load_config(VisionSettings, folder / CONFIG)
    both = scattered_test(cifar10(root).test, mirrored=True)
    model = vgg(
        in_channels=both[0][0].shape[1],
        classes=CLASSES,
        image_size=SIZES["cifar10"] // STRIDE,
        **{name: getattr(settings.model, name) for name in ("channels", "groups", "hidden")},
    )
    load_model(model, folder / WEIGHTS)
    split = Split(both, both, model[0].in_channels, CLASSES, SIZES["cifar10"] // STRIDE)
    task = classification_task(split, model)
    found = evaluate(dataclasses.replace(task, autocast=settings.autocast_dtype))
    return {"accuracy": found["accuracy_alone"], "accuracy_mirrored": found["accuracy"]}


def main() -> None:
    """Read and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN")
    parser.add_argument("--json", type=pathlib.Path, default=OUT)
    parser.add_argument("--root", metavar="DIR", help="CIFAR-10, to evaluate the saved models on")
    options = parser.parse_args()
    found = [outcome(run) for run in options.runs]
    if options.root is not None:
        for run, folder in zip(found, options.runs, strict=True):
            run |= together(folder, options.root)
    new = {_settings(run): run for run in found}
    old = json.loads(options.json.read_text(encoding="utf-8"))["runs"]
    runs = list(({_settings(run): run for run in old} | new).values())
    options.json.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    for run in runs:
        print(
            f"{run['channels']} channels, {run['views']} views: {run['accuracy']} alone, "
            f"{run['accuracy_mirrored']} with mirror images at ε = {run['epsilon']:.3f}"
        )


def _settings(run: dict[str, Any]) -> str:
    names = ("channels", "views", "autocast", "ema", "learning_rate", "scheme", "strategy")
    return json.dumps([run[name] for name in names], sort_keys=True)


if __name__ == "__main__":
    main()
