"""The audit refutes the bound of the literature on shared examples, and lets ours stand.

Theorem 6.1 of Dong & Ganesh 2026 (arXiv 2602.09338) hides a user's draws of b-min-sep sampling.
Where examples are shared, others' batches show them (docs/theory/users.md#thm-users-attack; the
attack by itself, carried out by hand, is in tests/accounting/users/test_users_attack.py).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from dptrain import account, profile
from dptrain.auditing import StatedCurve, audit_users, user_game
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import AttributionGraph, UserMinSep
from dptrain.strategies import Identity
from tests.helpers.power import power_against_scaled_noise, power_of_counting
from tests.oracles.user_level import disjoint_claim, mixture_delta, own_chain

P, SIGMA, EPSILON, K = 0.1, 1.0, 1.0, 2
RUNS, LEVEL = 40_000, 0.01 / 8  # half is counted; a verdict's share of the audit's 1 %


def stars(copies: int, leaves: int) -> AttributionGraph:
    """User 0 of each copy has two examples, and each shares a user with every one of its leaves."""
    size = 1 + K * leaves
    lists = []
    for first in range(0, copies * size, size):
        for e in range(K):
            others = [first + 1 + e * leaves + leaf for leaf in range(leaves)]
            lists += [[first, *others], *([user] for user in others)]
    return AttributionGraph.from_lists(lists)


def mechanism(exclusion: str, copies: int = 50, leaves: int = 150) -> MatrixMechanism:
    scheme = UserMinSep(
        graph=stars(copies, leaves),
        probability=P,
        min_sep=2,
        steps=2,
        batch_size=1,
        exclusion=exclusion,
        burn_in=0,
    )
    return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=SIGMA)


class LiteraturesBound:
    """δ(ε) of the theorem: x_1 ~ Bin(k, p), x_2 too unless x_1 > 0, hidden; by quadrature."""

    law = disjoint_claim(K, p=P, b=2, steps=2)

    def delta(self, epsilon: float, *, remove: bool) -> float:
        return mixture_delta(self.law, np.eye(2), SIGMA, epsilon, remove=remove, fine=32)

    def curve(self) -> StatedCurve:
        grid = np.linspace(0.0, 2.0, 9)
        sides = [[self.delta(e, remove=side) for e in grid] for side in (True, False)]
        return StatedCurve(epsilon=grid, remove=np.array(sides[0]), add=np.array(sides[1]))


def rates(direction: str, at: float) -> tuple[float, float]:
    """How often a test speaks in its world and in the other, if step 2 shows x_1.

    Who saw j ≥ 1 draws says "in" where the loss of y_1, j y - j²/2, exceeds ``at``, or "out" where
    it is below -``at``. (Who saw none has nothing to see in step 2 either: u is barred there.)
    """
    spoken = false = 0.0
    for j in range(1, K + 1):
        chance = binom.pmf(j, K, P)
        if direction == "remove":
            level = at / j + j / 2
            spoken += chance * norm.sf((level - j) / SIGMA)
            false += chance * norm.sf(level / SIGMA)
        else:
            level = -at / j + j / 2
            spoken += chance * norm.cdf(level / SIGMA)
            false += chance * norm.cdf((level - j) / SIGMA)
    return spoken, false


def power(stated: float, runs: int) -> float:
    """The best fixed test's chance to refute ``stated`` at ε by counting ``runs`` of each world."""
    return max(
        power_of_counting(
            hit_rate=rates(side, at)[0],
            false_rate=rates(side, at)[1],
            runs=runs,
            epsilon=EPSILON,
            delta=stated,
            alpha=LEVEL,
        )
        for side in ("remove", "add")
        for at in (EPSILON, 1.25 * EPSILON)
    )


def test_the_bound_is_what_the_specification_says():
    stated = max(LiteraturesBound().delta(EPSILON, remove=side) for side in (True, False))
    assert stated == pytest.approx(0.0062, abs=2e-4)
    spoken, false = rates("remove", EPSILON)
    attained = spoken - math.exp(EPSILON) * false
    assert attained == pytest.approx(0.027, abs=1e-3)


