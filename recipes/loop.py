"""The training loop of a classifier: the user's usual loop, with metrics and interruptions."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from dptrain import PrivateTraining
from recipes.runfolder import RunFolder

SMOOTHING = 0.9  # of what the progress bar shows


class Interruption:
    """Turns the first Ctrl-C into a request to stop after the step that is under way.

    Stopping between steps keeps the checkpoint whole. A second Ctrl-C stops at once.
    """

    requested = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        tqdm.write("stopping after this step (Ctrl-C again stops at once, without a checkpoint)")


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Dataset[Any]) -> dict[str, float]:
    """Mean loss and accuracy of ``model`` on ``dataset``, in evaluation mode."""
    was_training = model.training
    model.eval()
    loss = correct = count = 0.0
    for x, y in DataLoader(dataset, batch_size=256):
        logits = model(x)
        loss += cross_entropy(logits, y, reduction="sum").item()
        correct += (logits.argmax(1) == y).sum().item()
        count += len(y)
    model.train(was_training)
    return {"loss": loss / count, "accuracy": correct / count}


def train(
    private: PrivateTraining,
    *,
    model: nn.Module,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    test: Dataset[Any],
    folder: RunFolder,
    evaluate_every: int,
    checkpoint_every: int,
    save: Callable[[], None],
) -> bool:
    """Run the steps that are left; returns whether the plan was completed.

    Metrics are recorded under the number of completed steps. Those of the training batches are
    computed on raw examples: they are for the trainer and not for release.

    Args:
        private: the run.
        model: the user's module inside it, for evaluation.
        scheduler: of the learning rate, registered with the run.
        test: held-out examples.
        folder: where metrics go.
        evaluate_every, checkpoint_every: in logical steps.
        save: writes a checkpoint.
    """
    module, optimizer, loader, *ghost = private
    criterion = ghost[0] if ghost else nn.CrossEntropyLoss()
    steps, saved_at = private.mechanism.steps, private.steps_executed
    if saved_at == steps:
        return True
    total, correct, count = 0.0, 0.0, 0.0
    shown: dict[str, float] = {}
    module.train()
    with (
        Interruption() as interruption,
        tqdm(total=steps, initial=saved_at, desc="train", unit="step") as bar,
    ):
        for x, y in loader:
            batch = loader.current
            optimizer.zero_grad()
            logits = module(x)
            criterion(logits, y).backward()
            optimizer.step()
            scheduler.step()  # ticks once a logical step: it is registered with the run

            weights = torch.from_numpy(batch.weights)  # 0 for the padding row of an empty batch
            with torch.no_grad():
                losses = cross_entropy(logits.detach(), y, reduction="none")
                total += float((losses * weights).sum())
                correct += float(((logits.argmax(1) == y) * weights).sum())
                count += float(weights.sum())
            if not batch.last:
                continue

            step = private.steps_executed
            if count:
                record = {"loss": total / count, "accuracy": correct / count}
                folder.log({"step": step, "split": "train", **record}, private=True)
                for name, value in record.items():
                    old = shown.get(name, value)
                    shown[name] = SMOOTHING * old + (1 - SMOOTHING) * value
            total, correct, count = 0.0, 0.0, 0.0
            if step % evaluate_every == 0 or step == steps:
                result = evaluate(model, test)
                folder.log({"step": step, "split": "test", **result}, private=False)
                shown["test"] = result["accuracy"]
            bar.update()
            bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items()})
            if step % checkpoint_every == 0 or step == steps or interruption.requested:
                save()
            if interruption.requested and step < steps:
                return False
    return True
