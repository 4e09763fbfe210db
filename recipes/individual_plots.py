"""Plots of what groups of examples have spent, each marked as not for release."""

from __future__ import annotations

import math
import pathlib
import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

from dptrain.contrib.individual import (
    DECADES,
    bound_line,
    plain_ticks,
    private_figure,
    save_private_figure,
)
from dptrain.reporting import GroupTable

Label = int | str


def plot_groups(
    tables: Mapping[Label, GroupTable],
    path: str | pathlib.Path,
    *,
    losses: Mapping[str, Mapping[Label, Mapping[str, float]]] | None = None,
    bound: float | None = None,
) -> None:
    """Draw mean ε and mean losses of groups: lines over steps, or bars such as before and after.

    Args:
        tables: of ``IndividualReport.by_group``, by the number of steps that had run (lines) or
            by a text (bars). Losses of the tables get a panel.
        path: image file; its suffix chooses the format.
        losses: further panels by their title, such as ``"test loss"``: for every key of ``tables``
            the mean loss of each group.
        bound: ε that the run keeps for every example.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
        ValueError: if there is no table, or keys or groups differ.
    """
    panels = _panels(tables, losses or {})
    figure, axes = private_figure(len(panels))
    over_steps = all(isinstance(key, int | np.integer) for key in tables)
    for ax, (title, values) in zip(axes, panels.items(), strict=True):
        (_lines if over_steps else _bars)(ax, values)
        if bound is not None and ax is axes[-1]:
            bound_line(ax.axhline, bound)
        ax.set_ylabel(title)
    save_private_figure(figure, path, legend=axes[-1])


def _panels(
    tables: Mapping[Label, GroupTable], losses: Mapping[str, Mapping[Label, Mapping[str, float]]]
) -> dict[str, dict[Label, dict[str, float]]]:
    """The numbers to draw, by title, key and group; mean ε comes last."""
    if not tables:
        raise ValueError("tables={{}}: there is nothing to plot")
    groups = [row.group for row in next(iter(tables.values())).rows]
    panels: dict[str, dict[Label, dict[str, float]]] = {}
    for title, given in losses.items():
        if set(given) != set(tables):
            raise ValueError(
                f"losses[{title!r}] has the keys {sorted(map(str, given))}, but the tables have "
                f"{sorted(map(str, tables))}: must have the same keys"
            )
        panels[title] = {key: dict(given[key]) for key in tables}
    with_losses = [table.has_losses for table in tables.values()]
    if any(with_losses) and not all(with_losses):
        raise ValueError("tables: some have losses and some have none; give them to all or none")
    if all(with_losses):
        panels["mean training loss"] = {
            key: {row.group: row.mean_loss for row in table.rows if row.mean_loss is not None}
            for key, table in tables.items()
        }
    delta = next(iter(tables.values())).delta
    if any(table.delta != delta for table in tables.values()):
        raise ValueError(f"tables: not all have δ = {delta:g}; use the same δ for all")
    panels[f"mean individual ε at δ = {delta:g}"] = {
        key: {row.group: row.mean_epsilon for row in table.rows} for key, table in tables.items()
    }
    for title, values in panels.items():
        for key, found in values.items():
            if set(found) != set(groups):
                raise ValueError(
                    f"{title} of {key!r} is of groups {sorted(found)}, not {sorted(groups)}"
                )
            if wrong := [group for group in groups if not math.isfinite(found[group])]:
                raise ValueError(f"{title} of {key!r} is not finite for group {wrong[0]!r}")
            values[key] = {group: found[group] for group in groups}
    return panels


def _lines(ax: Any, values: dict[Label, dict[str, float]]) -> None:
    """A line a group over the steps."""
    steps = sorted(int(key) for key in values)
    for i, group in enumerate(next(iter(values.values()))):
        ax.plot(
            steps, [values[step][group] for step in steps],
            ("o", "s", "^", "D", "v", "P")[i % 6] + ("-", "--")[i // 10 % 2],
            color=f"C{i % 10}", markersize=4, linewidth=1.4, label=group,
        )  # fmt: skip
    found = np.array([v for row in values.values() for v in row.values()])
    if (found > 0).all() and found.max() > DECADES * found.min():
        ax.set_yscale("log")
        plain_ticks(ax.yaxis, found.max() / found.min())
    else:
        ax.set_ylim(bottom=min(0.0, found.min()))
    ax.locator_params(axis="x", integer=True)
    ax.set_xlabel("steps")


def _bars(ax: Any, values: dict[Label, dict[str, float]]) -> None:
    """A bar a key beside each other, for every group."""
    groups = list(next(iter(values.values())))
    width = 0.8 / len(values)
    for i, (key, found) in enumerate(values.items()):
        middle = np.arange(len(groups)) + (i - (len(values) - 1) / 2) * width
        ax.bar(middle, list(found.values()), width, color=f"C{i % 10}", label=str(key))
    names = [textwrap.fill(group, 20) for group in groups]
    turned: dict[str, Any] = {}
    if max(map(len, groups)) * len(groups) > 36:
        turned = {"rotation": 45 if "\n" in "".join(names) else 30, "ha": "right"}
        turned["rotation_mode"] = "anchor"
    ax.set_xticks(range(len(groups)), names, fontsize=9, **turned)