def test_so_many_runs_of_the_sampler_refute_it():
    """By counting alone, sound whatever the release is: 20,000 counted runs of each world do."""
    stated = max(LiteraturesBound().delta(EPSILON, remove=side) for side in (True, False))
    assert power(stated, RUNS // 2) > 0.999
    assert power(stated, 10_000) > 0.9
    assert power(stated, 2_000) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("exclusion", ["sampling", "participation"])
def test_the_bound_of_the_literature_is_refuted(exclusion):
    """The statement at one ε, counted on runs of the real sampler with the noise in all sums."""
    claim = LiteraturesBound()
    stated = max(claim.delta(EPSILON, remove=side) for side in (True, False))
    found = audit_users(
        mechanism(exclusion), epsilon=EPSILON, delta=stated, runs=RUNS, seed=1, progress=False
    )
    assert found.audited == {"user": 0, "examples": 2, "neighbors": 300, "per_stream": 50}
    assert "depends on what the user drew" in found.inexact
    assert found.estimates == ()
    assert found.counted.violated
    assert any("by counting" in each for each in found.violations)
    assert found.counted.delta_lower > 1.5 * stated
    by_curve = audit_users(
        mechanism(exclusion),
        epsilon=EPSILON,
        delta=stated,
        curve=claim.curve(),
        runs=RUNS // 4,
        seed=2,
        progress=False,
    )
    assert by_curve.counted.violated


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("exclusion", ["sampling", "participation"])
def test_what_is_proven_of_the_same_mechanism_stands(exclusion):
    run = mechanism(exclusion)
    name = {"sampling": "revealed-draws", "participation": "revealed-draws"}[exclusion]
    grid = np.linspace(0.0, 2.0, 9)
    stated = profile(run, grid, accountant=name)
    curve = StatedCurve(epsilon=stated.epsilon, remove=stated.remove, add=stated.add)
    delta = account(run, epsilon=EPSILON, accountant=name).delta
    assert delta > 0.0269  # no less than what the attack attains
    found = audit_users(
        run, epsilon=EPSILON, delta=delta, curve=curve, runs=RUNS, seed=1, progress=False
    )
    assert found.passed, found.violations
    assert found.counted.delta_lower <= delta
    assert 0.1 * EPSILON < found.shown.epsilon_lower < EPSILON


def test_without_neighbors_the_theorem_is_right_and_attained():
    """The same users without anybody near: the game's ratio is exact, and δ is the theorem's."""
    scheme = UserMinSep(
        graph=AttributionGraph.from_lists([[e // K] for e in range(400)]),
        probability=P,
        min_sep=2,
        steps=2,
        batch_size=8,
        burn_in=0,
    )
    run = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=SIGMA)
    truth = [
        mixture_delta(own_chain(K, p=P, b=2, steps=2), np.eye(2), SIGMA, EPSILON, remove=side)
        for side in (True, False)
    ]
    found = audit_users(
        run, epsilon=EPSILON, delta=max(truth), samples=20_000, runs=4000, progress=False
    )
    assert found.passed, found.violations
    for estimate, true in zip(found.estimates, truth, strict=True):
        assert abs(estimate.delta - true) <= 6 * estimate.standard_error + 1e-12
    assert found.estimates[0].lower > 0.9 * truth[0]


def test_noise_of_nine_tenths_in_the_games_of_users_is_found(monkeypatch):
    """The draws of the user's own coordinate: the power is that of χ² of 8192 squares."""
    from dptrain.noise import noise_stream

    assert power_against_scaled_noise(0.9, runs=2000, steps=2, alpha=LEVEL) > 0.999

    class Quiet:
        def __init__(self, stream):
            self.stream = stream

        def release(self, sums, deviation):
            return self.stream.release(sums, 0.9 * deviation)

    monkeypatch.setattr(
        "dptrain.auditing.draws.noise_stream",
        lambda *args, **options: Quiet(noise_stream(*args, **options)),
    )
    found = audit_users(
        mechanism("sampling"), epsilon=EPSILON, delta=0.5, runs=2000, progress=False
    )
    assert any("noise of 4000 draws" in each for each in found.violations)


def test_a_sampler_that_forgets_to_bar_is_found(monkeypatch):
    """Who takes part twice in b steps is proof; without barring somebody does, surely enough."""
    run, runs = mechanism("sampling", copies=50, leaves=4), 1000
    never = (1 - (1 - (1 - P) ** K) ** 2) ** runs
    assert never < 1e-12
    monkeypatch.setattr(
        "dptrain.sampling.users.exclusion.RecentUsers.admit", lambda self, step, sampled: sampled
    )
    found = audit_users(run, epsilon=EPSILON, delta=0.5, runs=runs, progress=False)
    assert any("min_sep=2" in each for each in found.violations)


def test_a_user_with_more_examples_than_was_stated_is_found():
    """k = 1 is stated and k = 2 is drawn: δ of the run is twice what was said, and measured."""
    graph = AttributionGraph.from_lists([[e // K] for e in range(400)])
    run = MatrixMechanism(
        scheme=UserMinSep(graph=graph, probability=P, min_sep=1, steps=4, batch_size=40),
        strategy=Identity(),
        noise_multiplier=SIGMA,
    )
    alone = UserMinSep(
        graph=AttributionGraph.from_lists([[e] for e in range(400)]),
        probability=P,
        min_sep=1,
        steps=4,
        batch_size=40,
    )
    stated = account(
        MatrixMechanism(scheme=alone, strategy=Identity(), noise_multiplier=SIGMA), delta=1e-3
    ).epsilon
    found = audit_users(run, epsilon=stated, delta=1e-3, samples=8000, runs=4000, progress=False)
    assert any("by the likelihood ratio" in each for each in found.violations)
    right = account(run, delta=1e-3).epsilon
    again = audit_users(run, epsilon=right, delta=1e-3, samples=8000, runs=4000, progress=False)
    assert again.passed, again.violations
    assert 0.9 * right < again.epsilon_lower <= right


def test_what_is_told_of_a_user():
    run = mechanism("sampling", copies=2, leaves=3)
    found = audit_users(run, epsilon=EPSILON, delta=0.5, user=2, runs=200, progress=False)
    told = found.to_dict()["audited"]
    assert (told["user"], told["examples"], told["neighbors"]) == (2, 2, 3)
    assert str(found).startswith("audited:                user 2: 2 examples, 3 others")
    assert user_game(run).members.user == 0
