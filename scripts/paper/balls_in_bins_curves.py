"""The common part of figures 2 and 3 of the balls-in-bins paper: σ over ε of accountants."""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp
from tqdm import tqdm

from dptrain.accounting.balls_in_bins import AllocationPLD, BallsInBinsRenyi, ConditionalComposition
from dptrain.accounting.base import DeterministicAccountant
from dptrain.accounting.renyi import gram_matrix
from dptrain.core import Array
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import figure_of, save
from dptrain.sampling import BallsInBins
from dptrain.strategies import Strategy
from scripts.paper.common import compare, parser, positive, write_csv
from scripts.paper.paper_budget import paper_budget_epsilon

RENYI, CONDITIONAL = "Rényi", "conditional composition"
PAPER_BUDGET = "the paper's budget (no bound)"
ALLOCATION, MONTE_CARLO = "allocation PLD", "Monte Carlo (estimate)"
_STYLES = {
    RENYI: ("C0", "o-"),
    CONDITIONAL: ("C1", "s-"),
    PAPER_BUDGET: ("C3", ":"),
    ALLOCATION: ("C2", "^-"),
    MONTE_CARLO: ("black", "x--"),
}
# Of ε in pictures and comparisons.
_SHOWN = (0.05, 10.0)
_COMPARED = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One picture: a strategy, b bins, k epochs (n = b·k), and its title."""

    title: str
    strategy: Callable[[], Strategy]
    bins: int = 100
    epochs: int = 1

    def mechanism(self, sigma: float = 1.0) -> MatrixMechanism:
        """The mechanism at σ; the number of examples does not matter to any accountant."""
        scheme = BallsInBins(bins=self.bins, epochs=self.epochs, dataset_size=10_000)
        strategy = self.strategy().bind(scheme.steps)
        return MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)


# ε(σ) with what it may be at least and at most (the same for a bound), by curve.
Points = list[tuple[float, float, float, float]]


class Estimator:
    """Estimates δ(ε) of (1/b) Σ_i N(m_i, σ²I) and N(0, σ²I) by importance sampling; no bound.

    Losses without weights (``BallsInBinsLosses``) meet δ = 1e-5 once in a hundred thousand
    draws where ε is large. Here y is drawn from an even mixture R of laws under which they are
    common: bins with longer means (remove) and Gaussians moved along ± Σ m_i; weighted by P/R or
    Q/R. Only the numbers <m_i, y> are drawn, of covariance σ²G, G the Gram matrix of the m_i.
    """

    def __init__(self, gram: Array, sigma: float, *, remove: bool, samples: int) -> None:
        self.remove, bins = remove, gram.shape[0]
        rng = np.random.default_rng([0, int(remove)])
        values, vectors = np.linalg.eigh(gram / sigma**2)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        square, row, total = np.diag(gram), gram.sum(axis=1), float(gram.sum())
        # Means scale·m_i + along·Σm of the components of R, in standard deviations.
        norm, length = float(np.sqrt(square.max())) / sigma, math.sqrt(total) / sigma
        scales = [(1.0 + t / norm, 0.0) for t in (0.0, 1.5, 3.0, 4.5)] if remove else [(0.0, 0.0)]
        scales += [(float(remove), (t if remove else -t) / length) for t in (1.5, 3.0, 4.5)]
        losses, weights = [], []
        for start in range(0, samples, 20_000):
            count = min(20_000, samples - start)
            bin_of, part = rng.integers(bins, size=count), rng.integers(len(scales), size=count)
            scale, along = np.array(scales)[part].T
            centre = scale[:, None] * gram[bin_of] + along[:, None] * row
            z = centre / sigma**2 + rng.standard_normal((count, bins)) @ root.T
            loss = logsumexp(z - square / (2 * sigma**2), axis=1) - math.log(bins)
            mixture = []
            for scale_of, along_of in scales:
                length_of = scale_of**2 * square + 2 * scale_of * along_of * row
                exponent = scale_of * z - (length_of + along_of**2 * total) / (2 * sigma**2)
                shift = along_of * z.sum(axis=1)
                mixture.append(logsumexp(exponent, axis=1) - math.log(bins) + shift)
            log_mixture = logsumexp(mixture, axis=0) - math.log(len(scales))
            losses.append(loss if remove else -loss)
            weights.append(np.exp((loss if remove else 0.0) - log_mixture))
        self.losses, self.weights = np.concatenate(losses), np.concatenate(weights)

    def delta(self, epsilon: float) -> tuple[float, float]:
        """δ at ε and its standard error."""
        terms = -np.expm1(np.minimum(epsilon - self.losses, 0.0)) * self.weights
        return float(terms.mean()), float(terms.std() / math.sqrt(terms.size))

    def epsilon(self, delta: float) -> float:
        """ε at which the estimate of δ is this one; 0 if it is less at ε = 0."""
        if self.delta(0.0)[0] <= delta:
            return 0.0
        top = float(self.losses.max())
        return float(brentq(lambda epsilon: self.delta(epsilon)[0] - delta, 0.0, top, rtol=1e-6))


def estimated(gram: Array, sigma: float, delta: float, samples: int) -> Points:
    """ε at δ, the larger of both directions, and at δ and two standard errors less and more."""
    found = []
    for remove in (True, False):
        each = Estimator(gram, sigma, remove=remove, samples=samples)
        epsilon = each.epsilon(delta)
        error = min(2.0 * each.delta(epsilon)[1], 0.9 * delta)
        found.append((epsilon, each.epsilon(delta + error), each.epsilon(delta - error)))
    return [(sigma, *max(found))]


def points_of(
    panel: Panel, *, delta: float, sigmas: Sequence[float], samples: int
) -> dict[str, Points]:
    """(σ, ε, its least, its most) of every curve of a panel."""
    mechanism = panel.mechanism()
    accountants: dict[str, DeterministicAccountant] = {
        RENYI: BallsInBinsRenyi(),
        CONDITIONAL: ConditionalComposition(),
    }
    if AllocationPLD().refusal(mechanism) is None:
        accountants[ALLOCATION] = AllocationPLD()
    curves = {name: each.curve(mechanism) for name, each in accountants.items()}
    gram = gram_matrix(mechanism.strategy, steps=mechanism.steps, bins=panel.bins)
    found: dict[str, Points] = {name: [] for name in (*curves, PAPER_BUDGET, MONTE_CARLO)}
    for sigma in tqdm(sigmas, desc=panel.title, unit="σ", delay=2.0, leave=False):
        noisy = mechanism.with_noise(sigma)
        for name, curve in curves.items():
            epsilon = curve.epsilon(sigma, delta)
            found[name].append((sigma, epsilon, epsilon, epsilon))
        epsilon = paper_budget_epsilon(noisy, delta=delta)
        found[PAPER_BUDGET].append((sigma, epsilon, epsilon, epsilon))
        found[MONTE_CARLO] += estimated(gram, sigma, delta, samples)
    return found


def sigma_at(points: Points, epsilon: float) -> float:
    """Least σ at which a curve meets ε, log σ linear in log ε between points; NaN beyond them.

    A bound may rise with σ, privacy does not: what is shown at a smaller σ holds at larger ones.
    """
    sigma, value = np.array([each[:2] for each in points]).reshape(-1, 2).T
    least = np.minimum.accumulate(value)
    usable = (least > 0) & np.isfinite(least)
    if not usable.any() or not least[usable][-1] <= epsilon <= least[usable][0]:
        return math.nan
    x, y = np.log(least[usable][::-1]), np.log(sigma[usable][::-1])
    return float(np.exp(np.interp(math.log(epsilon), x, y)))


def crossing(found: Mapping[str, Points]) -> str:
    """Below which ε conditional composition needs less noise than the Rényi accountant."""
    grid = np.geomspace(*_SHOWN, 400).tolist()
    ratio = np.array(
        [sigma_at(found[CONDITIONAL], each) / sigma_at(found[RENYI], each) for each in grid]
    )
    known = ~np.isnan(ratio)
    if not known.any():
        return "unknown: the curves share no ε"
    better = np.nonzero(known & (ratio < 1.0))[0]
    if better.size == 0:
        return f"not down to ε = {grid[int(np.argmax(known))]:.2g}"
    return f"for ε below about {grid[better[-1]]:.2g}"


def draw(results: Mapping[str, Mapping[str, Points]], delta: float, path: pathlib.Path) -> None:
    """σ over ε, one picture for each panel."""
    figure, _ = figure_of(1)  # says so if matplotlib is missing
    from matplotlib.ticker import LogLocator, NullFormatter

    figure.clear()
    columns = min(len(results), 3 if len(results) not in (2, 4) else 2)
    rows = -(-len(results) // columns)
    figure.set_size_inches(4.8 * columns if columns > 1 else 6.4, 4.0 * rows + 0.5)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, (title, found) in zip(axes, results.items(), strict=False):
        for name, points in found.items():
            shown = [(p[1], p[0]) for p in points if _SHOWN[0] <= p[1] <= _SHOWN[1]]
            if shown:
                color, style = _STYLES[name]
                ax.plot(*zip(*shown, strict=True), style, color=color, label=name, markersize=4)
        ax.set(xscale="log", yscale="log", xlabel="ε", title=title, xlim=_SHOWN)
        ax.set_ylabel(f"noise multiplier σ at δ = {delta:g}")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        ax.grid(visible=True, which="both", alpha=0.25)
    for ax in axes[len(results) :]:
        ax.remove()
    handles = {
        label: handle
        for ax in axes[: len(results)]
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    save(figure, path)


def say(title: str, found: Mapping[str, Points]) -> None:
    """Print σ of every curve at a few ε, and what becomes of the paper's statements."""
    print(f"\n{title}: σ at ε =" + "".join(f"{epsilon:>9g}" for epsilon in _COMPARED))
    for name, points in found.items():
        values = "".join(f"{sigma_at(points, each):>9.4f}" for each in _COMPARED)
        print(f"  {name:<{len(title) + 11}}" + values.replace("nan", "  -"))

    def ratio(epsilon: float) -> str:
        value = sigma_at(found[RENYI], epsilon) / sigma_at(found[MONTE_CARLO], epsilon)
        return "-" if math.isnan(value) else f"{value:.3f}"

    compare(
        [
            ("σ of Rényi over Monte Carlo, ε = 2", "about 1 (ε ≥ 2-4)", ratio(2.0)),
            ("σ of Rényi over Monte Carlo, ε = 4", "about 1 (ε ≥ 2-4)", ratio(4.0)),
            ("conditional composition below Rényi", "for ε ≤ 1", crossing(found)),
        ]
    )


