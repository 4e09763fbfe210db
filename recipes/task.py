"""The parts of a recipe: data, model, and the losses of a batch."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm

from dptrain.core import Guarantee
from dptrain.reporting import write_weights
from dptrain.sampling import AttributionGraph, BoundedGraph
from recipes.data.multilabel import Groups
from recipes.runfolder import WEIGHTS

TEST, HELD_OUT = "test", "held-out"  # what a task is evaluated on
_SEED = 0  # of whatever an evaluation draws (masked tokens): every evaluation sees the same


AT_RANDOM = "none, they began at random"  # of public weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """The form in which the trained model leaves the run.

    Attributes:
        name: of the file or folder in the run's folder, ``WEIGHTS`` or ``MODEL``.
        write: writes the module there; the guarantee is ``None`` while it is being worked out.
        how: how it is read back, for the user.
    """

    name: str
    write: Callable[[nn.Module, pathlib.Path, Guarantee | None], None]
    how: str


def save_weights(module: nn.Module, path: pathlib.Path, guarantee: Guarantee | None = None) -> None:
    """The module's weights as safetensors, of which reading executes no code."""
    write_weights(module, path, guarantee=guarantee)


STATE_DICT = Export(
    name=WEIGHTS, write=save_weights, how="read it by safetensors.torch.load_model(model, path)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A learning problem.

    Attributes:
        train: map-style training set; its length is N.
        test: held-out examples, map-style.
        model: the module to train.
        forward: from the module and a batch to its outputs.
        metrics: from outputs and batch to one value per example each, shape (examples,): ``loss``,
            whose mean is minimized, and whatever else is worth watching. A loss must be a function
            of its own example alone.
        summaries: from the outputs and targets of all test examples, joined along their first axis
            on the CPU, to numbers that are no means over examples, such as areas under the ROC
            curve. Needs ``target``; ``None`` if there are none.
        collate_fn: makes a batch of samples; torch's default if ``None``.
        graph: users of the training examples, ``None`` if there is one example a user.
        bounded: the contribution bounding that made ``graph``, whose statistics are worth seeing.
        views: augmented views of an example in a training batch, in consecutive rows.
        autocast: dtype that the model's products are rounded to; ``None`` leaves them alone.
        target: of a batch, what ``summaries`` compares the outputs with; ``None`` without them.
        export: how the trained model is saved.
        examples: what the test examples are called.
        evaluated_on: ``TEST``, or ``HELD_OUT`` if ``test`` is a part that was taken out of the
            training data, which is private as they are.
        train_groups, test_groups: groups of training and test examples to compare, by the same
            names; empty if there are none. Who is in a training group is private.
        notes: remarks about the data, for the trainer.
        data: what the data set is called, for the statement; ``None`` if nobody says.
        public_data: what else was learned from, and counts as public, for the statement.
        public_weights: what weights training begins with, for the statement.
    """

    train: Any
    test: Any
    model: nn.Module
    forward: Callable[[nn.Module, Any], Any]
    metrics: Callable[[Any, Any], dict[str, torch.Tensor]]
    summaries: Callable[[torch.Tensor, torch.Tensor], dict[str, float]] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    graph: AttributionGraph | None = None
    bounded: BoundedGraph | None = None
    views: int = 1
    autocast: torch.dtype | None = None
    target: Callable[[Any], torch.Tensor] | None = None
    export: Export = STATE_DICT
    examples: str = "examples"
    evaluated_on: str = TEST
    train_groups: Groups = dataclasses.field(default_factory=dict)
    test_groups: Groups = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    data: str | None = None
    public_data: str = "nothing was learned from any"
    public_weights: str = AT_RANDOM

    def __post_init__(self) -> None:
        if self.summaries is not None and self.target is None:
            raise ValueError("summaries without target: say what the outputs are compared with")
        if list(self.train_groups) != list(self.test_groups):
            raise ValueError(
                f"train_groups {list(self.train_groups)} and test_groups {list(self.test_groups)}: "
                "give both the same names in one order"
            )

    def outputs(self, module: nn.Module, batch: Any) -> Any:
        """The result of ``forward`` for a batch on the module's device.

        Half precision becomes float32 again, in which losses and metrics are computed.
        """
        device = next(module.parameters()).device.type
        with torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None):
            found = self.forward(module, batch)
        if isinstance(found, torch.Tensor) and found.dtype == self.autocast:
            return found.float()
        return found


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Measured:
    """Results of a model on examples.

    Attributes:
        metrics: the task's, float64 of shape (examples,) each, on the CPU.
        outputs, targets: what the task's summaries are made of; ``None`` if it has none.
    """

    metrics: dict[str, torch.Tensor]
    outputs: torch.Tensor | None
    targets: torch.Tensor | None


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [to_device(value, device) for value in batch]
    return batch


def evenly_spread(count: int, limit: int | None) -> list[int] | None:
    """``limit`` of ``count`` rows at equal distances; ``None`` where there are no more."""
    if limit is None or limit >= count:
        return None
    return [number * count // limit for number in range(limit)]


@torch.no_grad()
def measure(task: Task, examples: Any) -> Measured:
    """The task's metrics for each of ``examples``, with the model in evaluation mode.

    What is computed on training examples is not covered by the guarantee.

    Args:
        task: the problem.
        examples: map-style, such as its test set or a part of it; at least one.
    """
    device = next(task.model.parameters()).device
    was_training = task.model.training
    task.model.eval()
    metrics: dict[str, list[torch.Tensor]] = {}
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    loader = DataLoader(examples, batch_size=256, collate_fn=task.collate_fn)
    # The generators are put back: an evaluation must not change how training goes on.
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        for batch in tqdm(loader, desc="evaluate", unit="batch", delay=2, leave=False):
            batch = to_device(batch, device)
            outputs = task.outputs(task.model, batch)
            for name, value in task.metrics(outputs, batch).items():
                metrics.setdefault(name, []).append(value.double().cpu())
            if task.summaries is not None:
                assert task.target is not None
                pairs.append((outputs.cpu(), task.target(batch).cpu()))
    task.model.train(was_training)
    return Measured(
        metrics={name: torch.cat(values) for name, values in metrics.items()},
        outputs=torch.cat([outputs for outputs, _ in pairs]) if pairs else None,
        targets=torch.cat([targets for _, targets in pairs]) if pairs else None,
    )


def evaluate(task: Task, *, limit: int | None = None) -> dict[str, float]:
    """Means of the task's metrics over its test set, and its summaries.

    Args:
        task: the problem.
        limit: use so many examples only, spread evenly as the set may be sorted by class.
    """
    rows = evenly_spread(len(task.test), limit)
    found = measure(task, task.test if rows is None else Subset(task.test, rows))
    means = {name: float(values.mean()) for name, values in found.metrics.items()}
    if task.summaries is None:
        return means
    assert found.outputs is not None
    assert found.targets is not None
    return means | task.summaries(found.outputs, found.targets)
