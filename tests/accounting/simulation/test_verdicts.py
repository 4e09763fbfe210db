"""Verdicts that are looked at several times, and a direction that is shown from the other end."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dptrain.accounting.simulation.confidence import binary_kl
from dptrain.accounting.simulation.draws import SharedDraws
from dptrain.accounting.simulation.terms import WeightedTerms
from dptrain.accounting.simulation.verdicts import Rule, judge, verify_points

Q = 0.2


def coins(mean: float) -> WeightedTerms:
    """Terms that are 0 or 1: the law that the bound is sharpest for."""
    return WeightedTerms(1.0, 4096, lambda rng, size: (rng.random(size) < mean).astype(float))


def test_a_look_accepts_what_its_share_of_the_failure_allows() -> None:
    rule = Rule(violated=0.01, failure=1e-6, most=10**7)
    looks = rule.looks(1.0)
    assert looks == sorted(set(looks))
    assert len(looks) <= 12
    for samples in looks:
        mean = rule.threshold(1.0, samples)
        assert 0.0 <= mean < 0.01
        # 12 looks: the chance that any of them accepts a violating mean is q at most.
        assert 12 * math.exp(-samples * binary_kl(mean, 0.01)) <= 1e-6 * (1 + 1e-6)
    assert Rule(violated=0.01, failure=1e-6, most=10).looks(1.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_false_claims_are_rare_however_often_one_looks(seed: int) -> None:
    rule = Rule(violated=0.05, failure=Q, most=10**6, ample=4000)
    accepted = sum(
        judge(
            coins(0.0501), rule, draws=SharedDraws(seed, 1), stream=[run], progress=lambda _: None
        )["accepted"]
        for run in range(300)
    )
    assert accepted <= 300 * Q + 6 * math.sqrt(300 * Q * (1 - Q))


@pytest.mark.slow
@pytest.mark.parametrize("violates", ["remove", "add"])
def test_false_claims_of_a_grid_are_rare(violates: str) -> None:
    """From the second of three points on one direction violates: the first is the answer."""
    rule = Rule(violated=0.05, failure=Q, most=10**6, ample=4000)

    def at(point: float) -> dict[str, WeightedTerms]:
        found = {"remove": coins(0.001), "add": coins(0.001)}
        return found if point < 2 else {**found, violates: coins(0.0501)}

    wrong = 0
    for run in range(200):
        rows = verify_points([1.0, 2.0, 3.0], at, rule, SharedDraws(3, 1), run)
        wrong += max((row["point"] for row in rows if row["accepted"]), default=0.0) > 1.0
    assert wrong <= 200 * Q + 6 * math.sqrt(200 * Q * (1 - Q))


def test_a_small_mean_takes_few_samples_and_a_large_one_is_given_up() -> None:
    rule = Rule(violated=0.01, failure=1e-6, most=10**7)
    looks = rule.looks(1.0)

    def verdict(mean: float) -> dict:
        return judge(coins(mean), rule, draws=SharedDraws(7, 1), stream=[], progress=lambda _: None)

    small, large = verdict(1e-4), verdict(0.05)
    assert small["accepted"]
    assert small["samples"] <= looks[1]
    assert not large["accepted"]
    assert large["samples"] < looks[-1] / 2
    assert np.isclose(small["threshold"], rule.threshold(1.0, small["samples"]))