def options_of(doc: str | None, panels: Mapping[str, Panel], default: str) -> Any:
    """The command line of such a figure."""
    options = parser(doc)
    options.add_argument("--panels", default=default, help=f"letters of {''.join(panels)}")
    options.add_argument("--full", action="store_true", help="all panels, 24 σ, 4e5 samples")
    options.add_argument("--points", type=int, help="number of σ; by default 10, or 24")
    options.add_argument("--samples", type=int, help="a direction and σ; by default 4e4, or 4e5")
    options.add_argument("--bins", type=int, help="another number of bins, in all panels")
    options.add_argument("--delta", type=positive, default=1e-5)
    return options


def run(
    name: str, options: argparse.ArgumentParser, panels: Mapping[str, Panel], arguments: Any
) -> None:
    """Compute, write, draw and say all of a figure's chosen panels."""
    chosen = options.parse_args(arguments)
    letters = "".join(panels) if chosen.full else chosen.panels
    if unknown := set(letters) - set(panels):
        options.error(f"--panels: no panel {''.join(sorted(unknown))}; use {''.join(panels)}")
    count = chosen.points or (24 if chosen.full else 10)
    samples = chosen.samples or (400_000 if chosen.full else 40_000)
    results = {}
    for letter in letters:
        panel = panels[letter]
        if chosen.bins:
            title = f"{panel.title}; {chosen.bins} bins"
            panel = dataclasses.replace(panel, bins=chosen.bins, title=title)
        # One epoch has norms of about 1, k epochs of √k.
        sigmas = math.sqrt(panel.epochs) * np.geomspace(0.4, 40.0, count)
        results[f"({letter}) {panel.title}"] = points_of(
            panel, delta=chosen.delta, sigmas=sigmas.tolist(), samples=samples
        )
    rows = [
        (title, curve, *point)
        for title, found in results.items()
        for curve, points in found.items()
        for point in points
    ]
    header = ("panel", "curve", "sigma", "epsilon", "epsilon_low", "epsilon_high")
    write_csv(chosen.output / f"{name}.csv", header, rows)
    draw(results, chosen.delta, chosen.output / f"{name}.png")
    for title, found in results.items():
        say(title, found)
