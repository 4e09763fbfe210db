"""Plots of audits: what was stated beside what was found. They need matplotlib."""

from __future__ import annotations

import pathlib

import numpy as np
import numpy.typing as npt

from dptrain.auditing.canaries import CanaryAudit, CanaryRun
from dptrain.auditing.counting import StatedCurve
from dptrain.auditing.mechanism_audit import MechanismAudit
from dptrain.core import Array
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import figure_of, save

_LEAST = 1e-3  # false positive rate at which the trade-off begins


def plot_audit(
    audit: MechanismAudit, path: str | pathlib.Path, *, stated: StatedCurve | None = None
) -> None:
    """Draw δ(ε) in both directions and the trade-off, stated and found.

    The trade-off is what the δ(ε) of a curve leave a membership test; the point is the test that
    was counted.

    Args:
        audit: what was found.
        path: image file; its suffix chooses the format.
        stated: the curve that was stated; ``None``: only the point (ε, δ).

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
    """
    figure, (left, right) = figure_of(2)
    found = None
    if audit.profile:
        found = StatedCurve(
            epsilon=np.array(audit.profile["epsilon"]),
            remove=np.array(audit.profile["remove"]),
            add=np.array(audit.profile["add"]),
        )
    for direction, color in (("remove", "tab:blue"), ("add", "tab:orange")):
        if stated is not None:
            # δ is convex in e^ε, so that chords there are bounds between the points as well.
            between = np.linspace(stated.epsilon[0], stated.epsilon[-1], 300)
            values = np.interp(np.exp(between), np.exp(stated.epsilon), stated.direction(direction))
            shown = np.where(values > 0, values, np.nan)
            left.plot(between, shown, "-", color=color, label=f"stated, {direction}")
        if found is not None:
            values = found.direction(direction)
            error = np.array(audit.profile[f"{direction}_standard_error"])
            drawn = (values > 0) & (error < values / 3)
            left.errorbar(
                found.epsilon[drawn],
                values[drawn],
                2 * error[drawn],
                fmt=".",
                color=color,
                label=f"found, {direction} (± 2 standard errors)",
            )
    left.plot(audit.epsilon, audit.delta, "o", color="black", label="audited (ε, δ)")
    left.set_yscale("log")
    left.set_ylim(bottom=audit.delta / 100)
    left.set_xlabel("ε (natural logarithm)")
    left.set_ylabel("δ")
    rates = np.geomspace(_LEAST, 1.0, 300)
    if stated is not None:
        right.plot(rates, reached(stated, rates), color="tab:red", label="bound that is stated")
    if found is not None:
        right.plot(rates, reached(found, rates), "--", color="tab:blue", label="found (estimate)")
    test = audit.shown
    own, other = test.hits / test.runs, test.false / test.runs
    point = (other, own) if test.direction == "remove" else (1 - own, 1 - other)
    right.plot(*point, "o", color="black", label="the test that was counted")
    right.plot(rates, rates, ":", color="dimgray", label="guessing")
    right.set_xscale("log")
    right.set_xlabel("false positive rate")
    right.set_ylabel("true positive rate")
    for ax in (left, right):
        ax.grid(visible=True, which="major", alpha=0.3)
        ax.legend(fontsize=8)
    verdict = "nothing contradicts the statement" if audit.passed else "REFUTED"
    figure.suptitle(f"Audit: {verdict}", fontsize=11)
    save(figure, path)


def plot_canaries(
    audit: CanaryAudit,
    found: CanaryRun,
    mechanism: MatrixMechanism,
    path: str | pathlib.Path,
    *,
    stated: StatedCurve | None = None,
) -> None:
    """Draw how well canaries are told apart, beside the bound that is stated, and their scores.

    Of the empirical trade-off each point is a threshold; it may exceed the bound where few canaries
    are beyond, which is what the audit's own tests allow for.

    Args:
        audit: what was found.
        found: the run that it is of.
        mechanism: of the run.
        path: image file; its suffix chooses the format.
        stated: the curve that was stated; ``None``: the bound of the point (ε, δ).

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
    """
    figure, (left, right) = figure_of(2)
    if stated is None:
        point = [np.array([each]) for each in (audit.epsilon, audit.delta, audit.delta)]
        stated = StatedCurve(epsilon=point[0], remove=point[1], add=point[2])
    scores = found.scores(mechanism)
    rates = np.geomspace(_LEAST, 1.0, 300)
    left.plot(rates, reached(stated, rates), color="tab:red", label="bound that is stated")
    left.step(*trade_off(scores, found.included), where="post", color="tab:blue", label="canaries")
    left.plot(rates, rates, ":", color="dimgray", label="guessing")
    left.set_xscale("log")
    left.set_xlim(_LEAST, 1.0)
    left.set_xlabel("false positive rate")
    left.set_ylabel("true positive rate")
    bins = np.histogram_bin_edges(scores, bins=40)
    for inside, color in ((True, "tab:blue"), (False, "tab:orange")):
        name = f"{'in' if inside else 'out'}: {np.count_nonzero(found.included == inside)}"
        right.hist(scores[found.included == inside], bins, alpha=0.6, color=color, label=name)
    right.set_xlabel("score (logarithm of the likelihood ratio, where that is exact)")
    right.set_ylabel("canaries")
    for ax in (left, right):
        ax.grid(visible=True, which="major", alpha=0.3)
        ax.legend(fontsize=8)
    verdict = "nothing contradicts the statement" if audit.passed else "REFUTED"
    figure.suptitle(f"Audit by {audit.canaries} canaries: {verdict}", fontsize=11)
    save(figure, path)


def trade_off(scores: Array, included: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """False and true positive rates of guessing "in" at each score as threshold, the largest first.

    Returns:
        Two arrays that begin with 0 and end with 1.
    """
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.diff(scores[order], append=np.inf))  # equal scores fall together
    inside = np.cumsum(included[order])[ends]
    outside = np.cumsum(~included[order])[ends]
    rates = [np.concatenate([[0.0], each / max(1, each[-1])]) for each in (outside, inside)]
    return rates[0], rates[1]


def reached(curve: StatedCurve, false_positive_rate: Array) -> Array:
    """The largest true positive rate that δ(ε) on the grid of a curve allows.

    A test S has P(S) ≤ e^ε Q(S) + δ_remove and 1 - Q(S) ≤ e^ε (1 - P(S)) + δ_add. The
    result has the shape of ``false_positive_rate``.
    """
    rate, factor = np.asarray(false_positive_rate)[..., None], np.exp(curve.epsilon)
    remove = np.min(factor * rate + curve.remove, axis=-1)
    add = np.min(1 - (1 - rate - curve.add) / factor, axis=-1)
    return np.asarray(np.minimum(1.0, np.minimum(remove, add)))
