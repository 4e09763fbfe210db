"""Spending and losses of examples and groups during a filtered run; not for release."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from dptrain import PrivateTraining
from dptrain.individual import IndividualFilter
from dptrain.reporting import GroupRow, GroupTable, IndividualReport
from recipes.group_losses import group_losses
from recipes.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """The task's groups after some step.

    Attributes:
        table: mean ε, share of active examples and mean training loss of each.
        test_losses: mean loss of each group's held-out examples.
    """

    table: GroupTable
    test_losses: dict[str, float]


class IndividualHistory:
    """Looks at a run's record and at its groups each time the run is evaluated.

    It is kept in the checkpoint, so that a resumed run's has no gap. Nothing of it is logged.

    Args:
        private: a run with an individual filter.
        individual: the filter.
        task: the problem, with groups or without.

    Attributes:
        start: T0, the number of steps in which everybody can take part; the filter comes after it.
        moments: by the number of steps that had run.
        before: what each example had spent after T0 steps, if the run got there.
    """

    def __init__(self, private: PrivateTraining, individual: IndividualFilter, task: Task) -> None:
        self._private = private
        self._task = task
        self.start = individual.full_norm_steps(private.mechanism)
        self.moments: dict[int, Moment] = {}
        self.before: IndividualReport | None = None

    def observe(self, *, evaluated: bool) -> None:
        """Look, if there is something to see after this step.

        Args:
            evaluated: whether the model has just been evaluated; T0 is not left out otherwise.
        """
        step = self._private.steps_executed
        at_start = step == self.start
        if not at_start and not (evaluated and self._task.train_groups):
            return
        report = self.report()
        if at_start:
            self.before = report
        if self._task.train_groups:
            self.moments[step] = _moment(report, self._task)

    def report(self) -> IndividualReport:
        """The spending of each example so far."""
        return IndividualReport.of(self._private)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors; private data."""
        return {
            "moments": {
                step: {
                    "delta": moment.table.delta,
                    "rows": [dataclasses.asdict(row) for row in moment.table.rows],
                    "test_losses": moment.test_losses,
                }
                for step, moment in self.moments.items()
            },
            "before": None
            if self.before is None
            else {
                "epsilon": torch.from_numpy(self.before.epsilon.copy()),
                "active": torch.from_numpy(self.before.active.copy()),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved history; the run has been loaded already."""
        self.moments = {
            step: Moment(
                table=GroupTable(
                    delta=saved["delta"], rows=tuple(GroupRow(**row) for row in saved["rows"])
                ),
                test_losses=dict(saved["test_losses"]),
            )
            for step, saved in state["moments"].items()
        }
        before = state["before"]
        self.before = None
        if before is not None:
            now = self.report()
            self.before = dataclasses.replace(
                now,
                epsilon=before["epsilon"].numpy().astype(np.float64),
                active=before["active"].numpy(),
                active_counts=now.active_counts[: self.start],
            )


def _moment(report: IndividualReport, task: Task) -> Moment:
    losses = group_losses(task)
    table = report.by_group(task.train_groups)
    rows = (dataclasses.replace(row, mean_loss=losses.train[row.group]) for row in table.rows)
    return Moment(
        table=dataclasses.replace(table, rows=tuple(rows)),
        test_losses=losses.test,
    )
