"""Tables of the contests on the papers' own data: scores by ε, and which claims they bear out."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scipy.stats import t as student

from scripts.docs.cells import Table
from scripts.docs.pages import ROOT

NOT_RUN = "not run"
_ARXIV_EPSILONS = ("1", "2", "4", "8", "16")
_BY_AUTHORS = {
    "dp-sgd": "DP-SGD",
    "cyclic": "`UserCyclic`",
    "min-sep": "`UserMinSep`",
    "unamplified": "`UserFixed`",
}
_CIFAR10_EPSILONS = ("0.5", "1", "2", "4", "8")
_CIFAR10 = {
    "dp-sgd": "DP-SGD",
    "cyclic": "`CyclicPoisson`",
    "balls-in-bins": "`BallsInBins`",
    "min-sep": "`MinSep`",
}


def _scores(
    tree: Mapping[str, Any],
    *,
    methods: Mapping[str, str],
    epsilons: Sequence[str],
    part: str,
    factor: float,
    digits: int,
) -> Table:
    """A line for each ε: mean, 95 % interval and seeds, or that it was not run.

    Args:
        tree: a contest's results, cells by "method ε".
        methods: titles by method.
        epsilons: of the paper.
        part: ``"score"``, by which the contest is decided, or another of a cell's.
        factor: 100 for per cent.
        digits: after the point.
    """

    def text(cell: Mapping[str, Any] | None) -> str:
        if cell is None:
            return NOT_RUN
        shown = cell if part == "score" else cell[part]
        mean = f"{factor * shown['mean']:.{digits}f}"
        if shown["half_width"] is None:
            return f"{mean} (1)"
        return f"{mean} ± {factor * shown['half_width']:.{digits}f} ({cell['seeds']})"

    cells = tree["cells"]
    rows = [[e, *(text(cells.get(f"{name} {e}")) for name in methods)] for e in epsilons]
    return Table(["ε", *methods.values()], rows)


def _best_tuning_losses(tree: Mapping[str, Any]) -> Table:
    """The best tuning run of each, with its learning rate; "…" where the search goes on."""

    def text(found: Mapping[str, Any] | None) -> str:
        if found is None:
            return NOT_RUN
        rate, loss = min(found["tried"].items(), key=lambda each: each[1])
        return f"{loss:.4f} ({rate}{'' if found['done'] else ' …'})"

    rows = [
        [e, *(text(tree["tuning"].get(f"{name} {e}")) for name in _BY_AUTHORS)]
        for e in _ARXIV_EPSILONS
    ]
    return Table(["ε", *_BY_AUTHORS.values()], rows)


def errors_by_authors(epsilon: str) -> dict[str, float]:
    """The least error of each of the four, by ``user_errors``, with plain BandMF."""
    tree = json.loads((ROOT / "scripts/bench/results/user_errors.json").read_text(encoding="utf-8"))
    found: dict[str, float] = {}
    for row in tree["table"]:
        kind, bands = row["scheme"]["type"], row["strategy"]["type"]
        if row["scheme"].get("accountant") or not bands.startswith(("BandMF", "Identity")):
            continue
        hidden = kind == "UserMinSep" and row["scheme"]["min_sep"] == 1
        name = {"UserCyclic": "cyclic", "UserMinSep": "min-sep", "UserFixed": "unamplified"}[kind]
        name = "dp-sgd" if hidden else name
        found[name] = min(found.get(name, math.inf), row["error"][epsilon])
    return found


def told(less: Mapping[str, Any] | None, more: Mapping[str, Any] | None) -> str:
    """Whether the first mean is below the second, by the 95 % interval of Welch's t."""
    if less is None or more is None or less["half_width"] is None or more["half_width"] is None:
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
    ("b-min-sep is better than DP-SGD", "min-sep", "dp-sgd", _ARXIV_EPSILONS[1:]),
    ("b-min-sep is better than unamplified BandMF", "min-sep", "unamplified", _ARXIV_EPSILONS[1:]),
)


def _arxiv_claims(tree: Mapping[str, Any]) -> Table:
    """Each claim by predicted error, with the ratio, and by the measured losses."""
    rows = []
    for words, less, more, where in _ARXIV_CLAIMS:
        predicted, measured = [], []
        for epsilon in _ARXIV_EPSILONS:
            if epsilon not in where:
                predicted.append("")
                measured.append("")
                continue
            errors = errors_by_authors(epsilon)
            ratio = errors[less] / errors[more]
            verdict = "holds" if ratio < 1 else "does not hold"
            predicted.append(f"{verdict} ({ratio:.2f})")
            cells = tree["cells"]
            measured.append(told(cells.get(f"{less} {epsilon}"), cells.get(f"{more} {epsilon}")))
        rows.append([words, "predicted error", *predicted])
        rows.append(["", "measured loss", *measured])
    return Table(["claim", "by", *(f"ε = {e}" for e in _ARXIV_EPSILONS)], rows)


