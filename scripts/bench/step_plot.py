"""Bars of the step-time bench: ratios to ordinary training, by model and side."""

from __future__ import annotations

import pathlib
import textwrap
from typing import Any

from scripts.bench.step_models import CASES
from scripts.bench.step_sides import ORDINARY, SIDES

COLOURS = {  # ordinary is the line at 1
    "opacus-hooks": "#9ecae1",
    "opacus-functorch": "#6baed6",
    "opacus-ghost": "#3182bd",
    "opake": "#9e9ac8",
    "hooks": "#fdd0a2",
    "functorch": "#fdae6b",
    "bookkeeping": "#31a354",
    "bookkeeping-banded": "#a1d99b",
}

_FEW = 4  # models of which two panels fit side by side


def label(side: str) -> str:
    """As in the legend."""
    kind, mode = SIDES[side]
    if kind == "opake":
        return kind
    banded = ", 16 bands" if side.endswith("-banded") else ""
    return f"{'Opacus' if kind == 'opacus' else 'dptrain'} {mode}{banded}"


def ratios(result: dict[str, Any], what: str, allocator: str) -> dict[str, dict[str, float]]:
    """By model and side, private to ordinary: ``what`` is "time" or "memory" (above the start)."""
    found: dict[str, dict[str, float]] = {}
    if what == "time":
        for row in result["time"]:
            if row["allocator"] == allocator and "ratio" in row:
                found[row["model"]] = {k: v["median"] for k, v in row["ratio"].items()}
        return found
    added: dict[str, dict[str, int]] = {}
    for row in result["memory"]:
        if row["allocator"] == allocator and "peak_bytes" in row:
            above = row["peak_bytes"] - row["start_bytes"]
            added.setdefault(row["model"], {})[row["side"]] = above
    for model, sides in added.items():
        if sides.get(ORDINARY):
            found[model] = {side: above / sides[ORDINARY] for side, above in sides.items()}
    return found


def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """A panel for time and one for memory, for each allocator; beside one another if few models.

    Raises:
        SystemExit: if there is nothing to show.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [*result["time"], *result["memory"]]
    panels = [
        (what, allocator, found)
        for allocator in dict.fromkeys(row["allocator"] for row in rows)
        for what in ("time", "memory")
        if (found := ratios(result, what, allocator))
    ]
    if not panels:
        raise SystemExit("--plot: no side but failures to show")
    models = max(len(found) for _, _, found in panels)
    columns = len({what for what, _, _ in panels}) if models <= _FEW else 1
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(max(6.4, (1.6 if models <= _FEW else 1.1) * models) * columns, 3.6 * lines),
        layout="constrained",
        squeeze=False,
    )
    for axis, (what, allocator, found) in zip(axes.flat, panels, strict=True):
        _bars(axis, found)
        memory = "peak memory above model and data"
        axis.set_title(f"{'time of a step' if what == 'time' else memory}, {allocator} allocator")
        axis.set_ylabel("times ordinary training")
    handles = {  # a side that fails for one model may be there for another
        name: handle
        for axis in axes.flat
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(axis: Any, found: dict[str, dict[str, float]]) -> None:
    sides = [s for s in SIDES if s != ORDINARY and any(s in row for row in found.values())]
    width = 0.85 / max(len(sides), 1)
    for side in sides:
        positions, heights = [], []
        for number, row in enumerate(found.values()):
            here = [s for s in sides if s in row]  # others leave no gap
            if side in row:
                positions.append(number + (here.index(side) - (len(here) - 1) / 2) * width)
                heights.append(row[side])
        bars = axis.bar(positions, heights, width, color=COLOURS[side], label=label(side))
        axis.bar_label(bars, fmt="%.3g", fontsize=6, rotation=90, padding=2)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_yscale("log")
    top = max(height for row in found.values() for height in row.values())
    bottom = min(1.0, *(height for row in found.values() for height in row.values()))
    axis.set_ylim(0.9 * bottom, 1.8 * top)
    titles = [textwrap.fill(CASES[model].title, 14) for model in found]
    axis.set_xticks(range(len(found)), titles, fontsize=8)
