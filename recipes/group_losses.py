"""Mean losses of groups of examples: how private training treats the parts of a data set."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils.data import Subset

from recipes.data.multilabel import Groups
from recipes.task import Task, measure


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupLosses:
    """Mean losses by group.

    Attributes:
        train: of training examples; computed on raw examples, so not for release.
        test: of held-out examples.
    """

    train: dict[str, float]
    test: dict[str, float]


def group_losses(task: Task) -> GroupLosses:
    """The mean losses of the task's groups, at the model as it stands."""
    return GroupLosses(
        train=_means(task, task.train, task.train_groups),
        test=_means(task, task.test, task.test_groups),
    )


def _means(task: Task, examples: Any, groups: Groups) -> dict[str, float]:
    rows = torch.cat(list(groups.values()))
    losses = measure(task, Subset(examples, rows.tolist())).metrics["loss"]
    parts = losses.split([len(members) for members in groups.values()])
    return {name: float(part.mean()) for name, part in zip(groups, parts, strict=True)}
