"""Accuracy, or loss, against ε, with 95 % intervals."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dptrain.reporting import figure_of, save

SHIFT = 0.02  # of a method's points to the side, relative, so that intervals do not overlap


def draw(
    rows: Sequence[Mapping[str, Any]],
    titles: Mapping[str, str],
    *,
    delta: float,
    title: str,
    path: pathlib.Path,
    score: str = "accuracy",
) -> None:
    """Write the plot of what is there.

    Args:
        rows: ``epsilon``, ascending, and by method ``mean`` and ``half_width`` (``None`` for one
            run) of the score, where there are runs.
        titles: of the methods, by name.
        delta: δ.
        title: of the plot.
        path: image file.
        score: ``"accuracy"`` or ``"loss"``.
    """
    factor = 100 if score == "accuracy" else 1
    epsilons = [float(row["epsilon"]) for row in rows]
    figure, (axes,) = figure_of(1)
    for number, (name, label) in enumerate(titles.items()):
        found = [(float(row["epsilon"]), row[name]) for row in rows if "mean" in row.get(name, {})]
        if not found:
            continue
        axes.errorbar(
            [e * (1 + SHIFT * (number - (len(titles) - 1) / 2)) for e, _ in found],
            [factor * cell["mean"] for _, cell in found],
            yerr=[factor * (cell["half_width"] or 0.0) for _, cell in found],
            marker="o",
            capsize=3,
            label=label,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    axes.set_xlim(min(epsilons) / 1.5, max(epsilons) * 1.5)  # also where there is a single one
    axes.minorticks_off()
    axes.set_xlabel(f"ε (δ = {delta:.2g})")
    axes.set_ylabel("test accuracy (%)" if score == "accuracy" else "test loss")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
