"""Plots of individual privacy losses, each marked as not for release; they need matplotlib."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.contrib.individual.report_groups import plain
from dptrain.core import Array
from dptrain.reporting import figure_of, in_place, save

MARK = "NOT FOR RELEASE: computed from raw training examples"
BOUND = "bound of the run"
DECADES = 30.0
"""Ratio from which on an axis of ε is logarithmic."""
SPIKE = 10.0  # from this ratio on a bin (such as that at the budget) would hide all others


def plot_histogram(
    epsilons: Mapping[str, npt.ArrayLike],
    path: str | pathlib.Path,
    *,
    delta: float,
    bound: float | None = None,
    bins: int = 60,
) -> None:
    """Draw how ε is distributed over the examples, for one or several accountants or runs.

    The axis of ε is logarithmic where it spans decades, that of the counts where one bin towers
    above the others. What cannot be drawn is counted in the legend.

    Args:
        epsilons: by name, ε of every example, each of shape (N,).
        path: image file; its suffix chooses the format.
        delta: δ of the ε.
        bound: ε that the run keeps for every example.
        bins: number of bins, the same ones for all.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
        ValueError: if there is nothing to draw, or a number is negative or NaN.
    """
    figure, (ax,) = private_figure(1)
    values = {name: _epsilon(name, given) for name, given in epsilons.items()}
    finite = [array[np.isfinite(array)] for array in values.values()]
    drawn = np.concatenate(finite) if finite else np.array([])
    if not drawn.size:
        raise ValueError("epsilons: there is no finite ε to plot")
    edges, logarithmic = _edges(drawn, bound, bins)
    heights = [np.histogram(array, edges)[0] for array in finite]
    for i, ((name, array), counts) in enumerate(zip(values.items(), heights, strict=True)):
        ax.stairs(counts, edges, fill=True, color=f"C{i % 10}", alpha=0.25)
        label = f"{name}{_undrawn(array, logarithmic)}"
        ax.stairs(counts, edges, color=f"C{i % 10}", linewidth=1.5, label=label)
    if bound is not None and np.isfinite(bound):
        bound_line(ax.axvline, bound)
    if logarithmic:
        ax.set_xscale("log")
        plain_ticks(ax.xaxis, edges[-1] / edges[0])
    else:
        ax.set_xlim(left=edges[0])
    ax.set_xlabel(f"individual ε at δ = {delta:g}")
    _count_axis(ax, "examples")
    filled = np.concatenate([counts[counts > 0] for counts in heights])
    if filled.max() > SPIKE * np.quantile(filled, 0.9):
        ax.set_yscale("log")
        ax.set_ylim(0.5, 2.0 * filled.max())
        ax.yaxis.set_major_formatter("{x:,.0f}")
    save_private_figure(figure, path, legend=ax)


def plot_active(
    counts: Mapping[str, Sequence[int]],
    path: str | pathlib.Path,
    *,
    size: int | None = None,
    start: int | None = None,
) -> None:
    """Draw how many examples could take part in each step.

    Args:
        counts: by name of the run, the count of each step (``record.active_counts``).
        path: image file; its suffix chooses the format.
        size: N, drawn as a line.
        start: T0, the last step before the filter's, drawn as a line.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
        ValueError: if a run has no step.
    """
    figure, (ax,) = private_figure(1)
    if not counts or not all(len(steps) for steps in counts.values()):
        raise ValueError("counts: there is no step to plot")
    longest = max(len(steps) for steps in counts.values())
    for i, (name, steps) in enumerate(counts.items()):
        ax.plot(
            np.arange(1, len(steps) + 1), steps, ("-", "--", "-.")[i // 10 % 3],
            color=f"C{i % 10}", drawstyle="steps-mid", linewidth=1.6, label=name,
        )  # fmt: skip
    if size is not None:
        ax.axhline(size, color="gray", linestyle="--", linewidth=1, label=f"all {size:,} examples")
    if start is not None:
        ax.axvline(
            start + 0.5, color="black", linestyle=":", label=f"filter from step {start + 1} on"
        )
    ax.set_xlim(0.5, longest + 0.5)
    ax.locator_params(axis="x", integer=True)
    ax.set_xlabel("step")
    _count_axis(ax, "active examples")
    ax.set_ylim(top=1.05 * max(size or 0, max(max(steps) for steps in counts.values()), 1))
    save_private_figure(figure, path, legend=ax)


def _epsilon(name: str, given: npt.ArrayLike) -> Array:
    array = np.asarray(plain(given), dtype=np.float64)
    if array.ndim != 1 or not (array >= 0).all():
        raise ValueError(
            f"epsilons[{name!r}] has shape {array.shape} or contains a negative number or NaN: "
            "must have one ε ≥ 0 per example, such as IndividualReport.epsilon"
        )
    return array


def _edges(drawn: Array, bound: float | None, bins: int) -> tuple[Array, bool]:
    """Edges of the bins, and whether they are spaced evenly in log ε."""
    positive = drawn[drawn > 0]
    top = max(drawn.max(), bound if bound is not None and np.isfinite(bound) else 0.0) or 1.0
    top *= 1.0 + 1e-9
    if positive.size and np.quantile(positive, 0.05) < top / DECADES:
        return np.geomspace(positive.min() * (1.0 - 1e-9), top, bins + 1), True
    low = drawn.min() if drawn.min() > 0.5 * top and drawn.min() < 0.99 * top else 0.0
    return np.linspace(low, top, bins + 1), False


def _undrawn(array: Array, logarithmic: bool) -> str:
    """The number of examples that the histogram omits, in words."""
    infinite, zero = int(np.isinf(array).sum()), int((array == 0).sum())
    parts = [f"{infinite:,} with ε = ∞"] if infinite else []
    if zero and logarithmic:
        parts.append(f"{zero:,} with ε = 0")
    return f" (without {' and '.join(parts)})" if parts else ""


def bound_line(draw: Any, bound: float) -> None:
    """The run's bound by ``ax.axvline`` or ``ax.axhline``."""
    draw(bound, color="black", linestyle=":", label=f"{BOUND}: ε = {bound:.4g}")