def errors_on_cifar10(tree: Mapping[str, Any], epsilon: str) -> dict[str, float]:
    """RMSE·σ/B̄ by method, of those whose noise is known: bands and separation are the best."""
    path = ROOT / "scripts/paper/results/cifar10_bands.json"
    found: dict[str, float] = {}
    for row in json.loads(path.read_text(encoding="utf-8")):
        if f"{row['epsilon']:g}" == epsilon:
            found[row["scheme"]] = min(found.get(row["scheme"], math.inf), row["error"])
    if cell := tree["cells"].get(f"dp-sgd {epsilon}"):
        # Of sums of 1 to 1,500 independent terms; batches of 50,000/300.
        found["dp-sgd"] = cell["sigma"] * math.sqrt(1501 / 2) / (50_000 / 300)
    return found


def _cifar10_claims(tree: Mapping[str, Any]) -> Table:
    """b-min-sep against each of the others, by predicted error and by accuracy."""
    cells, rows = tree["cells"], []
    for other, said in (
        ("cyclic", "by up to 2 points"),
        ("balls-in-bins", "by up to 4 points"),
        ("dp-sgd", "the last of all"),
    ):
        predicted, measured = [], []
        for epsilon in _CIFAR10_EPSILONS:
            errors = errors_on_cifar10(tree, epsilon)
            if {"min-sep", other} <= set(errors):
                ratio = errors["min-sep"] / errors[other]
                predicted.append(f"{'holds' if ratio < 1 else 'does not hold'} ({ratio:.2f})")
            else:
                predicted.append(NOT_RUN)
            ours, theirs = cells.get(f"min-sep {epsilon}"), cells.get(f"{other} {epsilon}")
            verdict = told(theirs, ours)
            if ours and theirs:
                if verdict == NOT_RUN:
                    verdict = "too few seeds to tell"
                verdict += f" ({100 * (ours['mean'] - theirs['mean']):+.1f} points)"
            measured.append(verdict)
        title = f"b-min-sep is better than {_CIFAR10[other]} ({said})"
        rows.append([title, "predicted error", *predicted])
        rows.append(["", "measured accuracy", *measured])
    return Table(["claim", "by", *(f"ε = {e}" for e in _CIFAR10_EPSILONS)], rows)


def _cifar10_bands(rows: Sequence[Mapping[str, Any]]) -> Table:
    """By ε and scheme, the pair with the least predicted error."""
    best: dict[tuple[float, str], Mapping[str, Any]] = {}
    for row in rows:
        key = (row["epsilon"], row["scheme"])
        if key not in best or row["error"] < best[key]["error"]:
            best[key] = row
    return Table(
        ["ε", "scheme", "bands", "separation", "σ", "predicted error"],
        [
            [
                f"{epsilon:g}",
                _CIFAR10[name],
                str(row["bands"]),
                str(row["min_sep"] or ""),
                f"{row['sigma']:.4f}",
                f"{row['error']:.4f}",
            ]
            for (epsilon, name), row in sorted(best.items(), key=lambda item: item[0][0])
        ],
    )


_ARXIV = functools.partial(_scores, methods=_BY_AUTHORS, epsilons=_ARXIV_EPSILONS)
_LOSS = functools.partial(_ARXIV, part="score", factor=1, digits=4)

CONTESTS: dict[str, tuple[str, Callable[[Any], Table]]] = {
    "arxiv_fig5": ("arxiv_fig5", _LOSS),
    "arxiv_fig5_accuracy": (
        "arxiv_fig5",
        functools.partial(_ARXIV, part="accuracy", factor=100, digits=2),
    ),
    "arxiv_fig5_claims": ("arxiv_fig5", _arxiv_claims),
    "arxiv_fig5_whole": ("arxiv_fig5_whole", _LOSS),
    "arxiv_fig5_whole_tuning": ("arxiv_fig5_whole", _best_tuning_losses),
    "cifar10_bands": ("cifar10_bands", _cifar10_bands),
    "cifar10_fig4": (
        "cifar10_fig4",
        functools.partial(
            _scores,
            methods=_CIFAR10,
            epsilons=_CIFAR10_EPSILONS,
            part="score",
            factor=100,
            digits=1,
        ),
    ),
    "cifar10_fig4_claims": ("cifar10_fig4", _cifar10_claims),
}
"""By the table's name: the file of results, and what makes the table of it."""
