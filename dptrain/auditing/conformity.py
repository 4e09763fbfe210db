"""Tests that draws have the law that was accounted for: of the noise, and of participations.

A guarantee at a large ε hides small errors of the noise from every membership test that can be run:
these tests look at the draws themselves. All p-values are of exact laws, made good for the number
of things that are looked at (Bonferroni).
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from scipy.stats import binomtest, chi2
from scipy.stats import t as student

from dptrain.auditing.laws import Game
from dptrain.core import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one test of the draws.

    Attributes:
        what: in words, with the figure.
        p_value: chance of anything as far off, were all as accounted for.
    """

    what: str
    p_value: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit(ABC):
    """The findings of an audit, beside the statement that it tried to refute.

    Attributes:
        epsilon: the stated ε.
        delta: the stated δ.
        confidence: chance that an audit finds nothing where the statement is true.
    """

    epsilon: float
    delta: float
    confidence: float

    @property
    @abstractmethod
    def violations(self) -> tuple[str, ...]:
        """The findings that contradict the statement, in words; empty if nothing does."""

    @property
    def passed(self) -> bool:
        """True if nothing contradicts the statement; no proof that it is true."""
        return not self.violations

    @property
    def verdict(self) -> list[str]:
        """The last lines of the text: what contradicts the statement, or that nothing does."""
        passed = (
            f"PASSED: nothing contradicts the statement (confidence {self.confidence:g}); this "
            "proves no guarantee"
        )
        return [f"VIOLATED: {each}" for each in self.violations] or [passed]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value of all fields, the violations and the verdict."""
        value = dataclasses.asdict(self)
        return {**value, "violations": list(self.violations), "passed": self.passed}

    def to_json(self) -> str:
        """JSON text of ``to_dict``."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)


def check_noise(game: Game, noise: Array) -> list[Finding]:
    """Test whether M w is standard normal times σ: its size altogether, at every step, and pairs.

    ‖M w‖² of all runs is σ² times a χ² variable, that of a step too; of two steps the uncentered
    correlation r gives r √((m-1)/(1-r²)), a Student variable of m-1 degrees of freedom.

    Args:
        game: the game.
        noise: σ w of independent runs, shape (m, n), m ≥ 2.

    Returns:
        Three findings: noise that is too small or too large, a step that is, and steps whose noise
        is correlated in other ways than C says (used twice, say).
    """
    z = noise @ game.matrix.T / game.sigma
    runs, steps = z.shape
    gram = z.T @ z
    squares = np.diag(gram)
    total = float(squares.sum())
    ratio = np.sqrt(total / z.size)
    found = [
        Finding(
            what=f"noise of {z.size} draws: {ratio:.5g} times what is accounted for",
            p_value=float(_two_sided(total, z.size)),
        )
    ]
    per_step = _two_sided(squares, runs)
    worst = int(np.argmin(per_step))
    found.append(
        Finding(
            what=f"step {worst} is the oddest: {np.sqrt(squares[worst] / runs):.5g} times",
            p_value=min(1.0, float(per_step[worst]) * steps),
        )
    )
    if steps == 1:
        return found
    correlations = np.abs(gram) / np.sqrt(np.multiply.outer(squares, squares))
    np.fill_diagonal(correlations, 0.0)
    first, second = divmod(int(np.argmax(correlations)), steps)
    r = min(1.0, float(correlations[first, second]))
    with np.errstate(divide="ignore"):
        p = 2 * student.sf(r * np.sqrt((runs - 1) / (1 - r**2 + 1e-300)), runs - 1)
    found.append(
        Finding(
            what=f"steps {first} and {second} are the most correlated, once whitened: {r:.4f}",
            p_value=min(1.0, float(p) * steps * (steps - 1) / 2),
        )
    )
    return found


def _two_sided(value: Array | float, degrees: int) -> Array:
    return np.minimum(1.0, 2 * np.minimum(chi2.cdf(value, degrees), chi2.sf(value, degrees)))


def check_participations(game: Game, taken: Array) -> list[Finding]:
    """Test whether examples take part as the scheme says: how far apart, how often, in which steps.

    Args:
        game: the game.
        taken: participations of independent examples, or of users how many of their examples; shape
            (m, n).

    Returns:
        A finding of p-value 0 for what the scheme excludes, and where the scheme is one whose rates
        are known, one for the oddest step's number of participations. Where steps are independent
        there is one for participations in both of two neighboring turns, and for users one for how
        often several of their examples come together. All counts are binomial.
    """
    scheme = game.scheme
    found = []
    present = taken > 0
    close = np.zeros(len(taken), dtype=bool)
    for lag in range(1, min(scheme.min_sep, scheme.steps)):
        close |= (present[:, lag:] & present[:, :-lag]).any(axis=1)
    often = present.sum(axis=1) > scheme.max_participations
    crowded = (taken > scheme.max_per_batch).any(axis=1)
    wrong = int(np.count_nonzero(close | often | crowded))
    several = scheme.unit.kind != "example"
    at_once = f" and max_per_batch={scheme.max_per_batch}" if several else ""
    found.append(
        Finding(
            what=f"{wrong} of {len(taken)} {game.who} take part more often, or in steps nearer to "
            f"each other, than min_sep={scheme.min_sep} and max_participations="
            f"{scheme.max_participations}{at_once} allow",
            p_value=0.0 if wrong else 1.0,
        )
    )
    if (rates := game.rates()) is None:
        return found
    counts = present.sum(axis=0)
    values = [_binomial(k, len(taken), rate) for k, rate in zip(counts, rates, strict=True)]
    worst = int(np.argmin(values))
    found.append(
        Finding(
            what=f"step {worst} is the oddest: {counts[worst]} of {len(taken)} {game.who} take "
            f"part, expected are {len(taken) * rates[worst]:.1f}",
            p_value=min(1.0, float(values[worst]) * len(rates)),
        )
    )
    turns = np.flatnonzero(rates)
    if game.forgetful and len(turns) > 1:
        first, second = turns[: len(turns) // 2 * 2].reshape(-1, 2).T
        both = (present[:, first] & present[:, second]).sum(axis=0)
        found.append(
            _by_chance(
                both,
                np.full(len(both), len(taken)),
                rates[first] * rates[second],
                f"{game.who} take part in both of two turns {{hits}} times of {{of}}",
            )
        )
    if (more := game.several()) is not None and (more > 0).any():
        found.append(
            _by_chance(
                (taken > 1).sum(axis=0),
                counts,
                more,
                f"{game.who} who take part do so with several examples {{hits}} times of {{of}}",
            )
        )
    return found


def _by_chance(hits: Array, of: Array, chances: Array, what: str) -> Finding:
    """The least likely of several counts; counts of equal chances are added up first."""
    oddest, kinds = Finding(what=what.format(hits=0, of=0), p_value=1.0), np.unique(chances)
    for chance in kinds:
        alike = chances == chance
        k, n = int(hits[alike].sum()), int(of[alike].sum())
        p = min(1.0, _binomial(k, n, chance) * len(kinds)) if n else 1.0
        if p <= oddest.p_value:
            text = f"{what.format(hits=k, of=n)}, expected are {n * chance:.1f}"
            oddest = Finding(what=text, p_value=p)
    return oddest


def _binomial(hits: int, of: int, chance: float) -> float:
    return float(binomtest(int(hits), int(of), min(1.0, float(chance))).pvalue)
