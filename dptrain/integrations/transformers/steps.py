"""The batches that the trainer goes through: a mark for each logical step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset


class LogicalStep(NamedTuple):
    """A step of an epoch; its examples are taken from the private loader when it is trained on."""

    number: int


def _first(steps: list[LogicalStep]) -> LogicalStep:
    return steps[0]


def steps_loader(steps: int) -> DataLoader[Any]:
    """A data loader that the trainer counts by, skips in and draws no random number for."""
    marks: Any = [LogicalStep(number) for number in range(steps)]
    return DataLoader(marks, batch_size=1, collate_fn=_first, generator=torch.Generator())


class RowByRow(Dataset[Any]):
    """A data set of which every row is read by itself, so that a transform sees no other."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> Any:
        return self._dataset[row]
