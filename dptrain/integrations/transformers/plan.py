"""From epochs and batch sizes of ``TrainingArguments`` to the steps and batches of a scheme."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from dptrain.configuration import build_scheme, build_strategy, steps_of_epoch
from dptrain.core import named_error
from dptrain.integrations.transformers.arguments import PrivacyArguments
from dptrain.sampling import AttributionGraph, Scheme
from dptrain.strategies import Strategy


class TrainerPlan(NamedTuple):
    """The plan of a run.

    Attributes:
        scheme: with the steps.
        strategy: bound to them.
        whole_epoch: logical steps in which an epoch's worth of rows is expected.
        parts: most examples in memory at once, on each process.
    """

    scheme: Scheme
    strategy: Strategy
    whole_epoch: int
    parts: int

    @property
    def steps(self) -> int:
        """Number n of logical steps."""
        return self.scheme.steps

    @property
    def steps_per_epoch(self) -> int:
        """Number of logical steps that the trainer calls an epoch."""
        return min(self.whole_epoch, self.steps)

    @property
    def epochs(self) -> int:
        """Epochs, the last of which may end early."""
        return math.ceil(self.steps / self.steps_per_epoch)


def plan_of(
    privacy: PrivacyArguments,
    *,
    dataset_size: int,
    graph: AttributionGraph | None,
    part: int,
    batch_size: int,
    epochs: float,
    max_steps: int,
) -> TrainerPlan:
    """The plan that training arguments ask for.

    Args:
        dataset_size: N.
        graph: users of the examples, if they have any.
        part: ``per_device_train_batch_size``.
        batch_size: expected examples (users, with ``PerUser``) of a step over all processes.
        epochs: ``num_train_epochs``; not used where ``max_steps`` is positive.
    """
    strategy = privacy.strategy
    if not isinstance(strategy, Strategy):
        assert isinstance(strategy, dict)
        strategy = build_strategy(strategy)
    stated = privacy.scheme
    if isinstance(stated, Scheme):
        if graph is not None:
            raise ValueError(
                f"user_column={privacy.user_column!r} with a finished scheme, whose attribution "
                "graph already names the users: leave user_column out, or give the scheme by name"
            )
        if 0 < max_steps != stated.steps:
            raise ValueError(
                f"max_steps={max_steps} and scheme= with {stated.steps} steps: the guarantee holds "
                "for the steps of the scheme, so leave max_steps out, or make the scheme with as "
                "many steps"
            )
        scheme, counted = stated, _counted(stated, dataset_size)
        return TrainerPlan(
            scheme,
            strategy.bind(scheme.steps),
            max(1, math.ceil(counted / scheme.expected_batch_size)),
            part,
        )
    assert isinstance(stated, dict)
    if named := {"batch_size", "epoch_length"} & set(stated):
        raise ValueError(
            f"scheme: {sorted(named)} conflicts with TrainingArguments, which fixes the expected "
            "batch size as per_device_train_batch_size × gradient_accumulation_steps × processes: "
            "leave it out"
        )
    settings: dict[str, Any] = {**stated, "batch_size": batch_size}
    of_users = graph is not None and "group_size" in stated
    whole = steps_of_epoch(settings, dataset_size=dataset_size, graph=graph)
    counted = graph.users if graph is not None and of_users else dataset_size
    per_epoch = whole or max(1, math.ceil(counted / batch_size))
    steps = max_steps if max_steps > 0 else math.ceil(epochs * per_epoch)
    if steps < 1:
        raise ValueError(f"num_train_epochs={epochs} gives no step: must be a positive number")
    try:
        scheme = build_scheme(settings, dataset_size=dataset_size, steps=steps, graph=graph)
    except ValueError as error:
        raise ValueError(
            f"per_device_train_batch_size × gradient_accumulation_steps × processes = {batch_size} "
            f"of {dataset_size} rows: {error}"
        ) from error
    return TrainerPlan(scheme, strategy.bind(scheme.steps), per_epoch, part)


def _counted(scheme: Scheme, dataset_size: int) -> int:
    """Number of examples of an epoch, or of users where batches count those."""
    graph = getattr(scheme, "graph", None)
    return graph.users if scheme.group_size is not None and graph is not None else dataset_size


def graph_of(dataset: Any, column: str) -> AttributionGraph:
    """The users of a column, one or a list of them in each row."""
    rows = [_listed(value) for value in _values(dataset, column)]
    kinds = {type(user).__name__ for users in rows for user in users}
    if len(kinds) > 1:
        raise ValueError(
            f"user_column={column!r} has users of the types {', '.join(sorted(kinds))}: one person "
            "written in two ways, as 1 and '1', would count as two. Write all users as text, or "
            "all as integers"
        )
    for number, users in enumerate(rows):
        for user in users:
            if not isinstance(user, str | bytes | int) or isinstance(user, bool):
                raise ValueError(
                    f"user_column={column!r}: row {number} has a {type(user).__name__} as its "
                    "user: must be a text or an integer"
                )
            if isinstance(user, str | bytes) and not user.strip():
                raise ValueError(
                    f"user_column={column!r}: row {number} has an empty text as its user, and all "
                    "such rows would count as one user's: name the user, or leave the row out"
                )
    return AttributionGraph.from_lists(rows)


def _listed(value: Any) -> list[Any]:
    """The users of a row as Python's own values, one or several."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, Iterable) and not isinstance(plain, str | bytes):
        return [each.item() if hasattr(each, "item") else each for each in plain]
    return [plain]


def _values(dataset: Any, column: str) -> Iterable[Any]:
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list):
        if column not in names:
            raise ValueError(f"user_column={column!r}: must be one of the columns {sorted(names)}")
        return dataset[column]
    try:
        return [dataset[row][column] for row in range(len(dataset))]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"user_column={column!r}: the rows of {type(dataset).__name__} have no such field "
            f"({named_error(error)})"
        ) from error


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
