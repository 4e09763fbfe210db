"""A lower bound on ε from one run in which many canaries were in or out by coins.

The setting is that of Steinke, Nasr & Jagielski 2023 (arXiv 2305.08846); the bound is Theorem 19.7
of ``docs/theory``. It holds for every mechanism that is (ε, δ)-DP for one canary, however canaries
influence each other, and for a whole curve δ(ε) as for one point of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from scipy.special import expit
from scipy.stats import binom

from dptrain.auditing.conformity import Audit
from dptrain.auditing.counting import StatedCurve
from dptrain.core import checks

_LARGEST = 64  # ε that is looked for


def one_run_p_value(
    *, canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Chance, under (ε, δ), of at least so many correct guesses about who was in.

    With W ~ Bin(r, e^ε/(1 + e^ε)) it is at most Pr[W ≥ v] and what a budget of m δ/(1 + e^ε) buys
    of Pr[W = v - 1], Pr[W = v - 2], …, at the price of i for Pr[W = v - i].

    Args:
        canaries: m, each in with probability 1/2, independently.
        guesses: r ≤ m; abstentions are free.
        correct: v ≤ r.
        epsilon: ε ≥ 0.
        delta: δ in [0, 1].

    Raises:
        ValueError: if v ≤ r ≤ m does not hold, or ε or δ is out of range.
    """
    m = checks.integer("canaries", canaries)
    r = checks.integer("guesses", guesses, minimum=0, maximum=m)
    v = checks.integer("correct", correct, minimum=0, maximum=r)
    epsilon = checks.number("epsilon", epsilon, minimum=0)
    delta = checks.number("delta", delta, minimum=0, maximum=1)
    right = float(expit(epsilon))
    chance = float(binom.sf(v - 1, r, right))
    if v and delta:
        shares = binom.pmf(np.arange(v - 1, -1, -1), r, right)
        prices = np.arange(1, v + 1)
        spent = np.cumsum(prices * shares)
        budget = m * delta * float(expit(-epsilon))
        whole = int(np.searchsorted(spent, budget, side="right"))  # shares that are bought whole
        chance += float(np.sum(shares[:whole]))
        if whole < v:
            left = budget - (float(spent[whole - 1]) if whole else 0.0)
            chance += left / float(prices[whole])
    return min(1.0, chance)


