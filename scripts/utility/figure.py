"""Accuracy against ε, with 95 % intervals."""

from __future__ import annotations

import pathlib
from typing import Any

import matplotlib
import numpy as np

from scripts.utility.contest import Contest

matplotlib.use("Agg")

SHIFT = 0.02  # of a method's points to the side, relative, so that intervals do not overlap


def draw(contest: Contest, table: dict[str, Any], path: pathlib.Path) -> None:
    """Write the plot of what is finished."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    methods = contest.methods(contest.epsilons[0])
    seeds = 0
    for number, (name, method) in enumerate(methods.items()):
        found = [
            (epsilon, cell)
            for epsilon in contest.epsilons
            if (cell := table["cells"].get(f"{name} {epsilon:g}")) is not None
        ]
        if not found:
            continue
        seeds = max(seeds, *(cell["seeds"] for _, cell in found))
        axes.errorbar(
            [e * (1 + SHIFT * (number - (len(methods) - 1) / 2)) for e, _ in found],
            [100 * cell["mean"] for _, cell in found],
            yerr=np.array([100 * (cell["half_width"] or 0.0) for _, cell in found]),
            marker="o",
            capsize=3,
            label=method.title,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(contest.epsilons, [f"{e:g}" for e in contest.epsilons])
    axes.minorticks_off()
    axes.set_xlabel(f"ε (δ = {contest.delta:.2g})")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(f"{contest.title}: mean of up to {seeds} seeds, 95 % intervals")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
