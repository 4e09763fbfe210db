"""Claims of two papers, held beside what is predicted and what was measured on their own data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.stats import t as student

from scripts.docs.pages import ROOT
from scripts.results import markdown, read, rows_of

NOT_RUN = "not run"
Rows = Sequence[Mapping[str, Any]]  # an ε each, with a cell for every method
_TITLES = {"dp-sgd": "DP-SGD", "cyclic": "`CyclicPoisson`", "balls-in-bins": "`BallsInBins`"}


def errors_by_authors(epsilon: str) -> dict[str, float]:
    """The least error of each of the four, by ``user_errors``, with plain BandMF."""
    found: dict[str, float] = {}
    for row in read(ROOT / "scripts/bench/results/user_errors.json")["table"]:
        kind, bands = row["scheme"]["type"], row["strategy"]["type"]
        if row["scheme"].get("accountant") or not bands.startswith(("BandMF", "Identity")):
            continue
        hidden = kind == "UserMinSep" and row["scheme"]["min_sep"] == 1
        name = {"UserCyclic": "cyclic", "UserMinSep": "min-sep", "UserFixed": "unamplified"}[kind]
        name = "dp-sgd" if hidden else name
        found[name] = min(found.get(name, math.inf), row["error"][epsilon])
    return found


def told(less: Mapping[str, Any] | None, more: Mapping[str, Any] | None) -> str:
    """The verdict that the first mean is below the second, by the 95 % interval of Welch's t."""
    if less is None or more is None or None in (less.get("half_width"), more.get("half_width")):
        return NOT_RUN
    variances = [
        (cell["half_width"] / student.ppf(0.975, cell["seeds"] - 1)) ** 2 for cell in (less, more)
    ]
    total = sum(variances)
    if total == 0:
        return "cannot be told"
    freedom = total**2 / sum(
        v**2 / (cell["seeds"] - 1) for v, cell in zip(variances, (less, more), strict=True)
    )
    half = float(student.ppf(0.975, freedom)) * math.sqrt(total)
    gap = more["mean"] - less["mean"]
    if abs(gap) <= half:
        return "cannot be told"
    return "holds" if gap > 0 else "does not hold"


# What Dong & Ganesh 2026, section 7.3, say of the three that they compare: which has less error,
# and at which ε.
_ARXIV_CLAIMS = (
    ("DP-SGD is better than b-min-sep", "dp-sgd", "min-sep", ("1",)),
    ("DP-SGD is better than unamplified BandMF", "dp-sgd", "unamplified", ("1", "2")),
    ("b-min-sep is better than DP-SGD", "min-sep", "dp-sgd", ("2", "4", "8", "16")),
    (
        "b-min-sep is better than unamplified BandMF",
        "min-sep",
        "unamplified",
        ("2", "4", "8", "16"),
    ),
)


def on_arxiv(rows: Rows) -> str:
    """Each claim by predicted error, with the ratio, and by the measured losses."""
    lines = []
    for words, less, more, where in _ARXIV_CLAIMS:
        predicted, measured = [], []
        for row in rows:
            epsilon = row["epsilon"]
            if epsilon not in where:
                predicted.append("")
                measured.append("")
                continue
            errors = errors_by_authors(epsilon)
            ratio = errors[less] / errors[more]
            verdict = "holds" if ratio < 1 else "does not hold"
            predicted.append(f"{verdict} ({ratio:.2f})")
            measured.append(told(row.get(less), row.get(more)))
        lines.append([words, "predicted error", *predicted])
        lines.append(["", "measured loss", *measured])
    return _by_epsilon(rows, lines)


def errors_on_cifar10(cells: Mapping[str, Any]) -> dict[str, float]:
    """RMSE·σ/B̄ by method at an ε, of those whose noise is known, with the best bands."""
    found = {
        row["scheme"]: row["error"]
        for row in rows_of(ROOT / "scripts/paper/results/cifar10_bands.json", "cifar10_bands")
        if f"{row['epsilon']:g}" == cells["epsilon"]
    }
    if "sigma" in cells.get("dp-sgd", {}):
        # Of sums of 1 to 1,500 independent terms; batches of 50,000/300.
        found["dp-sgd"] = cells["dp-sgd"]["sigma"] * math.sqrt(1501 / 2) / (50_000 / 300)
    return found


def on_cifar10(rows: Rows) -> str:
    """b-min-sep against each of the others, by predicted error and by accuracy."""
    lines = []
    for other, said in (
        ("cyclic", "by up to 2 points"),
        ("balls-in-bins", "by up to 4 points"),
        ("dp-sgd", "the last of all"),
    ):
        predicted, measured = [], []
        for cells in rows:
            errors = errors_on_cifar10(cells)
            if {"min-sep", other} <= set(errors):
                ratio = errors["min-sep"] / errors[other]
                predicted.append(f"{'holds' if ratio < 1 else 'does not hold'} ({ratio:.2f})")
            else:
                predicted.append(NOT_RUN)
            ours, theirs = (cells.get(name, {}) for name in ("min-sep", other))
            verdict = told(theirs, ours)
            if "mean" in ours and "mean" in theirs:
                if verdict == NOT_RUN:
                    verdict = "too few seeds to tell"
                verdict += f" ({100 * (ours['mean'] - theirs['mean']):+.1f} points)"
            measured.append(verdict)
        title = f"b-min-sep is better than {_TITLES[other]} ({said})"
        lines.append([title, "predicted error", *predicted])
        lines.append(["", "measured accuracy", *measured])
    return _by_epsilon(rows, lines)


def _by_epsilon(rows: Rows, lines: Sequence[Sequence[str]]) -> str:
    return markdown(["claim", "by", *(f"ε = {row['epsilon']}" for row in rows)], lines)
