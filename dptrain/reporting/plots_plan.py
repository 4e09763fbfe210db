"""The picture of a plan: error and noise of every scheme over the number of bands."""

from __future__ import annotations

import pathlib
from collections.abc import Collection
from typing import Any

from dptrain.planning import Plan, PlanRow
from dptrain.reporting.plots import figure_of, save

_MARKERS = "os^DvPX<>phd*8"
_TABLEAU = 10  # colors that are told apart at a glance; of more, a scale has as many as asked for


def plot_plan(plan: Plan, path: str | pathlib.Path) -> None:
    """Draw RMSE·σ/B̄ and σ over the bands to an image file: hollow marks are estimates.

    Args:
        plan: what ``compare`` returned.
        path: image file; its suffix chooses the format.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
    """
    figure, (left, right) = figure_of(2)
    curves: dict[tuple[str, str], list[PlanRow]] = {}
    for row in plan.rows:
        curves.setdefault((_scheme(row), _shown(row)), []).append(row)
    styles = styles_of({scheme for scheme, _ in curves})
    for (scheme, shown), rows in sorted(curves.items()):
        rows.sort(key=lambda row: row.mechanism.strategy.bands)
        bands = [row.mechanism.strategy.bands for row in rows]
        estimate, dense = rows[0].is_estimate, rows[0].candidate.strategy["type"] == "BLT"
        style: dict[str, Any] = {
            "linestyle": "-." if dense else "--" if estimate else "-",
            "linewidth": 1.2,
            **styles[scheme],
        }
        style["markerfacecolor"] = "none" if estimate else style["color"]
        for ax, values in (
            (left, [row.error for row in rows]),
            (right, [row.noise_multiplier for row in rows]),
        ):
            if dense:  # no number of bands, hence a level
                (first, *_, last) = sorted({1, *plan.question.bands, 2})
                ax.plot([first, last], [values[0]] * 2, label=f"{scheme}, {shown}", **style)
            else:
                ax.plot(bands, values, label=f"{scheme}, {shown}", **style)
    if (best := plan.best) is not None and best.candidate.strategy["type"] != "BLT":
        left.plot(
            best.mechanism.strategy.bands, best.error, "*", color="black", markersize=15,
            markerfacecolor="none", zorder=6, label="best",
        )  # fmt: skip
    ticks = plan.question.bands
    for ax, label in (
        (left, "RMSE·σ/B̄ per unit of the clipping norm"),
        (right, "noise multiplier σ"),
    ):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(ticks, [str(tick) for tick in ticks])
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" * (f"{value:e}"[0] in "246"))
        ax.set_xlabel("bands")
        ax.set_ylabel(label)
        ax.grid(visible=True, which="both", alpha=0.3)
    figure.set_figheight(5.6)
    figure.legend(
        *left.get_legend_handles_labels(),
        loc="outside lower center",
        fontsize=8,
        ncols=3,
        handlelength=4,
    )
    q = plan.question
    figure.suptitle(
        f"ε = {q.epsilon:g}, δ = {q.delta:g}, N = {q.dataset_size:,}, B̄ = {q.batch_size:g}, "
        f"{q.steps} steps; {type(q.workload).__name__}",
        fontsize=10,
    )
    save(figure, path)


def styles_of(schemes: Collection[str]) -> dict[str, dict[str, Any]]:
    """A color and a marker for every scheme, each of its own.

    Every second one is smaller and lies above: a scheme and its truncated form, neighbors by name,
    may have the same curve.
    """
    from matplotlib import colormaps

    count = len(schemes)
    marks = [*_MARKERS, *(f"${chr(ord('A') + i)}$" for i in range(count - len(_MARKERS)))]
    styles = {}
    for i, name in enumerate(sorted(schemes)):
        few = count <= _TABLEAU
        color = colormaps["tab10"](i) if few else colormaps["turbo"](i / (count - 1))
        above = i % 2
        styles[name] = {
            "color": color,
            "marker": marks[i],
            "markersize": 5.0 if above else 9.0,
            "zorder": 3 + above,
        }
    return styles


def _scheme(row: PlanRow) -> str:
    """The scheme, without what grows with the bands."""
    settings = row.candidate.scheme
    name = str(settings["type"])
    if "max_batch_size" in settings:
        name += ", truncated"
    if "min_sep" in settings and settings["min_sep"] != row.mechanism.strategy.bands:
        name += ", wider min_sep"
    return name


def _shown(row: PlanRow) -> str:
    """The strategy if it is dense, and how the row is shown."""
    blt = "BLT, " if row.candidate.strategy["type"] == "BLT" else ""
    return f"{blt}{'ESTIMATE' if row.is_estimate else row.kind.value}"
