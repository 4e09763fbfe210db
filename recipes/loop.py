"""The training loop: the user's usual loop, with metrics and interruptions."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import torch
from tqdm import tqdm

from dptrain import PrivateTraining
from recipes.average import Average
from recipes.debug_norms import DebugNorms
from recipes.divergence import Divergence
from recipes.individual_history import IndividualHistory
from recipes.runfolder import RunFolder
from recipes.settings import RunSettings
from recipes.task import TEST, Task, evaluate, to_device

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


class Means:
    """Weighted means of the metrics of one logical step."""

    def __init__(self) -> None:
        self.count = 0.0
        self._totals: dict[str, float] = {}

    def add(self, values: dict[str, torch.Tensor], weights: torch.Tensor) -> None:
        """Count a microbatch; padding rows have weight 0."""
        for name, value in values.items():
            counted = torch.where(weights > 0, value.detach() * weights, 0.0)
            self._totals[name] = self._totals.get(name, 0.0) + float(counted.sum())
        self.count += float(weights.sum())

    def values(self) -> dict[str, float]:
        """The means, if anything was counted."""
        return {name: total / self.count for name, total in self._totals.items()}


def train(
    private: PrivateTraining,
    *,
    task: Task,
    outcome: Task,
    settings: RunSettings,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    folder: RunFolder,
    save: Callable[[], None],
    average: Average | None = None,
    history: IndividualHistory | None = None,
    covered: bool = True,
) -> bool:
    """Run the steps that are left; returns whether the plan was completed.

    Metrics are recorded under the number of completed steps. Those of the training batches are
    computed on raw examples: they are for the trainer and not for release.

    Args:
        private: the run.
        task: the problem that it learns.
        outcome: the same with the model that is evaluated: that of ``average``, if there is one.
        settings: how often to evaluate and to save.
        scheduler: of the learning rate, registered with the run.
        folder: where metrics go.
        save: writes a checkpoint.
        average: takes in what each step released.
        history: looks at what examples have spent after each evaluation; not for release.
        covered: whether the run is private; a simulation is not, and has no ε to show.
    """
    module, optimizer, loader = private
    device = next(module.parameters()).device
    steps, saved_at = private.mechanism.steps, private.steps_executed
    if saved_at == steps:
        return True
    means, norms = Means(), DebugNorms()
    shown: dict[str, float] = {}
    split = task.evaluated_on
    before = folder.metrics()
    if saved_at == 0 and not before:  # a run that was killed early has it already
        start = evaluate(outcome, limit=settings.evaluate_examples)
        before = [{"step": 0, "split": split, **start}]
        folder.log(before[0], private=split != TEST)
    divergence = _divergence(private, settings, before)
    standing = str(private.so_far()) if covered else "not private"
    module.train()
    with (
        Interruption() as interruption,
        tqdm(total=steps, initial=saved_at, desc="train", unit="step") as bar,
    ):
        for raw in loader:
            part = loader.current
            batch = to_device(raw, device)
            optimizer.zero_grad()
            outputs = task.outputs(module, batch)
            values = task.metrics(outputs, batch)
            values["loss"].mean().backward()
            optimizer.step()
            scheduler.step()  # ticks once a logical step: it is registered with the run
            weights = torch.from_numpy(part.weights)
            means.add(values, weights.to(device))
            if settings.debug_norms:
                norms.add(private.last_norms, weights)
            if not part.last:
                continue

            step = private.steps_executed
            if average is not None:
                average.update(task.model)
            divergence.released(step, (p.grad for p in module.parameters() if p.requires_grad))
            if means.count:
                record = means.values()
                debug = norms.values(optimizer.max_grad_norm)
                folder.log({"step": step, "split": "train", **record, **debug}, private=True)
                for name, value in record.items():
                    old = shown.get(name, value)
                    shown[name] = SMOOTHING * old + (1 - SMOOTHING) * value
            means, norms = Means(), DebugNorms()
            evaluated = step % settings.evaluate_every == 0 or step == steps
            if evaluated:
                limit = None if step == steps else settings.evaluate_examples
                result = evaluate(outcome, limit=limit)
                folder.log({"step": step, "split": split, **result}, private=split != TEST)
                divergence.tested(step, result["loss"])
                shown |= {f"{split} {name}": value for name, value in result.items()}
                standing = str(private.so_far()) if covered else standing
            if history is not None:
                history.observe(evaluated=evaluated)
            bar.update()
            figures = (f"{name}={value:.3f}" for name, value in shown.items())
            bar.set_postfix_str(", ".join((*figures, standing)))
            if step % settings.checkpoint_every == 0 or step == steps or interruption.requested:
                save()
            if interruption.requested and step < steps:
                return False
    return True


def _divergence(
    private: PrivateTraining, settings: RunSettings, before: list[dict[str, Any]]
) -> Divergence:
    """Knows the loss before the first step, also in a run that goes on: its first record."""
    one_ball = settings.clipping["type"] == "Flat" and settings.optimizer.name != "scaled_adam"
    trained = sum(p.numel() for p in private.module.parameters() if p.requires_grad)
    return Divergence(
        private.mechanism,
        max_grad_norm=settings.privacy.max_grad_norm,
        parameters=trained if one_ball else None,
        start=before[0]["loss"] if before and before[0]["step"] == 0 else None,
    )
