"""Individual ε of DP-SGD by Rényi divergences and by privacy loss distributions.

Figure 1 of Koskela, Tobaben & Honkela, Individual Privacy Accounting with Gaussian Differential
Privacy, on MNIST (60,000 training rows), or without it on scikit-learn's digits (1,437).

    PYTHONPATH=. python scripts/paper/individual_fig1.py --mnist ROOT
    PYTHONPATH=. python scripts/paper/individual_fig1.py [--rows 1000] [--epochs 50]

MNIST is taken in the paper's setting: Poisson rate 300/60,000 = .005, σ = 2, C = 5, 50 epochs
(10,000 steps), δ = 1e-6, 1,000 rows at random. What the paper calls a small feedforward network is
one of 100 hidden ReLU units here, on pixels from 0 to 1. The learning rate is not stated either:
.05 was the best of .02, .05 and .1 on 6,000 training rows that were held out for that. The training
takes some minutes of one core; interrupted, it goes on from its checkpoint.

On digits all but C is kept (7.2 digits a batch), so that what can be spent is what could be there.
C is 10: at 5 (learning rate .0015) two norms in five were clipped. The network has 32 hidden ReLU
units; the rate was tried on the test set. Norms of the rows are taken at every step, drawn or not,
and rounded up by at most 1 % to a grid.

That Rényi divergences overstate small ε more holds on MNIST: in the least tenth of ε they show
2.07 times as much (median), in the largest 1.08 times. They overstate most where a small ε comes
with a few large norms, to which the large orders that it calls for are sensitive, and a digit that
is learnt early has those. On scikit-learn's digits it is 1.09 and 1.08 times, and 1.11 at most.
Orders up to 63 alone could not show less than .14.

The μ-GDP bound of one row is the least at ε = 0 and 64 values of δ down to 1e-10, the dots of the
picture. Its ratio to δ is drawn in between as well, and beyond, where nothing is claimed.

The values written are those of rows of a public data set; of private data they would be private.
They take the gradients for given in advance, as the figure's do: for training, whose gradients
depend on what was released, they are estimates and no guarantees.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from opacus.accountants import RDPAccountant

from dptrain.accounting.losses import gaussian
from dptrain.accounting.poisson import poisson_curve
from dptrain.contrib.individual import NormGrid
from dptrain.core import Adjacency
from dptrain.reporting import figure_of, save
from scripts.paper.common import Stopwatch, compare, parser, positive, short, write_csv
from scripts.paper.individual_losses import IndividualPLD, IndividualRenyi
from scripts.paper.norm_history import Digits, NormHistory, Training

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.uint32]

FLOOR = 1e-10  # least δ of the μ-GDP bound
DIGITS_DEFAULTS = {"clip": 10.0, "learning_rate": 0.001, "width": 32}
MNIST_DEFAULTS = {"clip": 5.0, "learning_rate": 0.05, "width": 100}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--mnist", type=pathlib.Path, metavar="ROOT", help="folder of MNIST")
    options.add_argument("--rows", type=int, default=1000, help="of the right panel")
    options.add_argument("--epochs", type=positive, default=50.0)
    options.add_argument("--probability", type=positive, default=0.005)
    options.add_argument("--sigma", type=positive, default=2.0)
    options.add_argument("--clip", type=positive, help="default: 5 on MNIST, 10 on digits")
    options.add_argument("--learning-rate", type=positive, help="default: .05 on MNIST, else .001")
    options.add_argument("--width", type=int, help="hidden units; default: 100 on MNIST, else 32")
    options.add_argument("--delta", type=positive, default=1e-6)
    options.add_argument("--points", type=int, default=300, help="of the curves")
    options.add_argument("--levels", type=int, default=64, help="δ at which the bound is sought")
    options.add_argument("--seed", type=int, default=1)
    chosen, watch = options.parse_args(arguments), Stopwatch()
    on_mnist = chosen.mnist is not None
    defaults = MNIST_DEFAULTS if on_mnist else DIGITS_DEFAULTS
    for option, value in defaults.items():
        if getattr(chosen, option) is None:
            setattr(chosen, option, value)
    data = Digits.of_mnist(chosen.mnist) if on_mnist else Digits.of_scikit_learn()
    name = "individual_fig1_mnist" if on_mnist else "individual_fig1"
    torch.set_num_threads(1)  # the layers are too small to share
    steps = max(1, round(chosen.epochs / chosen.probability))
    training = Training(
        probability=chosen.probability,
        noise_multiplier=chosen.sigma,
        max_grad_norm=chosen.clip,
        steps=steps,
        learning_rate=chosen.learning_rate,
        width=chosen.width,
        seed=chosen.seed,
    )
    grid = NormGrid(smallest=1e-4, ratio=1.01)
    history = NormHistory.of(
        training,
        rows=chosen.rows,
        grid=grid,
        data=data,
        checkpoint=chosen.output / f"{name}.checkpoint" if on_mnist else None,
    )

    q, sigma, delta = chosen.probability, chosen.sigma, chosen.delta
    accountant = IndividualPLD(probability=q, noise_multiplier=sigma, grid=grid)
    renyi_accountant = IndividualRenyi(probability=q, noise_multiplier=sigma, grid=grid)
    pld = accountant.epsilon(history.counts, delta)
    renyi = renyi_accountant.epsilon(history.counts, delta)
    worst = poisson_curve(
        Adjacency.ZERO_OUT, probability=q, steps=steps, sensitivity=1.0
    ).epsilon(sigma, delta)  # fmt: skip
    picked = int(np.random.default_rng(chosen.seed).integers(len(history.rows)))
    curve = _Curve(accountant, history.counts[picked], chosen.points, chosen.levels)

    write_csv(
        chosen.output / f"{name}.csv",
        ("row", "epsilon_pld", "epsilon_renyi"),
        zip(history.rows.tolist(), pld.tolist(), renyi.tolist(), strict=True),
    )
    write_csv(
        chosen.output / f"{name}_curve.csv",
        ("epsilon", "delta", "delta_gdp", "compared"),
        zip(
            curve.epsilon.tolist(), curve.delta.tolist(), curve.gdp.tolist(),
            curve.compared.astype(int).tolist(), strict=True,
        ),
    )  # fmt: skip
    figure, (left, right) = figure_of(2)
    figure.get_layout_engine().set(wspace=0.06)
    _draw_curve(left, curve, int(history.rows[picked]))
    _draw_histograms(right, pld, renyi, worst, delta)
    figure.suptitle(
        f"DP-SGD on {data.name}, a public data set: {steps:,} steps, q = {q:g}, "
        f"σ = {sigma:g}, C = {chosen.clip:g}",
        fontsize=10,
    )
    save(figure, chosen.output / f"{name}.png")

    ratio, at = renyi / pld, f"at δ = {short(delta)}"
    low, high = pld <= np.quantile(pld, 0.1), pld >= np.quantile(pld, 0.9)
    popular = IndividualRenyi(
        probability=q, noise_multiplier=sigma, grid=grid, orders=RDPAccountant.DEFAULT_ALPHAS
    )
    one_tiny_norm = np.eye(1, len(grid.values), 1, dtype=np.uint32)
    least = float(popular.epsilon(one_tiny_norm, delta)[0])
    by_gdp = gaussian.epsilon(delta, curve.mu)
    compare(
        [
            ("test accuracy", "-", f"{history.accuracy:.3f}"),
            ("norms at the clip", "-", f"{history.counts[:, -1].sum() / history.counts.sum():.1%}"),
            (f"worst-case ε {at}", "-", f"{worst:.4f}"),
            ("individual ε, PLD: 0, .1, .5, .9, 1 quantile", "-", _quantiles(pld)),
            ("individual ε, Rényi", "-", _quantiles(renyi)),
            ("Rényi over PLD: least, median, most", "PLD smaller", _quantiles(ratio, 0, 0.5, 1)),
            (
                "the same, medians of the least and of the largest tenth of ε",
                "more so at small ε",
                f"{np.median(ratio[low]):.4f}  {np.median(ratio[high]):.4f}",
            ),
            ("least ε that orders up to 63 can show", "-", f"{least:.3f}"),
            ("μ of the row drawn", "-", f"{curve.mu:.5f}"),
            (
                f"its μ-GDP bound over its δ, down to δ = {short(FLOOR)}",
                "an approximation",
                f"{curve.slack.min():.6f} to {curve.slack.max():.4f}",
            ),
            (f"its ε {at}, and by μ-GDP", "-", f"{pld[picked]:.5f}  {by_gdp:.5f}"),
        ]
    )
    print(f"took {watch}")


class _Curve:
    """δ(ε) of one row and of its least μ-GDP bound.

    Attributes:
        mu: of the bound.
        epsilon: at which the curves are computed.
        compared: which of them are those at which the bound was sought.
        delta: of the row, the larger of both directions.
        gdp: of the bound.
        slack: bound over δ, where δ is at least the floor.
    """

    def __init__(self, accountant: IndividualPLD, counts: Counts, points: int, levels: int) -> None:
        row = counts[None]
        self.mu = float(accountant.gaussian_mu(row, floor=FLOOR, levels=levels)[0])
        share = np.arange(1, levels + 1) / levels
        wanted = float(accountant.delta(row, 0.0)[0]) ** (1.0 - share) * FLOOR**share
        at = accountant.epsilon(row.repeat(levels, axis=0), wanted)
        self.epsilon: Array = np.unique([0.0, *at, *np.linspace(0.0, 1.1 * at.max(), points)])
        self.compared = np.isin(self.epsilon, [0.0, *at])
        self.delta: Array = accountant.delta(row.repeat(self.epsilon.size, axis=0), self.epsilon)
        # Both are upper bounds of δ, a thousandth apart.
        places = np.searchsorted(self.epsilon, at)
        self.delta[places] = np.minimum(self.delta[places], wanted)
        self.gdp: Array = gaussian.delta(self.epsilon, self.mu)
        self.slack: Array = (self.gdp / self.delta)[self.epsilon <= at.max()]


def _draw_curve(ax: Any, curve: _Curve, row: int) -> None:
    ax.plot(
        curve.epsilon, curve.gdp, "--", color="C1", label=f"its μ-GDP bound, μ = {curve.mu:.4f}"
    )
    ax.plot(curve.epsilon, curve.delta, "-", color="C0", label=f"training row {row}")
    ax.set(yscale="log", xlabel="ε", ylabel="δ")
    ax.set_xlim(0.0, curve.epsilon[-1])
    ax.grid(visible=True, alpha=0.3)
    beside, ratio = ax.twinx(), curve.gdp / curve.delta
    beside.plot(curve.epsilon, ratio, "-", color="gray", linewidth=0.8)
    beside.plot(
        curve.epsilon[curve.compared], ratio[curve.compared], ".", color="gray",
        label=f"bound / δ (right axis), compared down to δ = {short(FLOOR)}",
    )  # fmt: skip
    beside.set_ylim(min(0.98, ratio.min()), 1.0 + 2.2 * (curve.slack.max() - 1.0))
    beside.set_ylabel("bound / δ", color="gray")
    beside.tick_params(axis="y", colors="gray")
    handles, labels = (a + b for a, b in zip(*map(_legend, (ax, beside)), strict=True))
    ax.legend(handles, labels, loc="lower left", fontsize=8)


def _legend(ax: Any) -> tuple[list[Any], list[str]]:
    return ax.get_legend_handles_labels()


def _draw_histograms(ax: Any, pld: Array, renyi: Array, worst: float, delta: float) -> None:
    edges = np.linspace(0.0, 1.001 * renyi.max(), 61)
    for name, values, color in (("PLD", pld, "C0"), ("Rényi divergences", renyi, "C1")):
        counts = np.histogram(values, edges)[0]
        ax.stairs(counts, edges, fill=True, color=color, alpha=0.25)
        label = f"{name}: median {np.median(values):.3f}"
        ax.stairs(counts, edges, color=color, linewidth=1.5, label=label)
    ax.axvline(worst, color="black", linestyle=":", label=f"worst case, PLD: {worst:.3f}")
    ax.set_xlim(0.0)
    ax.set_ylim(0.0, 1.25 * ax.get_ylim()[1])  # room for the legend
    ax.set_xlabel(f"individual ε at δ = {short(delta)}")
    ax.set_ylabel("training rows")
    ax.grid(visible=True, alpha=0.3)
    ax.set_axisbelow(True)
    ax.legend(fontsize=8)


def _quantiles(values: Array, *levels: float) -> str:
    return "  ".join(f"{v:.4f}" for v in np.quantile(values, levels or (0, 0.1, 0.5, 0.9, 1)))


if __name__ == "__main__":
    main()
