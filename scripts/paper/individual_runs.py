"""Filtered runs of the digits recipe at multiples of its clipping norm, as values."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np

from dptrain.reporting import GroupRow, GroupTable, IndividualReport
from recipes.config import load_config
from recipes.individual import IndividualSettings, main
from recipes.individual_outputs import OVER_STEPS, REPORT, REPORT_BEFORE
from recipes.runfolder import INDIVIDUAL, METRICS, read_metrics

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "digits_individual.yaml"


@dataclasses.dataclass(frozen=True, eq=False)
class Filtered:
    """One run.

    Attributes:
        auc: macro AUC on the test rows, by epoch.
        before: what each image had spent after T0 epochs.
        end: the same at the end.
        tables: of the groups, by epoch, with mean training losses.
        test_losses: of the groups, by epoch.
    """

    auc: Mapping[int, float]
    before: IndividualReport
    end: IndividualReport
    tables: Mapping[int, GroupTable]
    test_losses: Mapping[int, Mapping[str, float]]


def settings_of(overrides: Sequence[str] = ()) -> IndividualSettings:
    """The settings of the runs."""
    return load_config(IndividualSettings, CONFIG, overrides)


def filtered_run(overrides: Sequence[str]) -> Filtered:
    """Run the recipe in a temporary folder.

    Raises:
        RuntimeError: with what it said, if it fails.
    """
    with tempfile.TemporaryDirectory() as name:
        output, said = pathlib.Path(name) / "run", io.StringIO()
        arguments = ["--config", str(CONFIG), "--output", str(output), "plots=false"]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = main([*arguments, *overrides])
        if status:
            raise RuntimeError(f"the recipe stopped with status {status}:\n{said.getvalue()}")
        private = output / INDIVIDUAL
        before, end = (IndividualReport.load(private / part) for part in (REPORT_BEFORE, REPORT))
        with (private / OVER_STEPS).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
        metrics = read_metrics(output / METRICS)
    steps = sorted({int(row["steps"]) for row in rows})
    chosen = {step: [row for row in rows if int(row["steps"]) == step] for step in steps}
    return Filtered(
        auc={r["step"]: r["macro_auc"] for r in metrics if r["split"] == "test" and r["step"]},
        before=before,
        end=end,
        tables={step: GroupTable(delta=end.delta, rows=_rows(chosen[step])) for step in steps},
        test_losses={
            step: {row["group"]: float(row["test_loss"]) for row in chosen[step]} for step in steps
        },
    )


def _rows(found: Sequence[Mapping[str, str]]) -> tuple[GroupRow, ...]:
    return tuple(
        GroupRow(
            group=row["group"],
            size=int(row["size"]),
            mean_epsilon=float(row["mean_epsilon"]),
            share_active=float(row["share_active"]),
            mean_loss=float(row["train_loss"]),
        )
        for row in found
    )


def mean_table(tables: Sequence[GroupTable]) -> GroupTable:
    """Means of the numbers of the same groups in several runs."""

    def row(same: tuple[GroupRow, ...]) -> GroupRow:
        def mean(name: str) -> float:
            return float(np.mean([getattr(one, name) for one in same]))

        return dataclasses.replace(
            same[0],
            mean_epsilon=mean("mean_epsilon"),
            share_active=mean("share_active"),
            mean_loss=mean("mean_loss"),
        )

    rows = zip(*(table.rows for table in tables), strict=True)
    return GroupTable(delta=tables[0].delta, rows=tuple(row(same) for same in rows))


def mean_losses(losses: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of the losses of the same groups in several runs."""
    return {group: float(np.mean([one[group] for one in losses])) for group in losses[0]}