def plain_ticks(axis: Any, ratio: float) -> None:
    """Ticks of a logarithmic axis as plain numbers, 1-2-5 where there is room."""
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < 1e3 else (1,), numticks=12))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def _count_axis(ax: Any, label: str) -> None:
    ax.set_ylim(bottom=0)
    ax.locator_params(axis="y", integer=True)
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.set_ylabel(label)


def private_figure(panels: int) -> tuple[Any, Any]:
    """A figure with panels side by side, and their axes; ``save_private_figure`` marks it."""
    figure, axes = figure_of(panels)
    figure.set_figwidth(6.4 if panels == 1 else 5.0 * panels)
    figure.get_layout_engine().set(wspace=0.06, h_pad=0.05)
    for ax in axes:
        ax.grid(visible=True, alpha=0.3)
        ax.set_axisbelow(True)
    return figure, axes


def save_private_figure(figure: Any, path: str | pathlib.Path, *, legend: Any) -> None:
    """Legend below the data, the mark above; the file is readable by its owner only."""
    path = pathlib.Path(path)
    if not path.suffix or path.is_dir():
        raise ValueError(f"path={path}: name an image file, with a suffix such as .png")
    handles, labels = legend.get_legend_handles_labels()
    found = sorted(zip(handles, labels, strict=True), key=lambda pair: pair[1].startswith(BOUND))
    handles, labels = zip(*found, strict=True)
    longest = max(map(len, labels))
    columns = max(1, min(len(labels), int(figure.get_figwidth() * 11 / (longest + 6))))
    figure.set_figheight(figure.get_figheight() + 0.18 * (math.ceil(len(labels) / columns) - 1))
    figure.legend(handles, labels, loc="outside lower center", fontsize=9, ncols=columns)
    figure.suptitle(MARK, color="firebrick", fontsize=10, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    with in_place(path) as temporary:
        save(figure, temporary)
