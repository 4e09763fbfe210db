"""The private part of a filtered run's folder: who has spent what, and how groups fare."""

from __future__ import annotations

import csv
import io
import pathlib
from typing import Any

from dptrain.reporting import MARK, WARNING, in_place, plot_active, plot_histogram
from recipes.individual_history import IndividualHistory
from recipes.individual_plots import plot_groups
from recipes.runfolder import INDIVIDUAL, remove

_SUFFIX = "_NOT_FOR_RELEASE"
REPORT, REPORT_BEFORE, GROUPS, GROUPS_BEFORE, OVER_STEPS = (
    f"{name}{_SUFFIX}.csv"
    for name in (
        "individual_privacy",
        "individual_privacy_before_filtering",
        "groups",
        "groups_before_filtering",
        "groups_over_steps",
    )
)
COLUMNS = (
    "steps",
    "group",
    "size",
    "mean_epsilon",
    "share_active",
    "train_loss",
    "test_loss",
    "note",
)


def write_individual(
    history: IndividualHistory, folder: pathlib.Path, *, steps: int, plots: bool
) -> pathlib.Path:
    """Write everything to a folder of its own, in place of what an earlier report left there.

    Folder and files are readable by their owner only, and each is marked as not for release.

    Args:
        history: of a run that is complete.
        folder: of the run.
        steps: that have run.
        plots: whether to draw as well.

    Returns:
        The folder.
    """
    path = folder / INDIVIDUAL
    remove(path)
    path.mkdir(mode=0o700)
    end, before = history.report(), history.before
    if steps not in history.moments:  # asked for after the last step
        history.observe(evaluated=True)
    end.save(path / REPORT)
    spent = {f"after {steps} steps": end.epsilon}
    if before is not None and history.start < steps:
        before.save(path / REPORT_BEFORE)
        spent = {f"after {history.start} steps, before filtering": before.epsilon, **spent}
    _write_groups(history, path, steps)
    if not plots:
        return path
    plot_histogram(spent, _plot(path, "histogram"), delta=end.delta, bound=end.bound)
    started = history.start < steps
    plot_active(
        {"this run": end.active_counts},
        _plot(path, "active"),
        size=end.size,
        start=history.start if started else None,
    )
    if history.moments:
        _draw_groups(history, path, steps, end.bound)
    return path


def _write_groups(history: IndividualHistory, path: pathlib.Path, steps: int) -> None:
    """The tables at T0 and at the end, and one line a group and moment."""
    if not history.moments:
        return
    history.moments[steps].table.save(path / GROUPS)
    if history.start in history.moments and history.start < steps:
        history.moments[history.start].table.save(path / GROUPS_BEFORE)
    text = io.StringIO()
    text.write(f"# {WARNING}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for step, moment in sorted(history.moments.items()):
        for row in moment.table.rows:
            numbers = (row.mean_epsilon, row.share_active, row.mean_loss)
            loss = moment.test_losses[row.group]
            writer.writerow([step, row.group, row.size, *map(repr, numbers), repr(loss), MARK])
    with in_place(path / OVER_STEPS) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8", newline="")


def _draw_groups(
    history: IndividualHistory, path: pathlib.Path, steps: int, bound: float | None
) -> None:
    """Lines over the steps; bars before filtering began and at the end."""
    ends = {f"after {steps} steps": steps}
    if history.start in history.moments and history.start < steps:
        ends = {f"after {history.start} steps, before filtering": history.start, **ends}
    chosen: tuple[tuple[str, dict[Any, int]], ...] = (
        ("groups", ends),
        ("groups_over_steps", {step: step for step in sorted(history.moments)}),
    )
    for name, keys in chosen:
        plot_groups(
            {key: history.moments[step].table for key, step in keys.items()},
            _plot(path, name),
            losses={
                "mean test loss": {
                    key: history.moments[step].test_losses for key, step in keys.items()
                }
            },
            bound=bound,
        )


def _plot(path: pathlib.Path, name: str) -> pathlib.Path:
    return path / f"{name}{_SUFFIX}.png"
