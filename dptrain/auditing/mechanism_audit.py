"""The worst case without a model: a mechanism's own draws against what is stated of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from dptrain.auditing.conformity import Audit, Finding, check_noise, check_participations
from dptrain.auditing.counting import Count, StatedCurve, count, count_epsilon
from dptrain.auditing.draws import key
from dptrain.auditing.importance import DIRECTIONS, DeltaEstimate, TiltedRuns, tilted_runs
from dptrain.auditing.laws import Game, game_of
from dptrain.core import Adjacency, Array, checks
from dptrain.mechanism import MatrixMechanism

_ENTRIES = 1 << 22  # of outputs at a time, 32 MB
_CHECKED = 4096  # runs whose draws are looked at one by one
_TOP = 1.5  # how far beyond the stated ε its lower bound is looked for, in factors


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismAudit(Audit):
    """The findings of an audit of a mechanism, beside what is stated of it.

    Attributes:
        epsilon_estimate: ε at δ by the likelihood ratio, no bound; ``None`` without one, or where
            it could not be measured.
        epsilon_lower: ε at δ is at least this, by the likelihood ratio; ``None`` without one.
        estimates: δ at the stated ε in both directions; empty without a likelihood ratio.
        masses: of P and Q under the tilted draws, with standard errors: 1 unless the draws are of
            another law.
        counted: the stated curve against what was counted.
        shown: the largest ε at δ that counting shows.
        draws: what was found of noise and participations.
        audited: of a user that was audited, its number in the graph, how many examples it has, how
            many others share a user with one of them, and how many users of the same law one run
            of the sampler shows; empty for an example.
        known: what of the draws the reader is told besides; empty if nothing.
        inexact: why there is no exact likelihood ratio; empty if there is.
        samples: tilted runs.
        seed: of all draws.
        profile: ε and estimates of δ, remove and add, near the stated ε; for a plot.
    """

    epsilon_estimate: float | None
    epsilon_lower: float | None
    estimates: tuple[DeltaEstimate, ...]
    masses: dict[str, tuple[float, float]]
    counted: Count
    shown: Count
    draws: tuple[Finding, ...]
    audited: dict[str, int]
    known: str
    inexact: str
    samples: int
    seed: int
    profile: dict[str, list[float]]

    @property
    def violations(self) -> tuple[str, ...]:
        """The findings that contradict the statement, in words; empty if nothing does."""
        level = (1.0 - self.confidence) / 4  # of the ratio, of counting; the draws have two
        found = []
        for each in self.estimates:
            if each.lower > self.delta:
                found.append(
                    f"δ({each.epsilon:.6g}) ≥ {each.lower:.4g} by the likelihood ratio "
                    f"({each.direction}), stated is {self.delta:.4g}"
                )
        if self.counted.violated:
            found.append(
                f"δ({self.counted.epsilon:.6g}) ≥ {self.counted.delta_lower:.4g} by counting "
                f"({self.counted.direction}), stated is {self.counted.delta:.4g}"
            )
        if self.shown.epsilon_lower > self.epsilon:
            found.append(
                f"ε ≥ {self.shown.epsilon_lower:.4g} by counting ({self.shown.direction}), stated "
                f"is {self.epsilon:.4g}"
            )
        found += [
            f"the draws are not those that were accounted for: {each.what} (p = {each.p_value:.2g})"
            for each in self.draws
            if each.p_value < 2 * level / len(self.draws)
        ]
        return tuple(found)

    def __str__(self) -> str:
        lines = []
        if self.audited:
            lines.append(
                f"audited:                user {self.audited['user']}: {self.audited['examples']} "
                f"examples, {self.audited['neighbors']} others share users with them"
            )
        lines.append(f"stated:                 ε = {self.epsilon:.6g} at δ = {self.delta:.4g}")
        if self.known:
            lines.append(f"the reader is told      {self.known}")
        if self.inexact:
            lines.append(f"no exact likelihood ratio: {self.inexact}")
        else:
            shown = (
                "not measured" if self.epsilon_estimate is None else f"{self.epsilon_estimate:.4g}"
            )
            lines.append(
                f"by the likelihood ratio: ε ≈ {shown}, at least {self.epsilon_lower:.4g} "
                f"({self.samples} tilted runs)"
            )
            for each in self.estimates:
                told = (
                    f"{each.delta:.4g} ± {each.standard_error:.2g} (standard error)"
                    if each.measured
                    else "too rare to be measured"
                )
                lines.append(
                    f"  δ({each.epsilon:.6g}), {each.direction}: {told}, at least {each.lower:.4g}"
                )
            lines.append(
                "  weights add up to     "
                + ", ".join(f"{name}: {m:.4f} ± {se:.2g}" for name, (m, se) in self.masses.items())
            )
        c = self.counted
        lines.append(
            f"by counting:            ε at least {self.shown.epsilon_lower:.4g}; {c.runs} runs of "
            f"each world could show {c.most:.4g} at most"
        )
        lines.append(
            f"  strictest at ε = {c.epsilon:.4g}: δ at least {c.delta_lower:.4g}, stated "
            f"{c.delta:.4g} ({c.direction}: {c.hits} hits, {c.false} false of {c.runs})"
        )
        lines.append("draws:")
        lines += [f"  {each.what} (p = {each.p_value:.2g})" for each in self.draws]
        return "\n".join([*lines, *self.verdict])


def audit_mechanism(
    mechanism: MatrixMechanism,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
    curve: StatedCurve | None = None,
    samples: int = 40_000,
    runs: int = 40_000,
    confidence: float = 0.99,
    seed: int = 0,
    progress: bool = True,
) -> MechanismAudit:
    """Try to refute what is stated of a mechanism, by its own draws and in both directions.

    The game is the worst case of an example whose clipped gradient is the same unit vector at every
    step, and of others that are known: y = M x + σ z against σ z. Participations come from the
    scheme's streams, noise from the strategy's.

    Args:
        mechanism: scheme, strategy and σ > 0.
        epsilon: the stated ε ≥ 0.
        delta: the stated δ in (0, 1).
        adjacency: what the statement is about; zero-out and add-or-remove are this game.
        curve: all of δ(ε) as stated, against which counting is far stronger.
        samples: tilted runs, for δ by the likelihood ratio.
        runs: of each world, for counting.
        confidence: chance that a true statement passes, over the audit's own draws.
        seed: of all draws.
        progress: show a bar.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if one is out of range, or the game is not about the mechanism (``game_of``).
    """
    checks.instance("mechanism", mechanism, MatrixMechanism)
    checks.instance("adjacency", adjacency, Adjacency, example="Adjacency.ZERO_OUT")
    if not adjacency.one_side_empty:
        raise ValueError(
            f"adjacency={adjacency.value!r}: the audit compares runs with and without an example; "
            "audit zero_out or add_remove"
        )
    return audit_game(
        game_of(mechanism),
        epsilon=epsilon,
        delta=delta,
        curve=curve,
        samples=samples,
        runs=runs,
        confidence=confidence,
        seed=seed,
        progress=progress,
    )


def audit_game(
    game: Game,
    *,
    epsilon: float,
    delta: float,
    curve: StatedCurve | None,
    samples: int,
    runs: int,
    confidence: float,
    seed: int,
    progress: bool,
) -> MechanismAudit:
    """Try to refute a statement by playing a game; arguments as of ``audit_mechanism``."""
    epsilon = checks.number("epsilon", epsilon, minimum=0)
    delta = checks.number("delta", delta, above=0, below=1)
    confidence = checks.number("confidence", confidence, above=0, below=1)
    seed = checks.integer("seed", seed, minimum=0)
    runs = checks.integer("runs", runs, minimum=100)
    alpha = (1.0 - confidence) / 4
    tilted = None
    if not game.inexact:
        tilted = tilted_runs(
            game, epsilon=epsilon, samples=samples, seed=key(seed, 0), progress=progress
        )
    inside, outside, findings = _scores(game, runs, seed)
    shown = count_epsilon(inside, outside, alpha=alpha / 2, delta=delta)
    counted = count(inside, outside, alpha=alpha / 2, epsilon=epsilon, delta=delta, curve=curve)
    return MechanismAudit(
        epsilon=epsilon,
        delta=delta,
        confidence=confidence,
        epsilon_estimate=None if tilted is None else _epsilon_at(tilted, epsilon, delta),
        epsilon_lower=None if tilted is None else _epsilon_lower(tilted, epsilon, delta, alpha),
        estimates=()
        if tilted is None
        else tuple(tilted.estimate(each, epsilon, alpha / 2) for each in DIRECTIONS),
        masses={} if tilted is None else tilted.masses(),
        counted=counted,
        shown=shown,
        draws=tuple(findings),
        audited=game.audited,
        known=game.known,
        inexact=game.inexact,
        samples=0 if tilted is None else samples,
        seed=seed,
        profile={} if tilted is None else _profile(tilted, epsilon),
    )


def _scores(game: Game, runs: int, seed: int) -> tuple[Array, Array, list[Finding]]:
    """Scores of runs with and without the example, and the findings about their draws."""
    inside, outside, findings = [], [], []
    most = max(2, _ENTRIES // game.scheme.steps)
    for number, start in enumerate(range(0, runs, most)):
        size = min(most, runs - start)
        first, second, third = (key(seed, 1, number, k) for k in range(3))
        played = game.play(size, (first, second, third))
        if number == 0:
            findings = check_noise(game, played.noise[:_CHECKED])
            findings += check_participations(game, played.taken)
        inside.append(played.inside)
        outside.append(played.outside)
    return np.concatenate(inside), np.concatenate(outside), findings


def _epsilon_at(runs: TiltedRuns, stated: float, delta: float) -> float | None:
    """The ε at which the larger estimate is δ; ``None`` if it is not near what is stated."""

    def larger(epsilon: float) -> float:
        return max(float(runs.terms(each, epsilon).mean()) for each in DIRECTIONS)

    return _crossing(larger, stated, delta)


def _epsilon_lower(runs: TiltedRuns, stated: float, delta: float, alpha: float) -> float:
    """The largest ε at which the lower bound of δ in some direction exceeds δ.

    The bound falls as ε grows, like every term. So all ε make one statement, which is false only if
    the bound at the true ε exceeds δ.
    """

    def larger(epsilon: float) -> float:
        return max(runs.estimate(each, epsilon, alpha / 2).lower for each in DIRECTIONS)

    return _crossing(larger, stated, delta) or 0.0


def _crossing(falling: Any, stated: float, delta: float) -> float | None:
    low, high = 0.0, _TOP * stated + 1.0
    if falling(low) <= delta:
        return None
    if falling(high) > delta:
        return high
    while high - low > 1e-3 * max(high, 0.1):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > delta else (low, middle)
    return low


def _profile(runs: TiltedRuns, stated: float) -> dict[str, list[float]]:
    grid = np.linspace(0.0, _TOP * max(stated, 0.1), 46)
    found = {"epsilon": grid.tolist()}
    for direction in DIRECTIONS:
        deltas, errors = [], []
        for epsilon in grid:
            terms = runs.terms(direction, float(epsilon))
            deltas.append(float(terms.mean()))
            errors.append(float(terms.std(ddof=1)) / math.sqrt(terms.size))
        found[direction], found[f"{direction}_standard_error"] = deltas, errors
    return found
