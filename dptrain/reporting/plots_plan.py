"""The picture of a plan: error and noise of every scheme over the number of bands."""

from __future__ import annotations

import pathlib

from dptrain.planning import Plan, PlanRow
from dptrain.reporting.plots import figure_of, save


def plot_plan(plan: Plan, path: str | pathlib.Path) -> None:
    """Draw RMSE·σ/B̄ and σ over the bands to an image file: hollow marks are estimates.

    Args:
        plan: what ``compare`` returned.
        path: image file; its suffix chooses the format.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
    """
    figure, (left, right) = figure_of(2)
    curves: dict[str, list[PlanRow]] = {}
    for row in plan.rows:
        curves.setdefault(_curve(row), []).append(row)
    for i, (name, rows) in enumerate(sorted(curves.items())):
        rows.sort(key=lambda row: row.mechanism.strategy.bands)
        buffered = rows[0].candidate.strategy["type"] == "BLT"
        bands = [row.mechanism.strategy.bands for row in rows]
        for ax, values in (
            (left, [row.error for row in rows]),
            (right, [row.noise_multiplier for row in rows]),
        ):
            if buffered:  # dense: no number of bands, hence a level
                style = {"color": f"C{i % 10}", "linestyle": "-.", "linewidth": 1.2}
                ax.axhline(values[0], label=name, **style)
                continue
            ax.plot(
                bands,
                values,
                ("o", "s", "^", "D", "v", "P")[i % 6],
                linestyle="--" if rows[0].is_estimate else "-",
                color=f"C{i % 10}",
                markerfacecolor="none" if rows[0].is_estimate else f"C{i % 10}",
                markersize=6,
                linewidth=1.2,
                label=name,
            )
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
        ax.set_xlabel("bands")
        ax.set_ylabel(label)
        ax.grid(visible=True, which="both", alpha=0.3)
    figure.set_figheight(5.6)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", fontsize=8, ncols=3
    )
    q = plan.question
    figure.suptitle(
        f"ε = {q.epsilon:g}, δ = {q.delta:g}, N = {q.dataset_size:,}, B̄ = {q.batch_size:g}, "
        f"{q.steps} steps; {type(q.workload).__name__}",
        fontsize=10,
    )
    save(figure, path)


def _curve(row: PlanRow) -> str:
    """The scheme without what grows with the bands, the strategy if dense, and how it is shown."""
    settings = row.candidate.scheme
    name = str(settings["type"])
    if "max_batch_size" in settings:
        name += ", truncated"
    bands = row.mechanism.strategy.bands
    if "min_sep" in settings and settings["min_sep"] != bands:
        name += ", wider min_sep"
    if row.candidate.strategy["type"] == "BLT":
        name += " with BLT"
    return f"{name} ({'ESTIMATE' if row.is_estimate else row.kind.value})"
