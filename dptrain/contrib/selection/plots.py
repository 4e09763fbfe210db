"""The curves of several runs, and of all of them together."""

from __future__ import annotations

import collections
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from dptrain.contrib.selection.composed import ComposedRuns
from dptrain.contrib.selection.pair import delta_at
from dptrain.reporting import LEAST_DELTA, figure_of, save


def plot_composed(
    together: ComposedRuns,
    names: Sequence[str],
    curve: Mapping[str, Sequence[float]],
    path: str | pathlib.Path,
    *,
    epsilon: float,
    delta: float,
) -> None:
    """Draw δ(ε) of every run, of all together, and what basic composition says, to an image file.

    Args:
        together: the runs.
        names: of the runs, in their order.
        curve: ``epsilon``, ``remove`` and ``add`` of all together.
        path: image file; its suffix chooses the format.
        epsilon: of the statement; nothing is marked where it is infinite.
        delta: of the statement.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
    """
    figure, axes = figure_of(1)
    ax = axes[0]
    at = np.asarray(curve["epsilon"])
    fine = np.linspace(0.0, at[-1], 600)
    runs = dict(zip(names, together.runs, strict=True))  # a file that is named twice is drawn once
    short = collections.Counter(pathlib.PurePath(name).name for name in runs)
    for place, (name, run) in enumerate(runs.items()):
        label = pathlib.PurePath(name).name
        label = label if short[label] == 1 else name
        times = names.count(name)
        ax.plot(
            fine,
            np.maximum(delta_at(run, fine, remove=True), delta_at(run, fine, remove=False)),
            color=f"C{place % 10}",
            linewidth=1.1,
            alpha=0.8,
            label=label if times == 1 else f"{label} (each of {times})",
        )
    remove, add = np.asarray(curve["remove"]), np.asarray(curve["add"])
    for values, label, style in (
        (remove, "together, removed", "-"),
        (add, "together, added", "--"),
    ):
        ax.plot(at, values, style, color="black", linewidth=1.9, label=label)
    if len(together.runs) > 1:
        deltas = np.geomspace(max(delta / 100, LEAST_DELTA), 0.5, 200)
        sums = np.array([together.added_up(each) for each in deltas])
        finite = np.isfinite(sums)
        ax.plot(sums[finite], deltas[finite], ":", color="tab:red", label="basic composition")
    if math.isfinite(epsilon):
        ax.plot(
            epsilon, delta, "o", color="black", zorder=5,
            label=f"ε = {epsilon:.4g}, δ = {delta:.3g}",
        )  # fmt: skip
    ax.set_yscale("log")
    ax.set_ylim(max(delta / 100, LEAST_DELTA), 1.5)
    ax.set_xlim(0, at[-1])
    ax.set_xlabel("ε (natural logarithm)")
    ax.set_ylabel("δ")
    ax.grid(visible=True, which="major", alpha=0.3)
    ax.legend(fontsize=8)
    where = "data sets that share nobody" if together.disjoint else "the same data"
    ax.set_title(f"{len(together.runs)} runs on {where}", fontsize=10)
    save(figure, path)
