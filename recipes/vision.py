"""Train an image classifier privately, from one YAML file.

``python -m recipes.vision --config configs/digits_vgg_minsep.yaml [field=value ...]
[--resume] [--output DIR]``
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from dptrain import MatrixMechanism, PrivacyEngine, PrivateTraining
from dptrain.accounting import profile
from dptrain.report import as_shown, plot_curves, plot_privacy, privacy_report
from recipes.config import differences, load_config, to_yaml
from recipes.data import Split, digits
from recipes.loop import evaluate, train
from recipes.models import vgg
from recipes.runfolder import RunFolder, load_checkpoint
from recipes.settings import FREE_ON_RESUME, NOISE_DTYPES, VisionSettings

FORMAT = 1
INTERRUPTED = 130  # what a shell reports after Ctrl-C


@dataclasses.dataclass
class VisionRun:
    """Everything of one run, wired and at its current step."""

    settings: VisionSettings
    split: Split
    model: nn.Module
    scheduler: LambdaLR
    private: PrivateTraining
    folder: RunFolder

    def save(self) -> None:
        """Write the checkpoint."""
        self.folder.save_checkpoint(
            {
                "format": FORMAT,
                "settings": dataclasses.asdict(self.settings),
                "run": self.private.state_dict(),
            }
        )


def prepare(settings: VisionSettings, *, resume: bool = False) -> VisionRun:
    """Data, model, engine and folder of a new run, or of one that goes on from its checkpoint.

    Raises:
        ValueError: for settings that cannot work, a folder that already holds a run, or a resumed
            run whose settings differ from the checkpoint's.
    """
    settings.validate()
    split = digits(
        image_size=settings.data.image_size,
        test_fraction=settings.data.test_fraction,
        seed=settings.data.split_seed,
    )
    size = len(split.train)
    settings = settings.resolved(size)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    scheme, strategy = settings.build_scheme(size), settings.build_strategy()
    strategy.bind(scheme.steps)  # impossible settings are found before anything is overwritten
    checkpoint: dict[str, Any] | None = None
    mechanism: dict[str, Any]
    if resume:
        checkpoint = load_checkpoint(settings.output)
        _check_resumable(checkpoint, settings)
        mechanism = {"mechanism": MatrixMechanism.from_dict(checkpoint["run"]["mechanism"])}
    else:
        RunFolder.claim(settings.output, overwrite=settings.overwrite)
        mechanism = {
            "scheme": scheme,
            "strategy": strategy,
            "target_epsilon": settings.privacy.epsilon,
            "noise_multiplier": settings.privacy.noise_multiplier,
        }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.model.seed)
        model = vgg(
            in_channels=split.channels,
            classes=split.classes,
            image_size=settings.data.image_size,
            channels=settings.model.channels,
            groups=settings.model.groups,
            hidden=settings.model.hidden,
        )
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.optimizer.lr, momentum=settings.optimizer.momentum
    )
    scheduler = LambdaLR(optimizer, Schedule(settings.optimizer.schedule, scheme.steps))
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss() if settings.grad_sample_mode == "ghost" else None,
        dataset=split.train,
        target_delta=settings.privacy.delta,
        max_grad_norm=settings.privacy.max_grad_norm,
        grad_sample_mode=settings.grad_sample_mode,
        max_physical_batch_size=settings.max_physical_batch_size,
        lr_scheduler=scheduler,
        seed=settings.seed,
        secure=settings.privacy.secure,
        noise_dtype=NOISE_DTYPES[settings.privacy.noise_dtype],
        regenerate_noise=settings.privacy.regenerate_noise,
        ledger=RunFolder.ledger_path(settings.output),
        **mechanism,
    )
    if checkpoint is not None:
        private.load_state_dict(checkpoint["run"])
    folder = RunFolder(
        settings.output,
        completed_steps=private.steps_executed,
        config=None if resume else to_yaml(settings),
    )
    return VisionRun(settings, split, model, scheduler, private, folder)


def finish(current: VisionRun) -> None:
    """Train the steps that are left, evaluate, and write the run folder.

    After an interruption ``private.steps_executed`` is below the plan, and only the checkpoint and
    the metrics are there.
    """
    try:
        if current.private.steps_executed == 0:
            current.save()  # the calibrated mechanism is worth keeping from the start
        complete = train(
            current.private,
            model=current.model,
            scheduler=current.scheduler,
            test=current.split.test,
            folder=current.folder,
            evaluate_every=current.settings.evaluate_every,
            checkpoint_every=current.settings.checkpoint_every,
            save=current.save,
        )
        if complete:
            _report(current)
    finally:
        current.folder.close()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Factor of the learning rate after ``step`` of ``steps`` steps: a public function."""

    name: str
    steps: int

    def __call__(self, step: int) -> float:
        """1 for constant; falling towards 0 for linear and cosine."""
        done = min(1.0, step / self.steps)
        if self.name == "linear":
            return 1 - done
        if self.name == "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        return 1.0


def _check_resumable(checkpoint: dict[str, Any], settings: VisionSettings) -> None:
    if checkpoint.get("format") != FORMAT:
        raise ValueError(f"checkpoint format {checkpoint.get('format')!r} is not {FORMAT}")
    changed = differences(checkpoint["settings"], dataclasses.asdict(settings))
    lines = [
        f"{name}: the run has {old!r}, now {new!r}"
        for name, (old, new) in changed.items()
        if name not in FREE_ON_RESUME
    ]
    if lines:
        raise ValueError(
            "a resumed run must keep its settings; put these back or start a new run: "
            + "; ".join(lines)
        )


def _report(current: VisionRun) -> None:
    guarantee = current.private.guarantee()
    path = current.folder.path
    curve = None
    if current.settings.plots:
        # A single simulation or computation gives all points; beyond twice ε nobody looks.
        points = np.linspace(0, 2 * guarantee.epsilon, 81)
        curve = as_shown(profile(current.private.mechanism, points), guarantee)
        plot_privacy(curve, guarantee, path / "privacy.png")
        plot_curves(current.folder.metrics(), path / "curves.png")
    privacy_report(guarantee, path, profile=curve)


def summary(current: VisionRun) -> str:
    """What the user reads at the end."""
    folder, guarantee = current.folder.path, current.private.guarantee()
    result = evaluate(current.model, current.split.test)
    lines = [
        f"test accuracy {result['accuracy']:.4f} on {len(current.split.test)} held-out images",
        "",
        str(guarantee),
        "",
        f"everything is in {folder}: privacy_report.md is the statement to publish with the model; "
        "checkpoint.pt, ledger.jsonl and the training metrics are private",
    ]
    if current.private.nonfinite_examples:
        lines.append(
            f"not for release: {current.private.nonfinite_examples} gradients were NaN or infinite "
            "and were left out"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.vision", description="Train an image classifier privately."
    )
    parser.add_argument("--config", required=True, help="YAML file, e.g. configs/*.yaml")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--output", help="run folder (the field output)")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="e.g. steps=100")
    arguments = parser.parse_intermixed_args(argv)
    overrides = list(arguments.overrides)
    try:
        settings = load_config(VisionSettings, arguments.config, overrides)
        if arguments.output is not None:
            settings.output = arguments.output
        current = prepare(settings, resume=arguments.resume)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finish(current)
    if current.private.steps_executed < current.private.mechanism.steps:
        print(
            f"stopped after {current.private.steps_executed} of {current.private.mechanism.steps} "
            "steps; continue with the same command and --resume",
            file=sys.stderr,
        )
        return INTERRUPTED
    print(summary(current))
    return 0


if __name__ == "__main__":
    sys.exit(main())
