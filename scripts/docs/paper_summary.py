"""The results of the redrawn figures of the papers, in a sentence each, from their CSV files."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from scripts.docs.pages import ROOT
from scripts.paper.common import read_csv
from scripts.results import rows_of

RESULTS = ROOT / "scripts/paper/results"

Row = dict[str, Any]


@functools.cache
def _read(name: str) -> list[Row]:
    return rows_of(RESULTS / f"{name}.json", name) or read_csv(RESULTS / f"{name}.csv")


def _column(name: str, column: str) -> np.ndarray:
    return np.array([float(row[column]) for row in _read(name)])


def summaries() -> Iterator[tuple[str, str]]:
    """Names of scripts, and what their results say."""
    for name in ("balls_in_bins_fig2", "balls_in_bins_fig3"):
        yield name, "; ".join(_crossings(name))
    for other, words in (("cyclic", "cyclic Poisson"), ("balls_in_bins", "balls-in-bins")):
        ratio = _column("min_sep_fig2_fig3", f"ratio_to_{other}")
        words = f"error over that of {words}: {ratio.min():.2f} to {ratio.max():.2f}"
        yield "min_sep_fig2_fig3", words
    below = _column("matrix_fig4", "epsilon_mmcc") < _column("matrix_fig4", "epsilon_cyclic")
    first = _column("matrix_fig4", "sigma")[below].min()
    yield "matrix_fig4", f"MMCC is below cyclic Poisson from σ = {first:.3g} on"
    plain = dict.fromkeys(f"{value:.4g}" for value in _column("matrix_fig8", "unamplified"))
    yield "matrix_fig8", f"ε unamplified: {', '.join(plain)}"
    yield "linear_last_iterate", f"ε at δ = 10⁻⁶: {_last_iterate(1e-6)}"
    for name in ("individual_fig1_mnist", "individual_fig1"):
        yield "individual_fig1", _medians(name)
    for name, data in (("individual_fig6_mnist", "MNIST"), ("individual_fig6", "digits")):
        words = f"change of the AUC from epoch 50 to 100 on {data}, by the multiple of the norm"
        yield "individual_fig6", f"{words}: {_changes(name)}"
    (row,) = [row for row in _read("individual_fig5") if float(row["epsilon"]) == 0.8]
    yield (
        "individual_fig5",
        f"steps at ε = .8: {row['steps_rdp']} by Rényi, {row['steps_gdp']} by GDP",
    )
    yield "individual_fig4", _epsilon_of_steps()


def _crossings(name: str) -> Iterator[str]:
    """For each panel the largest ε of the grid at which conditional composition is the better."""
    for panel in dict.fromkeys(row["panel"] for row in _read(name)):
        curves = {
            (row["curve"], row["sigma"]): float(row["epsilon"])
            for row in _read(name)
            if row["panel"] == panel
        }
        pairs = [
            (value, curves["conditional composition", sigma])
            for (curve, sigma), value in curves.items()
            if curve == "Rényi"
        ]
        best = max(conditional for renyi, conditional in pairs if conditional < renyi)
        yield f"{panel.split(',')[0]}: conditional composition is below Rényi up to ε = {best:.2f}"


def _last_iterate(delta: float) -> str:
    """ε of all steps and of the last iterate, between the points of the drawn curves."""
    grid = _column("linear_last_iterate", "epsilon")
    found = {
        column: np.interp(-np.log(delta), -np.log(_column("linear_last_iterate", column)), grid)
        for column in ("steps_remove", "steps_add", "last_remove", "last_add")
    }
    return (
        f"all steps {max(found['steps_remove'], found['steps_add']):.3f}; last iterate "
        f"{found['last_add']:.3f} for add and {found['last_remove']:.3f} for remove"
    )


def _medians(name: str) -> str:
    pld, renyi = _column(name, "epsilon_pld"), _column(name, "epsilon_renyi")
    above = 100 * (renyi / pld - 1)
    return (
        f"medians {np.median(pld):.3f} by PLD and {np.median(renyi):.3f} by Rényi, which is "
        f"{above.min():.1f} to {above.max():.1f} % above"
    )


def _changes(name: str) -> str:
    """Mean over the seeds, and its standard error, for every multiple of the clipping norm."""
    auc = {
        (float(row["factor"]), row["seed"], row["epoch"]): float(row["macro_auc"])
        for row in _read(name)
    }
    said = []
    for factor in sorted({factor for factor, _, _ in auc}):
        seeds = sorted({seed for _, seed, _ in auc})
        change = [auc[factor, seed, "100"] - auc[factor, seed, "50"] for seed in seeds]
        error = statistics.stdev(change) / len(change) ** 0.5
        said.append(f"{statistics.mean(change):+.4f} ± {error:.4f} ({factor:g})")
    return ", ".join(said)


def _epsilon_of_steps() -> str:
    """ε of the numbers of steps that the paper's text names, between the drawn points."""
    steps = _column("individual_fig4", "steps")
    renyi, gdp = (
        np.interp(np.log(count), np.log(steps), _column("individual_fig4", f"epsilon_{kind}"))
        for kind, count in (("rdp", 420), ("gdp", 495))
    )
    return f"ε of 420 steps by Rényi: {renyi:.3f}; of 495 steps by GDP: {gdp:.3f}"
