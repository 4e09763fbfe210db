"""Plots of plans and of tables of strategies. They need matplotlib."""

from __future__ import annotations

import pathlib
from collections.abc import Collection
from typing import Any

import numpy as np

from dptrain.planning.plan import Plan, PlanRow
from dptrain.planning.strategy_table import StrategyTable
from dptrain.planning.user_plan import UserPlan, UserRow
from dptrain.reporting import figure_of, save
from dptrain.sampling import PerUser
from dptrain.strategies import noise_autocorrelation

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
    """The name of a row's scheme, without the fields that grow with the bands."""
    settings = row.candidate.scheme
    name = str(settings["type"])
    if "max_batch_size" in settings:
        name += ", truncated"
    if "min_sep" in settings and settings["min_sep"] != row.mechanism.strategy.bands:
        name += ", wider min_sep"
    return name


def _shown(row: PlanRow) -> str:
    """The kind of a row's σ, preceded by the strategy if that is a BLT."""
    blt = "BLT, " if row.candidate.strategy["type"] == "BLT" else ""
    return f"{blt}{'ESTIMATE' if row.is_estimate else row.kind.value}"


def plot_strategies(table: StrategyTable, path: str | pathlib.Path, *, lags: int = 64) -> None:
    """Draw the error of every step and the noise's autocorrelation of a table's strategies.

    Args:
        table: what ``strategy_table`` returned; of every family the strategy of the
            least error is drawn.
        path: image file; its suffix chooses the format.
        lags: distance of steps up to which correlations are shown.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
    """
    figure, (left, right) = figure_of(2)
    best = {type(row.strategy): row for row in reversed(table.rows)}
    rows = sorted(best.values(), key=lambda row: row.error)
    steps = np.arange(1, table.steps + 1)
    for i, row in enumerate(rows):
        errors = row.strategy.errors(table.steps, table.workload) * row.sensitivity
        style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3]}
        left.plot(steps, errors, label=row.name, linewidth=1.4, **style)
        correlation = noise_autocorrelation(row.strategy, table.steps, lags)
        right.plot(np.arange(1, len(correlation)), correlation[1:], linewidth=1.4, **style)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("step")
    left.set_ylabel("error of the query × sensitivity")
    right.axhline(0.0, color="black", linewidth=0.8)
    right.set_xscale("log")
    right.set_yscale("symlog", linthresh=1e-3)
    right.set_xlabel("steps apart")
    right.set_ylabel("correlation of the noise (linear below 0.001)")
    for ax in (left, right):
        ax.grid(visible=True, alpha=0.3)
    figure.set_figheight(5.2)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", fontsize=8, ncols=4
    )
    figure.suptitle(
        f"Noise of {table.steps} steps, {table.max_participations} participation(s) at least "
        f"{table.min_sep} steps apart ({type(table.workload).__name__})",
        fontsize=10,
    )
    save(figure, path)


def plot_user_plan(plan: UserPlan, path: str | pathlib.Path) -> None:
    """Draw what a plan for users compares: error over the share of data kept, by slots or steps.

    Args:
        plan: what ``plan_users`` returned.
        path: image file; its suffix chooses the format.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
    """
    from matplotlib import colormaps

    figure, (ax,) = figure_of(1)
    kinds = sorted({type(row.mechanism.scheme).__name__ for row in plan.rows})
    limits = sorted({row.limit: row for row in plan.rows}.items(), key=_by_bound)
    marks = dict(zip(kinds, "osD^vP", strict=False))
    for place, (limit, example) in enumerate(limits):
        color = colormaps["viridis"](place / max(1, len(limits) - 1) * 0.9)
        for kind in kinds:
            rows = [
                row
                for row in plan.rows
                if row.limit == limit and type(row.mechanism.scheme).__name__ == kind
            ]
            if rows:
                ax.plot(
                    [row.kept for row in rows], [row.error for row in rows], marks[kind],
                    color=color, markerfacecolor=color if example.duplicates else "none",
                    markersize=6, label=f"{kind}, {limit}",
                )  # fmt: skip
    best = plan.best
    ax.plot(
        best.kept, best.error, "*", color="black", markersize=16, markerfacecolor="none",
        zorder=6, label="best",
    )  # fmt: skip
    ax.set_yscale("log")
    ax.set_xlabel("share of the examples that are kept")
    ax.set_ylabel("RMSE·σ/B̄ per unit of the clipping norm")
    ax.grid(visible=True, which="both", alpha=0.3)
    figure.set_figheight(6.0)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", fontsize=7, ncols=3)
    figure.suptitle(
        f"ε = {plan.epsilon:g}, δ = {plan.delta:g} for a user, B̄ = {plan.batch_size}, "
        f"{plan.steps} steps",
        fontsize=10,
    )
    save(figure, path)


def _by_bound(pair: tuple[str, UserRow]) -> tuple[bool, int, str]:
    """Bounds in ascending order, copies last, then means by the size of the groups."""
    limit, row = pair
    scheme = row.mechanism.scheme
    size = scheme.group_size if isinstance(scheme, PerUser) else row.bound
    return row.bound is None, size or 0, limit
