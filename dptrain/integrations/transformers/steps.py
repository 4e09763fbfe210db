"""What the trainer takes for batches: a mark for each logical step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset


class LogicalStep(NamedTuple):
    """A step of an epoch; its examples are taken from the private loader when it is trained on."""

    number: int


class _Steps(Dataset[LogicalStep]):
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, number: int) -> LogicalStep:
        return LogicalStep(number)


def _first(steps: list[LogicalStep]) -> LogicalStep:
    return steps[0]


def steps_loader(steps: int) -> DataLoader[Any]:
    """A data loader that the trainer counts by, skips in and draws no random number for."""
    generator = torch.Generator()
    return DataLoader(_Steps(steps), batch_size=1, collate_fn=_first, generator=generator)


class RowByRow(Dataset[Any]):
    """A data set of which every row is read by itself, so that a transform sees no other."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> Any:
        return self._dataset[row]
