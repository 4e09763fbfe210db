"""A lower bound on ε from one run in which many canaries were in or out by coins.

Steinke, Nasr & Jagielski 2023 (arXiv 2305.08846), Theorem 5.2: it holds for every mechanism that is
(ε, δ)-DP for one canary, however canaries influence each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import expit
from scipy.stats import binom

from dptrain.core import checks

_LARGEST = 64.0  # ε that is looked for


def one_run_p_value(
    *, canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Chance, under (ε, δ), of at least so many correct guesses about who was in.

    With W' ~ Bin(r, e^ε/(1 + e^ε)) it is at most
    Pr[W' ≥ v] + 2 m δ max_{i ≤ m} Pr[v > W' ≥ v - i]/i.

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
        below = np.cumsum(binom.pmf(np.arange(v - 1, -1, -1), r, right))
        chance += 2 * m * delta * float(np.max(below / np.arange(1, v + 1)))
    return min(1.0, chance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneRun:
    """What one run shows.

    Attributes:
        canaries: m.
        guesses: r of the number of guesses that shows most.
        correct: v of them.
        epsilon_lower: ε at δ is at least this.
        most: what as many guesses, all correct, would have shown.
        delta: δ.
        alpha: chance that ``epsilon_lower`` is false.
    """

    canaries: int
    guesses: int
    correct: int
    epsilon_lower: float
    most: float
    delta: float
    alpha: float


def audit_one_run(
    scores: npt.ArrayLike,
    included: npt.ArrayLike,
    *,
    delta: float,
    alpha: float,
    guesses: Sequence[int] | None = None,
) -> OneRun:
    """Guess "in" for the largest scores and "out" for the smallest, and bound ε.

    The bound allows for 2 m δ canaries that are given away: where δ is not far below 1/m, it shows
    nothing.

    Args:
        scores: of the canaries, shape (m,); may depend on the release only.
        included: whether each was in, by independent fair coins, shape (m,).
        delta: δ in [0, 1].
        alpha: chance of a false bound.
        guesses: even numbers of guesses to try, each at α over their number; by default m, m/2,
            m/4, … down to 16.

    Raises:
        ValueError: if the shapes differ, there are fewer than two canaries, or a number of guesses
            is odd or exceeds m.
    """
    scores, taken = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    if scores.shape != taken.shape or scores.ndim != 1 or scores.size < 2:
        raise ValueError(f"scores {scores.shape}, included {taken.shape}: one each, 2 or more")
    alpha = checks.number("alpha", alpha, above=0, below=1)
    m = scores.size
    if guesses is None:
        halved = [m // 2**k // 2 * 2 for k in range(m.bit_length())]
        guesses = [r for r in halved if r >= min(16, m // 2 * 2)]
    order = np.argsort(scores, kind="stable")
    found = []
    for r in guesses:
        if r % 2 or not 0 < r <= m:
            raise ValueError(f"guesses={r}: give even numbers from 2 to {m}, the canaries")
        correct = int(taken[order[m - r // 2 :]].sum() + (~taken[order[: r // 2]]).sum())
        level = alpha / len(guesses)
        shown = [_epsilon(m, r, v, delta, level) for v in (correct, r)]
        found.append((shown[0], r, correct, shown[1]))
    lower, r, correct, most = max(found)
    return OneRun(
        canaries=m,
        guesses=r,
        correct=correct,
        epsilon_lower=lower,
        most=most,
        delta=delta,
        alpha=alpha,
    )


def _epsilon(m: int, r: int, v: int, delta: float, alpha: float) -> float:
    """The largest ε that is refuted; the bound on the chance grows with ε where it is small."""

    def refuted(epsilon: float) -> bool:
        p = one_run_p_value(canaries=m, guesses=r, correct=v, epsilon=epsilon, delta=delta)
        return p < alpha

    low, high = 0.0, _LARGEST
    if not refuted(low):
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
