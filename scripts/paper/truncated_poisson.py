"""The cost of truncating Poisson batches at B examples: the older bound, the theorems, and ours.

Ganesh, Tighter Privacy Analysis for Truncated Poisson Sampling, has no figure and no number; this
is the comparison that its introduction makes. ε at δ = 1e-5 of T steps against B, for N examples
drawn with probability p, by

* the older bound (Chua et al. 2024): if Poisson sampling is (ε, δ')-DP, cutting batches is
  (ε, δ' + e^ε η)-DP with η ≥ Pr[any draw exceeds B], here η = T·Pr[Bin(N, p) > B] (at most 1);
* Theorem 3.1 (add-remove, N against N-1), Theorem 3.3 (zero-out) and Theorem 3.4 (replace-one) as
  they are stated;
* dptrain's accountants, whose pairs for zero-out and replace-one are sharper;
* with ``--peer`` dp_accounting's TruncatedSubsampledGaussianDpEvent (ADD_OR_REMOVE_ONE) at four B.

The right half shows the same against the share N·p/B of a padded batch's rows that is used: the
"wasted computation" that the older bound makes necessary.

    PYTHONPATH=. python scripts/paper/truncated_poisson.py [--peer] [--examples 10000] [--sigma 1]

Compared with the text of section 3.1: where truncation is rare, Theorem 3.1 nearly is Poisson
sampling, and B = ∞ retrieves it. Discrepancies: none with the theorems. dp_accounting, which the
paper says incorporates them, has the replace-one pair in the full branch for every adjacency, hence
is looser than Theorems 3.1 and 3.3 (7.68 against 7.35 and 7.43 at the defaults with B = 110). The
add-remove accountant of dptrain takes the worse of N against N-1 and N+1 against N, where the
theorem fixes the larger set's size; drawn is the theorem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import ndtr
from scipy.stats import binom
from tqdm.auto import tqdm

from dptrain.accounting.losses import (
    Composition,
    LossDistribution,
    connect_the_dots,
    public_mixture,
)
from dptrain.accounting.poisson import Branches, SubsampledGaussianCurve, open_pair, truncated_curve
from dptrain.core import Adjacency
from dptrain.reporting import figure_of, save
from scripts.paper.common import Stopwatch, compare, parser, positive, short, write_table

COLUMNS = {
    "max_batch_size": "cap",
    "used_rows": "used rows",
    "older_bound": "older bound",
    "theorem_3_1": "Theorem 3.1",
    "theorem_3_3": "Theorem 3.3",
    "zero_out": "ours, zero-out",
    "theorem_3_4": "Theorem 3.4",
    "replace_one": "ours, replace-one",
}
STYLES = {
    "older_bound": ("older bound δ + e^ε η", "black", "-."),
    "theorem_3_1": ("Theorem 3.1 (add-remove)", "C0", "-"),
    "theorem_3_3": ("Theorem 3.3 (zero-out)", "C1", "--"),
    "zero_out": ("zero-out, here", "C1", "-"),
    "theorem_3_4": ("Theorem 3.4 (replace-one)", "C2", "--"),
    "replace_one": ("replace-one, here", "C2", "-"),
}
# Grid of outputs on which a stated pair's loss is inverted: five digits of ε, no proof.
_TABLE = 400_001


def stated_pair(
    q: float, right: float, left: float, sigma: float, spacing: float
) -> LossDistribution:
    """Losses of ``right``·Bern(q) against ``left``·Bern(q), left < 0 < right, on a grid."""
    x = np.linspace(left - 13.0 * sigma, right + 13.0 * sigma, _TABLE)

    def log_mean(shift: float) -> np.ndarray:
        exponent = (shift * x - 0.5 * shift**2) / sigma**2
        return np.logaddexp(math.log1p(-q), math.log(q) + exponent) if q < 1.0 else exponent

    loss = log_mean(right) - log_mean(left)
    first, last = math.floor(loss[0] / spacing), math.ceil(loss[-1] / spacing)
    ends = np.interp(spacing * np.arange(first, last + 1), loss, x)

    def masses(shift: float) -> np.ndarray:
        plain, moved = ndtr(ends / sigma), ndtr((ends - shift) / sigma)
        return np.diff((1.0 - q) * plain + q * moved)

    return connect_the_dots(
        spacing=spacing, lowest=first, upper=masses(right), lower=masses(left), below=0.0, above=0.0
    )


def theorem(
    adjacency: Adjacency, *, size: int, p: float, largest: int, sigma: float, steps: int,
    delta: float,
) -> float:  # fmt: skip
    """ε(δ) of Theorem 3.3 or 3.4 as stated: 2·Bern(q2) against -Bern(q2) or -2·Bern(q2)."""
    cases = Branches.of(dataset_size=size, probability=p, max_batch_size=largest)
    displaced = -1.0 if adjacency is Adjacency.ZERO_OUT else -2.0
    found = []
    for remove in (True, False):
        pair = open_pair(adjacency, p, sigma)
        spacing = pair.spread(remove=remove).spacing(steps)
        right, left = (2.0, displaced) if remove else (-displaced, -2.0)
        single = public_mixture(
            [
                (cases.open, pair.discretized(spacing=spacing, remove=remove)),
                (cases.full, stated_pair(cases.kept, right, left, sigma, spacing)),
            ]
        )
        found.append(Composition(single, steps).epsilon(delta))
    return max(found)


def older_bound(curve: SubsampledGaussianCurve, sigma: float, delta: float, eta: float) -> float:
    """Least ε on a grid of .001 with δ'(ε) + e^ε η ≤ δ for Poisson sampling's δ', or infinity."""
    start = curve.epsilon(sigma, delta)
    if eta == 0.0:
        return start
    # An ε three times that of Poisson sampling is of no interest.
    longest = min(math.log(delta / eta), 3.0 * start + 1.0) if eta < delta else -1.0
    grid = np.arange(start, longest, 1e-3)
    if grid.size == 0:
        return math.inf
    totals = np.maximum(*curve.delta(sigma, grid)) + np.exp(grid) * eta
    enough = np.flatnonzero(totals <= delta)
    return float(grid[enough[0]]) if enough.size else math.inf


