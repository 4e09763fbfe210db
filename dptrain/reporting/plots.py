"""Plots of runs and of attribution graphs. They need matplotlib."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from dptrain.accounting import Profile, TradeOff
from dptrain.core import Guarantee, Kind
from dptrain.reporting.published_profile import as_shown, chance, chords
from dptrain.sampling import GraphPartition
from dptrain.sampling.users import GraphStatistics

LEAST_DELTA = 1e-16
"""Where the axis of δ ends: nobody asks for less, and doubles have little to say there."""


def plot_privacy(profile: Profile, guarantee: Guarantee, path: str | pathlib.Path) -> None:
    """Draw δ(ε) of a run in both directions, with the guarantee as a point, to an image file.

    The profile is shown as ``as_shown`` says, with the chords between confidence bounds that hold
    at once.

    The axis of δ ends at 1e-16, or a tenth of the guarantee's δ if that is smaller: curves that
    fall below leave the picture there, and the axis of ε ends where the last one does.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
        ValueError: if the profile has no δ in the picture.
    """
    figure, axes = figure_of(1)
    ax = axes[0]
    profile = chords(as_shown(profile, guarantee))
    least = LEAST_DELTA
    if math.isfinite(guarantee.epsilon) and guarantee.delta > 0:
        least = min(least, guarantee.delta / 10)
    if not (profile.delta > least).any():
        raise ValueError(f"every δ of the profile is below {least:g}: use a grid of smaller ε")
    for values, label, style in (
        (profile.remove, "contribution removed", "-"),
        (profile.add, "contribution added", "--"),
    ):
        positive = np.where(values > 0, values, math.nan)
        ax.plot(profile.epsilon, positive, style, label=label, linewidth=1.8)
    if math.isfinite(guarantee.epsilon):
        ax.plot(
            guarantee.epsilon,
            guarantee.delta,
            "o",
            color="black",
            zorder=5,
            label=f"guarantee: ε = {guarantee.epsilon:.4g}, δ = {guarantee.delta:.3g}",
        )
    ax.set_yscale("log")
    drawn = np.concatenate([profile.remove, profile.add, [guarantee.delta or 1.0]])
    ax.set_ylim(bottom=max(least, drawn[drawn > 0].min() / 2), top=1.5)
    # A grid may go on far beyond the ε at which the last curve leaves the picture.
    inside = np.flatnonzero(profile.delta > least)[-1]
    last = profile.epsilon[min(inside + 1, len(profile.epsilon) - 1)]
    if math.isfinite(guarantee.epsilon):
        last = max(last, 1.05 * guarantee.epsilon)
    ax.set_xlim(0, last)
    ax.set_xlabel("ε (natural logarithm)")
    ax.set_ylabel("δ")
    ax.grid(visible=True, which="major", alpha=0.3)
    ax.legend(title="neighboring data sets differ by")
    curve = {Kind.CONFIDENCE: "upper confidence bounds", Kind.ESTIMATE: "estimates"}.get(
        profile.kind, profile.kind.value
    )
    curves = f" curves: {curve}"
    if profile.failure_probability is not None:
        curves = f"\ncurves: {curve}, too low somewhere with probability ≤ {chance(profile)}"
    ax.set_title(
        f"Privacy of the run: {guarantee.scheme['type']} batches, {guarantee.strategy['type']} "
        f"noise,\nσ = {guarantee.noise_multiplier:.4g}, {guarantee.steps_planned} steps; "
        f"point: {guarantee.kind.value};{curves}",
        fontsize=10,
    )
    save(figure, path)


def plot_attacks(limits: TradeOff, path: str | pathlib.Path) -> None:
    """Draw the true positive rate that tests can reach against the false positive rate.

    Beside the bound: what guessing reaches, and the Gaussian curve of μ down to its floor.

    Args:
        limits: the trade-off.
        path: image file; its suffix chooses the format.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
    """
    figure, axes = figure_of(1)
    ax = axes[0]
    least = min(limits.floor, 1e-3)
    rates = np.unique(np.concatenate([np.geomspace(least, 1.0, 400), np.linspace(least, 1.0, 200)]))
    reached = limits.true_positive_rate(rates)
    ax.plot(rates, reached, color="tab:red", linewidth=1.8, label="bound on every test")
    if limits.mu is not None:
        inside = np.flatnonzero((rates >= limits.floor) & (1.0 - reached >= limits.floor))
        ax.plot(
            rates[inside],
            ndtr(ndtri(rates[inside]) + limits.mu),
            "--",
            color="tab:blue",
            label=f"μ-GDP, μ = {limits.mu:.4g} (regret {limits.regret:.1e})",
        )
    ax.plot(rates, rates, ":", color="dimgray", label="guessing")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(least, 1.0)
    ax.set_ylim(least, 1.3)
    ax.set_xlabel("false positive rate")
    ax.set_ylabel("true positive rate")
    ax.grid(visible=True, which="major", alpha=0.3)
    ax.legend(loc="lower right")
    ax.set_title(
        f"What a membership test can reach\n(δ(ε) by {limits.accountant}: {limits.kind.value})",
        fontsize=10,
    )
    save(figure, path)


_SPLITS = (
    ("train", "training batches (not for release)", "tab:blue"),
    ("test", "held-out test set", "tab:orange"),
    ("held-out", "held out of the training set (not for release)", "tab:orange"),
)


def plot_curves(metrics: list[dict[str, Any]], path: str | pathlib.Path) -> None:
    """Draw loss and accuracy over the steps of a run to an image file; macro AUC if there is one.

    The training curve is computed on raw examples, so the picture is for the trainer: it says so.

    Args:
        metrics: records with ``step``, ``split`` (``"train"``, ``"test"``, or ``"held-out"`` for a
            part that was taken out of the training data), ``loss``, ``accuracy`` and possibly
            ``macro_auc``, for instance the lines of a metrics.jsonl.
        path: image file; its suffix chooses the format.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
        ValueError: if there is no record.
    """
    if not metrics:
        raise ValueError("metrics=[]: there is nothing to draw")
    labels = {"loss": "cross-entropy (nats)", "accuracy": "accuracy"}
    if any("macro_auc" in record for record in metrics):
        labels["macro_auc"] = "macro-averaged AUC"
    figure, axes = figure_of(len(labels))
    for ax, (name, label) in zip(axes, labels.items(), strict=True):
        for split, description, color in _SPLITS:
            records = [r for r in metrics if r["split"] == split and name in r]
            if not records:
                continue
            steps = np.array([r["step"] for r in records])
            values = np.array([r[name] for r in records], dtype=np.float64)
            if split == "train":
                ax.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
                values = _smooth(values)
                ax.plot(steps, values, color=color, label=description)
            else:
                ax.plot(steps, values, "o-", color=color, markersize=4, label=description)
        ax.set_xlabel("step")
        ax.set_ylabel(label)
        ax.set_xlim(left=0)
        ax.grid(visible=True, alpha=0.3)
        ax.legend()
    axes[0].set_ylim(0, 1.05 * axes[0].get_ylim()[1])
    axes[1].set_ylim(0, 1)
    for ax in axes[2:]:
        ax.set_ylim(min(0.5, ax.get_ylim()[0]), 1)  # .5 is what guessing has
    names = "Loss, accuracy and macro AUC" if len(labels) > 2 else "Loss and accuracy"
    figure.suptitle(f"{names}; training curves are smoothed over the last steps", fontsize=10)
    save(figure, path)


def plot_graph(
    statistics: GraphStatistics,
    path: str | pathlib.Path,
    partition: GraphPartition | None = None,
) -> None:
    """Draw examples per user before and after bounding, and neighborhood sizes, to an image file.

    With a partition, also what it had to cut: the sizes of connected components against that of a
    part, and how many examples every slot has and how many were dropped.

    Args:
        statistics: of the bounded graph.
        path: image file; its suffix chooses the format.
        partition: of the same graph, with its slots.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
    """
    figure, (left, right, *more) = figure_of(2 if partition is None else 4)
    if partition is not None:
        _draw_partition(partition, *more)
    before, after = statistics.examples_per_user_before, statistics.examples_per_user
    left.plot(
        before.values, before.counts, ".", color="dimgray", markersize=5, zorder=4, label="before"
    )
    left.vlines(after.values, 0.5, after.counts, color="tab:blue", linewidth=1.5)
    left.plot(after.values, after.counts, "o", color="tab:blue", label="bounded, copies counted")
    left.axvline(statistics.k, color="black", linestyle=":", label=f"bound k = {statistics.k}")
    left.set_xlabel("examples of a user")
    left.set_ylabel("users")
    sizes = statistics.neighbors
    right.vlines(sizes.values, 0.5, sizes.counts, color="tab:orange", linewidth=1.5)
    right.plot(sizes.values, sizes.counts, "o", color="tab:orange", markersize=4)
    right.axvline(
        sizes.mean, color="black", linestyle="--", linewidth=1, label=f"mean {sizes.mean:.4g}"
    )
    if statistics.max_neighbors is not None:
        right.axvline(
            statistics.max_neighbors,
            color="black",
            linestyle=":",
            label=f"bound {statistics.max_neighbors}",
        )
    right.set_xlabel("neighborhood |N(e)| of a kept example (itself included)")
    right.set_ylabel("examples, copies counted")
    left.set_xscale("log")
    if sizes.largest > 50:
        right.set_xscale("log")
    else:
        right.set_xlim(0, max(sizes.largest, statistics.max_neighbors or 0) + 1)
        right.locator_params(axis="x", integer=True)
    for ax in (left, right):
        ax.set_yscale("log")
        ax.set_ylim(bottom=0.5, top=20 * ax.get_ylim()[1])  # room for the legend
        ax.grid(visible=True, which="major", alpha=0.3)
        ax.legend(loc="upper right", framealpha=1)
    share = statistics.examples_distinct / statistics.examples_before
    figure.suptitle(
        f"Contribution bounding: {statistics.examples_distinct:,} of "
        f"{statistics.examples_before:,} examples kept ({share:.1%}), "
        f"{statistics.examples:,} with copies; {statistics.users:,} of "
        f"{statistics.users_before:,} users",
        fontsize=10,
    )
    save(figure, path)


def _smooth(values: np.ndarray, weight: float = 0.8) -> np.ndarray:
    """Exponential average, corrected for its start."""
    result, total, norm = np.empty_like(values), 0.0, 0.0
    for i, value in enumerate(values):
        total, norm = weight * total + value, weight * norm + 1
        result[i] = total / norm
    return result


def figure_of(panels: int) -> tuple[Any, Any]:
    """A figure with so many panels side by side, and their axes.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plots need matplotlib: pip install 'dptrain[recipes]' (or set plots=false in a recipe)"
        ) from error
    # Not pyplot: it keeps global state and may look for a display.
    width = {1: 6.4, 2: 10.5}.get(panels, 5.0 * panels)
    figure = Figure(figsize=(width, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def save(figure: Any, path: str | pathlib.Path) -> None:
    """Write the figure to an image file, making its folder; the suffix chooses the format."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_partition(partition: GraphPartition, components: Any, slots: Any) -> None:
    """Draw two panels: the components that had to be cut, and the result."""
    sizes = partition.component_sizes()
    parts = partition.cycle // partition.spread
    largest = partition.graph.examples / parts
    whole = sizes.values <= largest
    for chosen, color, label in (
        (whole, "tab:green", "whole"),
        (~whole, "tab:red", "larger than a part: cut"),
    ):
        if chosen.any():
            components.vlines(
                sizes.values[chosen], 0.5, sizes.counts[chosen], color=color, linewidth=1.5
            )
            components.plot(
                sizes.values[chosen], sizes.counts[chosen], "o", color=color, markersize=4,
                label=label,
            )  # fmt: skip
    components.axvline(largest, color="black", linestyle=":", label=f"a part, {largest:,.0f}")
    components.set_xscale("log")
    components.set_yscale("log")
    components.set_ylim(bottom=0.5, top=20 * components.get_ylim()[1])
    components.set_xlabel("examples of a connected component")
    components.set_ylabel("components")
    components.legend(loc="upper right", framealpha=1)
    slots.bar(range(partition.cycle), partition.sizes, width=1.0, color="tab:green")
    slots.set_xlabel("slot")
    slots.set_ylabel("examples")
    slots.set_title(
        f"cycle {partition.cycle}, spread {partition.spread}: {partition.dropped:,} of "
        f"{partition.graph.examples:,} dropped",
        fontsize=9,
    )
    slots.locator_params(axis="x", integer=True)
    for ax in (components, slots):
        ax.grid(visible=True, which="major", alpha=0.3)
