"""MSE of prefix sums: b-min-sep over cyclic Poisson (Fig. 2) and over balls-in-bins (Fig. 3).

Dong & Ganesh, Privacy Amplification for BandMF via b-Min-Sep Subsampling, section 7.1. Each ratio
is of the least MSE over bands (and b), below 1 where b-min-sep is better; δ = 1e-3. The paper has
n = 1,024, epoch lengths N/B̄ of 128 to 1,024, up to 32 bands and b up to N/B̄. By default n, lengths
and bands are a quarter of that: as many epochs, and a fraction of the time.

    PYTHONPATH=. python scripts/paper/min_sep_fig2_fig3.py [--full] [--exhaustive] [--importance]

``--full`` takes the paper's numbers, ``--exhaustive`` tries every pair of bands and b instead of
going downhill from pair to pair, ``--importance`` certifies the chosen settings of both simulated
schemes by importance sampling, whose threshold is nearer to δ than the δ/2 of Appendix A.

Compared with the claims of section 7.1 (there are no numbers in the text, and no picture here).
Differences: C is the optimal banded *Toeplitz* matrix; the p = 1 end of b-min-sep (b = N/B̄) is
simulated as balls-in-bins, whose law it is, so that Fig. 3 cannot exceed 1 by chance; σ moves in
steps of 1 %, so ratios are good to 2 %.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from dptrain.reporting import figure_of, save
from scripts.paper.common import Stopwatch, compare, parser, short, write_table
from scripts.paper.min_sep_grid import PAPER, QUARTER, Best, Grid, Row, compute

SCHEMES = ("cyclic", "balls_in_bins", "min_sep")
NAMES = {"cyclic": "cyclic Poisson", "balls_in_bins": "balls-in-bins"}
FIGURES = {"cyclic": 2, "balls_in_bins": 3}


def _draw(rows: list[Row], grid: Grid, other: str, path: pathlib.Path) -> None:
    figure, (axes,) = figure_of(1)
    axes.axhline(1.0, color="black", linewidth=0.8)
    for length, marker in zip(grid.epoch_lengths, "osD^", strict=False):
        own = [row for row in rows if row.length == length]
        label = f"{length} ({grid.steps // length} epoch{'s' * (grid.steps > length)})"
        axes.plot(
            [row.epsilon for row in own],
            [row.ratio(other) for row in own],
            marker=marker,
            markersize=5,
            label=label,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(grid.epsilons, [f"{epsilon:g}" for epsilon in grid.epsilons])
    axes.set_xlabel(f"ε at δ = {short(grid.delta)}")
    axes.set_ylabel(f"MSE of b-min-sep / MSE of {NAMES[other]}")
    axes.set_ylim(0.0, max(1.1, 1.05 * max(row.ratio(other) for row in rows)))
    axes.grid(visible=True, alpha=0.3)
    axes.legend(title="epoch length N/B̄", fontsize=9, ncols=2)
    axes.set_title(
        f"b-min-sep against {NAMES[other]}: n = {grid.steps}, at most {grid.bands[-1]} bands, "
        "best of each\n(below 1: b-min-sep has less error)",
        fontsize=10,
    )
    save(figure, path)


def _table(rows: list[Row]) -> tuple[list[str], list[list[float]]]:
    columns = ["epoch_length", "epsilon", "ratio_to_cyclic", "ratio_to_balls_in_bins"]
    columns += [f"{scheme}_{field}" for scheme in SCHEMES for field in Best._fields]
    table = []
    for row in rows:
        line: list[float] = [row.length, row.epsilon, row.ratio("cyclic")]
        line.append(row.ratio("balls_in_bins"))
        table.append(line + [value for scheme in SCHEMES for value in getattr(row, scheme)])
    return columns, table


def _claims(rows: list[Row], grid: Grid) -> None:
    def spread(other: str, chosen: list[Row]) -> str:
        ratios = np.array([row.ratio(other) for row in chosen])
        return f"{ratios.min():.3f} to {ratios.max():.3f}" if ratios.size else "-"

    worse = [
        f"(ε = {row.epsilon:g}, N/B̄ = {row.length}: {row.ratio('cyclic'):.3f})"
        for row in rows
        if row.ratio("cyclic") > 1.0
    ]
    several = [row for row in rows if row.length < grid.steps]
    single = [row for row in rows if row.length == grid.steps]
    compare(
        [
            ("Fig. 3, all settings", "never above 1", spread("balls_in_bins", rows)),
            ("Fig. 3, several epochs", "always below 1", spread("balls_in_bins", several)),
            ("Fig. 3, one epoch", "1", spread("balls_in_bins", single)),
            ("Fig. 2, all settings", "mostly below 1", spread("cyclic", rows)),
            ("Fig. 2, above 1 at", "low ε and short epochs", " ".join(worse) or "nowhere"),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--full", action="store_true", help="the paper's n, lengths and bands")
    options.add_argument("--exhaustive", action="store_true", help="try every pair of bands and b")
    options.add_argument("--importance", action="store_true", help="certify by importance sampling")
    options.add_argument("--seed", type=int, default=1, help="of the simulations")
    options.add_argument("--epsilons", type=float, nargs="+", help="default: .5, 1, 2, …, 16")
    options.add_argument("--lengths", type=int, nargs="+", help="epoch lengths to compute")
    chosen, watch = options.parse_args(arguments), Stopwatch()
    grid = PAPER if chosen.full else QUARTER
    if chosen.epsilons:
        grid = dataclasses.replace(grid, epsilons=tuple(chosen.epsilons))
    if chosen.lengths:
        grid = dataclasses.replace(grid, epoch_lengths=tuple(chosen.lengths))

    def show(row: Row) -> None:
        best = row.min_sep
        print(
            f"N/B̄ = {row.length:5d}, ε = {row.epsilon:4g}: {row.ratio('cyclic'):.3f} of cyclic, "
            f"{row.ratio('balls_in_bins'):.3f} of balls-in-bins (best: {best.bands} bands, "
            f"b = {best.min_sep}, σ = {best.sigma:.4f})",
            flush=True,
        )

    rows = compute(
        grid,
        seed=chosen.seed,
        exhaustive=chosen.exhaustive,
        importance=chosen.importance,
        finished=show,
    )
    suffix = ("_full" if chosen.full else "") + ("_importance" if chosen.importance else "")
    columns, table = _table(rows)
    write_table(
        chosen.output / f"min_sep_fig2_fig3{suffix}.json",
        columns,
        table,
        titles={
            "epoch_length": "steps an epoch",
            "epsilon": "ε",
            "ratio_to_cyclic": "error over that of cyclic Poisson",
            "ratio_to_balls_in_bins": "error over that of balls-in-bins",
        },
        script=__file__,
    )
    for other, number in FIGURES.items():
        _draw(rows, grid, other, chosen.output / f"min_sep_fig{number}{suffix}.png")
    _claims(rows, grid)
    print(f"took {watch}")


if __name__ == "__main__":
    main()