def peer(size: int, p: float, largest: int, sigma: float, steps: int, delta: float) -> float:
    """ε by dp_accounting's event (the finest grid that takes seconds, not minutes)."""
    from dp_accounting import dp_event
    from dp_accounting.pld import pld_privacy_accountant

    event = dp_event.TruncatedSubsampledGaussianDpEvent(size, p, largest, sigma)
    accountant = pld_privacy_accountant.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(dp_event.SelfComposedDpEvent(event, steps))
    return float(accountant.get_epsilon(delta))


def draw(
    rows: Sequence[tuple[float, ...]],
    limits: tuple[float, float],
    peers: dict[int, float],
    title: str,
    delta: float,
) -> Any:
    """The figure of a table with the given columns.

    ``limits`` are ε without truncation, of zero-out (and add-remove) and of replace-one.
    """
    columns = zip(*rows, strict=True)
    table = {name: np.array(column) for name, column in zip(COLUMNS, columns, strict=True)}
    mean = float(table["used_rows"][0] * table["max_batch_size"][0])
    figure, (left, right) = figure_of(2)
    figure.set_figheight(5.2)
    for name, (label, color, line) in STYLES.items():
        values = np.where(np.isfinite(table[name]), table[name], math.nan)
        style = {"color": color, "linestyle": line, "marker": ".", "markersize": 5}
        left.plot(table["max_batch_size"], values, label=label, **style)
        excess = 100 * (values / limits[color == "C2"] - 1)
        right.plot(100 * table["used_rows"], np.maximum(excess, 1e-3), **style)
    if peers:
        left.plot(list(peers), list(peers.values()), "x", color="C3", label="dp_accounting's event")
    for limit, kind in zip(limits, ("zero-out", "replace-one"), strict=True):
        color = {"zero-out": "gray", "replace-one": "C2"}[kind]
        left.axhline(limit, color=color, linestyle=":", label=f"Poisson, not truncated ({kind})")
    left.axvline(mean, color="gray", linewidth=0.8)
    left.annotate("mean draw N·p", (mean, 1.0), (4, -12), xycoords=("data", "axes fraction"),
                  textcoords="offset points", fontsize=8)  # fmt: skip
    left.set_ylim(bottom=0.0)
    left.set_xlabel("largest batch B")
    left.set_ylabel(f"ε at δ = {short(delta)}")
    right.set_yscale("log")
    right.set_xlabel("mean draw over rows of a padded batch, N·p/B (%)")
    right.set_ylabel("what truncation adds to ε (%; at least .001 shown)")
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.3)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", fontsize=8, ncols=3
    )
    figure.suptitle(title, fontsize=10)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--examples", type=int, default=10_000, help="N")
    options.add_argument("--probability", type=positive, default=0.01, help="p")
    options.add_argument("--sigma", type=positive, default=1.0)
    options.add_argument("--steps", type=int, default=1000, help="T")
    options.add_argument("--delta", type=positive, default=1e-5)
    options.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[90, *range(100, 131, 5), *range(140, 161, 10), 165, 170, 180],
    )
    options.add_argument("--peer", action="store_true", help="run dp_accounting too, at four B")
    chosen, watch = options.parse_args(arguments), Stopwatch()
    size, p, sigma = chosen.examples, chosen.probability, chosen.sigma
    steps, delta = chosen.steps, chosen.delta

    poisson = SubsampledGaussianCurve(p, steps, 1.0)
    rows = []
    for largest in tqdm(chosen.batches, desc="batch sizes", delay=2.0, leave=False):
        over = float(binom.sf(largest, size, p))
        ours = {
            adjacency: truncated_curve(
                adjacency, dataset_size=size, probability=p, max_batch_size=largest, steps=steps,
                sensitivity=1.0,
            ).epsilon(sigma, delta)
            for adjacency in Adjacency
        }  # fmt: skip
        stated = {
            adjacency: theorem(
                adjacency, size=size, p=p, largest=largest, sigma=sigma, steps=steps, delta=delta
            )
            for adjacency in (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE)
        }
        rows.append(
            (
                largest,
                size * p / largest,
                older_bound(poisson, sigma, delta, -math.expm1(steps * math.log1p(-over))),
                ours[Adjacency.ADD_REMOVE],
                stated[Adjacency.ZERO_OUT],
                ours[Adjacency.ZERO_OUT],
                stated[Adjacency.REPLACE_ONE],
                ours[Adjacency.REPLACE_ONE],
            )
        )
    write_table(
        chosen.output / "truncated_poisson.json",
        tuple(COLUMNS),
        rows,
        titles=COLUMNS,
        script=__file__,
    )
    uncut = poisson.epsilon(sigma, delta)
    peers = {}
    if chosen.peer:
        picked = chosen.batches[:: max(1, len(chosen.batches) // 4)]
        peers = {each: peer(size, p, each, sigma, steps, delta) for each in picked}

    replaced = truncated_curve(
        Adjacency.REPLACE_ONE, dataset_size=size, probability=p, max_batch_size=size, steps=steps,
        sensitivity=1.0,
    ).epsilon(sigma, delta)  # fmt: skip
    title = f"Truncated Poisson sampling: N = {size:,}, p = {p:g}, σ = {sigma:g}, {steps} steps"
    figure = draw(rows, (uncut, replaced), peers, title, delta)
    save(figure, chosen.output / "truncated_poisson.png")

    def least(name: str) -> str:
        fine = [row[0] for row in rows if row[list(COLUMNS).index(name)] <= 1.01 * uncut]
        return f"B = {min(fine)} ({size * p / min(fine):.0%} used)" if fine else "none of these"

    lines = [
        ("Poisson, never truncated", "-", f"ε = {uncut:.4f}"),
        (
            "at the largest B, Theorem 3.1",
            "retrieves Poisson",
            f"ε = {rows[-1][list(COLUMNS).index('theorem_3_1')]:.4f}",
        ),
        ("B for 1 % more ε, older bound", "-", least("older_bound")),
        ("B for 1 % more ε, Theorem 3.1", "less waste", least("theorem_3_1")),
        ("B for 1 % more ε, Theorem 3.3", "less waste", least("theorem_3_3")),
        ("B for 1 % more ε, zero-out here", "-", least("zero_out")),
    ]
    lines += [
        (f"dp_accounting at B = {each}", "-", f"ε = {value:.4f}") for each, value in peers.items()
    ]
    compare(lines)
    for row in rows:
        if row[0] in (110, *peers):
            print(
                "  ".join(f"{name} {value:.5g}" for name, value in zip(COLUMNS, row, strict=True))
            )
    print(f"took {watch}")


if __name__ == "__main__":
    main()