def one_run_curve_p_value(
    *, canaries: int, guesses: int, correct: int, curve: StatedCurve
) -> float:
    """Chance, under a whole curve δ(ε), of at least so many correct guesses about who was in.

    Every point of the curve bounds it, so the least of them does; the two directions of a point
    count by half each.

    Args:
        canaries: m, each in with probability 1/2, independently.
        guesses: r ≤ m; abstentions are free.
        correct: v ≤ r.
        curve: what is stated of one canary.

    Raises:
        ValueError: as of ``one_run_p_value``.
    """
    return min(
        one_run_p_value(
            canaries=canaries,
            guesses=guesses,
            correct=correct,
            epsilon=float(epsilon),
            delta=float(delta),
        )
        for epsilon, delta in zip(curve.epsilon, (curve.remove + curve.add) / 2, strict=True)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneRun:
    """The lower bound on ε that one run shows.

    Attributes:
        canaries: m.
        guesses: r of the number of guesses that shows most.
        correct: v of them.
        epsilon_lower: ε at δ is at least this.
        most: what as many guesses, all correct, would have shown.
        delta: δ.
        alpha: chance that ``epsilon_lower`` is false.
        curve_p_value: chance of so many correct guesses, for the number of guesses that shows most
            and times how many were tried, if the whole stated curve is true; ``None`` without one.
    """

    canaries: int
    guesses: int
    correct: int
    epsilon_lower: float
    most: float
    delta: float
    alpha: float
    curve_p_value: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneRunAudit(Audit):
    """The findings of an audit by guesses about who was in one run.

    Attributes:
        canaries: m, how many were in or out by a fair coin.
        others: the other examples of the data set; 0: the canaries are all of it, and nobody's data
            is in the run.
        one_run: the bound that holds whatever the release, with the chance of what was guessed if
            the whole stated curve is true.
    """

    canaries: int
    others: int
    one_run: OneRun

    seen_by: ClassVar[str] = "one run"

    @property
    def violations(self) -> tuple[str, ...]:
        """The findings that contradict the statement, in words; empty if nothing does."""
        run, found = self.one_run, []
        if run.epsilon_lower > self.epsilon:
            found.append(
                f"ε ≥ {run.epsilon_lower:.4g} by {self.seen_by}, stated is {self.epsilon:.4g}"
            )
        if run.curve_p_value is not None and run.curve_p_value < run.alpha:
            found.append(
                f"{run.canaries} canaries are told apart better by {self.seen_by} than the stated "
                f"curve allows (p = {run.curve_p_value:.2g})"
            )
        return tuple(found)

    def guesses(self, by: str) -> list[str]:
        """The lines of the text that say what the guesses show."""
        run = self.one_run
        lines = [
            f"{by + ':':<14}ε at least {run.epsilon_lower:.4g} ({run.correct} of {run.guesses} "
            f"guesses right; all right would show {run.most:.4g})"
        ]
        if run.curve_p_value is not None:
            lines.append(
                f"  under the whole stated curve so many are right with p ≤ {run.curve_p_value:.2g}"
            )
        return lines


def audit_one_run(
    scores: npt.ArrayLike,
    included: npt.ArrayLike,
    *,
    delta: float,
    alpha: float,
    guesses: Sequence[int] | None = None,
    curve: StatedCurve | None = None,
) -> OneRun:
    """Guess "in" for the largest scores and "out" for the smallest, and bound ε.

    The bound allows for canaries that are given away, m δ/(1 + e^ε) of them on average: where δ is
    not far below 1/m, it shows little.

    Args:
        scores: of the canaries, shape (m,); may depend on the release only.
        included: whether each was in, by independent fair coins, shape (m,).
        delta: δ in [0, 1].
        alpha: chance of a false bound.
        guesses: even numbers of guesses to try, each at α over their number; by default m, m/2,
            m/4, … down to 16.
        curve: all of δ(ε) as stated, which can be refuted where the bound at δ is below ε.

    Raises:
        ValueError: if the shapes differ, there are fewer than two canaries, or a number of guesses
            is odd or exceeds m.
    """
    scores, taken = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    if scores.shape != taken.shape or scores.ndim != 1 or scores.size < 2:
        raise ValueError(
            f"scores has the shape {scores.shape} and included {taken.shape}: must have one entry "
            "for each of at least 2 canaries"
        )
    alpha = checks.number("alpha", alpha, above=0, below=1)
    m = scores.size
    if guesses is None:
        halved = [m // 2**k // 2 * 2 for k in range(m.bit_length())]
        guesses = [r for r in halved if r >= min(16, m // 2 * 2)]
    order = np.argsort(scores, kind="stable")
    found, p_values = [], []
    for r in guesses:
        if r % 2 or not 0 < r <= m:
            raise ValueError(
                f"guesses={r}: must be even numbers from 2 to {m}, the number of canaries"
            )
        correct = int(taken[order[m - r // 2 :]].sum() + (~taken[order[: r // 2]]).sum())
        level = alpha / len(guesses)
        shown = [_epsilon(m, r, v, delta, level) for v in (correct, r)]
        found.append((shown[0], r, correct, shown[1]))
        if curve is not None:
            p_values.append(
                one_run_curve_p_value(canaries=m, guesses=r, correct=correct, curve=curve)
            )
    lower, r, correct, most = max(found)
    return OneRun(
        canaries=m,
        guesses=r,
        correct=correct,
        epsilon_lower=lower,
        most=most,
        delta=delta,
        alpha=alpha,
        curve_p_value=min(1.0, len(p_values) * min(p_values)) if p_values else None,
    )


def _epsilon(m: int, r: int, v: int, delta: float, alpha: float) -> float:
    """The largest ε that is refuted, near enough.

    A refutation of (ε, δ) refutes every smaller ε too, though the bound on the chance may be larger
    there: what is bought with δ is dearer at a large ε.
    """

    def refuted(epsilon: float) -> bool:
        p = one_run_p_value(canaries=m, guesses=r, correct=v, epsilon=epsilon, delta=delta)
        return p < alpha

    whole = next((e for e in range(_LARGEST - 1, -1, -1) if refuted(e)), None)
    if whole is None:
        return 0.0
    low, high = float(whole), whole + 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
