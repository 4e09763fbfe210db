"""Savings of i.i.d. sampling for the square root of the prefix sums, by the number of steps.

Figure 8 of Choquette-Choo, Ganesh, Steinke & Thakurta, Privacy Amplification for Matrix Mechanisms:
ε without amplification and with one participation, over ε with p = 1/n, at σ = c·‖C e_1‖ and
δ = 1e-6, n = 2, 4, …, 128. The text gives the least squares line in x = sqrt(log2 n + 1).

    PYTHONPATH=. python scripts/paper/matrix_fig8.py [--largest 128] [--full]

"paper's tails" is MMCC with the paper's own tail bounds (its algorithm 2 and appendix F.3) on the
same rest of the code, "coarse C" with its entries rounded up to a 64th of the largest, not a 256th.
With --full the dots go on to n = 1024 (the paper stops at 128).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from dptrain.accounting.losses import gaussian
from dptrain.accounting.mmcc import MMCC
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import figure_of, save
from dptrain.sampling import Poisson
from dptrain.strategies import SquareRoot
from scripts.paper.common import Stopwatch, compare, parser, positive, write_table
from scripts.paper.mmcc_of_the_paper import paper_epsilon

COARSE = 64  # the paper's own grid is not stated

# c: (ε without amplification, slope, intercept) as the figure's captions say.
STATED = {10: (0.397, -0.0313, 1.1625), 20: (0.189, 0.2053, 0.8877), 40: (0.0901, 0.3452, 0.7164)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--delta", type=positive, default=1e-6)
    options.add_argument("--largest", type=int, default=128, help="largest n, a power of two")
    options.add_argument("--full", action="store_true", help="up to n = 1024")
    chosen, watch = options.parse_args(arguments), Stopwatch()
    delta, largest = chosen.delta, 1024 if chosen.full else chosen.largest
    if largest < 4:
        options.error(f"--largest={largest}: a line needs two points; use 4 or more")
    sizes = [2**i for i in range(1, largest.bit_length())]

    rows = []
    with tqdm(total=3 * len(sizes), desc="MMCC", delay=2.0, leave=False) as bar:
        for factor in STATED:
            single = gaussian.epsilon(delta, 1 / factor)
            for n in sizes:
                strategy = SquareRoot().bind(n)
                sigma = factor * float(np.linalg.norm(strategy.first_column(n)))
                scheme = Poisson(probability=1 / n, steps=n, dataset_size=10**5)
                mechanism = MatrixMechanism(
                    scheme=scheme, strategy=strategy, noise_multiplier=sigma
                )
                ours = MMCC().guarantee(mechanism, delta=delta).epsilon
                dense = strategy.columns(n, np.arange(n))
                theirs = [
                    paper_epsilon(dense, probability=1 / n, sigma=sigma, delta=delta, grid=grid)
                    for grid in (256, COARSE)
                ]
                ratios = (single / each for each in (ours, *theirs))
                rows.append((factor, n, sigma, single, ours, *theirs, *ratios))
                bar.update()
    kinds = ("", "_papers_tails", "_papers_tails_coarse")
    header = ["c", "n", "sigma", "unamplified", *(f"epsilon{kind}" for kind in kinds)]
    header += [f"ratio{kind}" for kind in kinds]
    write_table(
        chosen.output / "matrix_fig8.json",
        header,
        rows,
        titles={
            "c": "c",
            "n": "n",
            "sigma": "σ",
            "unamplified": "ε, unamplified",
            "epsilon": "ε",
            "ratio": "ratio",
            "ratio_papers_tails": "ratio, the paper's tails",
        },
        script=__file__,
    )

    x = np.sqrt(np.log2(sizes) + 1)
    in_figure = np.array(sizes) <= 128
    figure, _ = figure_of(1)
    figure.clear()
    figure.set_size_inches(13.0, 4.4)
    compared = []
    for ax, (factor, (single, slope, intercept)) in zip(
        figure.subplots(1, 3), STATED.items(), strict=True
    ):
        mine = [row for row in rows if row[0] == factor]
        series = {"ours": np.array([r[7] for r in mine])}
        series["paper's tails"] = np.array([r[8] for r in mine])
        series["paper's tails, coarse C"] = np.array([r[9] for r in mine])
        for (label, values), style in zip(series.items(), ("o-", "s--", "^-."), strict=True):
            ax.plot(x, values, style, label=label, markersize=4)
        line = f"y = {slope:+.4f} x + {intercept:.4f}"
        ax.plot(x, slope * x + intercept, ":", color="black", label=f"the paper's fit: {line}")
        ax.set(xlabel="sqrt(log2 n + 1)", ylabel="ε unamplified / ε amplified")
        ax.set_title(f"c = {factor} (ε = {mine[0][3]:.3g} unamplified)", fontsize=10)
        ax.grid(visible=True, alpha=0.3)
        low, high = ax.get_ylim()
        ax.set_ylim(low, high + 0.35 * (high - low))  # room for the legend
        ax.legend(fontsize=8, loc="upper left")
        compared.append((f"c = {factor}: ε unamplified", f"{single:g}", f"{mine[0][3]:.4f}"))
        for label, values in series.items():
            fit = np.polyfit(x[in_figure], values[in_figure], 1)
            stated, found = f"{slope:+.4f} x + {intercept:.4f}", f"{fit[0]:+.4f} x + {fit[1]:.4f}"
            compared.append((f"c = {factor}: least squares, {label}", stated, found))
        ends = [f"{slope * x[k] + intercept:.3f}" for k in (0, -1)]
        found = ", ".join(f"{values[0]:.3f} .. {values[-1]:.3f}" for values in series.values())
        what = f"c = {factor}: at n = 2 .. {sizes[-1]} (in that order)"
        compared.append((what, " .. ".join(ends) + " (fit)", found))
    save(figure, chosen.output / "matrix_fig8.png")
    compare(compared)
    print(
        "Where ours lies above the paper's line: our tail bound on what earlier rows tell does not "
        "pay for\nnoise and coins to be extreme at once. What is left with the paper's tails is as "
        f"large as that of a\ngrid of 1/{COARSE} of the largest entry; the paper does not state "
        f"its grids, so that is a guess.\ntook {watch}"
    )


if __name__ == "__main__":
    main()
