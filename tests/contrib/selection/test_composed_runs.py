"""Several runs together, against enumeration, closed forms, and the optimal composition."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy.special import comb

from dptrain.accounting import ComposedRuns, TradeOff, account, compose_runs, one_of_runs
from dptrain.accounting.losses import HeterogeneousComposition, gaussian
from dptrain.contrib.selection.pair import losses
from dptrain.core import Adjacency, Kind, Unit
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Poisson
from dptrain.strategies import Identity
from tests.contrib.selection.mechanisms import (
    exact_trade_off,
    gaussian_trade_off,
    hockey_stick,
    random_pair,
)
from tests.oracles.optional_stopping import worst_delta


def bare(epsilon, delta, kind=Kind.VERIFIED):
    return TradeOff(
        epsilon=(epsilon,), remove=(delta,), add=(delta,), floor=1e-6, kind=kind, accountant="point"
    )


def test_the_pair_has_the_profile():
    """Of 200 mechanisms, on a fine grid: never below, and above by what the grid rounds only."""
    generator = np.random.default_rng(1)
    for _ in range(200):
        p, q = random_pair(generator)
        run = exact_trade_off(p, q)
        for remove, (first, second) in ((True, (p, q)), (False, (q, p))):
            found = HeterogeneousComposition([(losses(run, spacing=1e-3, remove=remove), 1)])
            for epsilon in (0.0, 0.1, 0.5, 1.3):
                truth = hockey_stick(first, second, epsilon)
                claimed = float(found.delta(epsilon))
                assert truth - 1e-12 <= claimed <= truth + 1e-6


def test_runs_of_small_mechanisms_compose_as_their_products_do():
    generator = np.random.default_rng(2)
    for _ in range(30):
        pairs = [random_pair(generator) for _ in range(2)]
        pairs.append(pairs[0])
        p = np.einsum("i,j,k", *(pair[0] for pair in pairs)).ravel()
        q = np.einsum("i,j,k", *(pair[1] for pair in pairs)).ravel()
        runs = [exact_trade_off(*pair) for pair in pairs]
        for delta in (0.01, 0.3):
            found = compose_runs(runs, delta=delta).epsilon
            if math.isfinite(found):
                assert max(hockey_stick(p, q, found), hockey_stick(q, p, found)) <= delta + 1e-9
            else:
                assert max(hockey_stick(p, q, 700.0), hockey_stick(q, p, 700.0)) > delta - 1e-9
            if 0 < found < math.inf:
                less = found - 0.01
                assert max(hockey_stick(p, q, less), hockey_stick(q, p, less)) >= delta - 0.01


@pytest.mark.parametrize("mu", [0.1, 0.8, 2.5])
@pytest.mark.parametrize("count", [1, 4, 40])
def test_gaussians_compose_to_a_gaussian(mu, count):
    truth = gaussian.epsilon(1e-6, mu * math.sqrt(count))
    found = compose_runs([gaussian_trade_off(mu)] * count, delta=1e-6).epsilon
    assert truth <= found <= truth * 1.001


def test_different_gaussians_compose_to_a_gaussian():
    scales = [0.1, 0.3, 0.5, 1.0, 1.0]
    truth = gaussian.epsilon(1e-6, math.hypot(*scales))
    found = compose_runs([gaussian_trade_off(mu) for mu in scales], delta=1e-6).epsilon
    assert truth <= found <= truth * 1.001


def optimal(epsilon, delta, count):
    """(ε', δ') of the optimal composition, Kairouz, Oh & Viswanath 2015, Theorem 3.3."""
    for i in range(count // 2 + 1):
        total = (
            sum(
                comb(count, j)
                * (math.exp((count - j) * epsilon) - math.exp((count - 2 * i + j) * epsilon))
                for j in range(i)
            )
            / (1.0 + math.exp(epsilon)) ** count
        )
        yield (count - 2 * i) * epsilon, 1.0 - (1.0 - delta) ** count * (1.0 - total)


@pytest.mark.parametrize(("epsilon", "count"), [(0.1, 30), (0.5, 12), (2.0, 5)])
def test_bare_guarantees_compose_as_they_best_can(epsilon, count):
    runs = [bare(epsilon, 1e-8)] * count
    for total, delta in optimal(epsilon, 1e-8, count):
        if total > 0 and delta < 0.5:
            found = compose_runs(runs, delta=delta * (1 + 1e-6)).epsilon
            assert found == pytest.approx(total, rel=1e-4)
    assert compose_runs(runs, delta=0.9 * count * 1e-8).epsilon == math.inf


def test_never_more_than_adding_up():
    runs = [bare(1.0, 1e-6), bare(3.0, 1e-6)]
    found = compose_runs(runs, delta=2e-6)
    assert found.epsilon <= 4.0
    assert found.kind is Kind.VERIFIED


def test_the_weakest_run_says_how_it_was_shown():
    runs = [gaussian_trade_off(0.5), bare(1.0, 1e-9, Kind.ESTIMATE)]
    found = compose_runs(runs, delta=1e-5)
    assert found.kind is Kind.ESTIMATE
    assert "WITHOUT PROOF" in str(found)
    assert compose_runs(runs[:1], delta=1e-5).kind is Kind.UPPER_BOUND
    assert found.to_dict()["runs"] == 2


@pytest.mark.parametrize(
    ("mu", "count", "times"), [(0.5, 2, 1.8), (0.5, 10, 5.3), (0.2, 30, 5.5), (2.0, 4, 2.5)]
)
def test_the_runs_that_were_made_are_no_plan(mu, count, times):
    """Whoever stops where it is best: all planned runs cover that, and those that were made do not.

    What is stated is compared with what the best rule attains, found without the library.
    """
    delta, run = 1e-5, gaussian_trade_off(mu)
    stated = compose_runs([run] * count, delta=delta)
    least, most = worst_delta([mu] * count, [stated.epsilon] * count, spacing=4e-3 * mu)
    assert 0.9 * delta <= least <= delta
    assert most >= 0.99 * delta
    for told in (str(stated), json.dumps(stated.to_dict())):
        assert "fixed before the first result" in told
    assert f"All {count} planned runs together, whichever of them were made" in str(stated)
    made = [compose_runs([run] * k, delta=delta).epsilon for k in range(1, count + 1)]
    assert worst_delta([mu] * count, made, spacing=4e-3 * mu)[0] > times * delta


def test_no_privacy_stays_none():
    nothing = bare(0.0, 1.0)
    assert compose_runs([gaussian_trade_off(0.5), nothing], delta=1e-5).epsilon == math.inf


SIZES = {"batch_size": 20, "dataset_size": 1000, "steps": 20}
POISSON = MatrixMechanism(
    scheme=Poisson.for_batch_size(**SIZES), strategy=Identity(), noise_multiplier=1.5
)
USERS = Unit(kind="user", max_examples=2)


@pytest.mark.parametrize(
    "changes",
    [{"adjacency": Adjacency.REPLACE_ONE}, {"unit": USERS}, {"unit": None}, {"adjacency": None}],
    ids=str,
)
def test_runs_about_different_things_are_refused(changes):
    """And accepted once they are about one, whichever that is."""
    run = TradeOff.of(account(POISSON, delta=1e-5))
    assert (run.adjacency, run.unit) == (Adjacency.ZERO_OUT, Unit())
    other = dataclasses.replace(run, **changes)
    for act in (
        lambda runs: compose_runs(runs, delta=1e-5),
        lambda runs: ComposedRuns(runs, disjoint=True),
        one_of_runs,
    ):
        assert act([other, other])
        with pytest.raises(ValueError, match=r"runs\[0\] protects .* and runs\[2\] "):
            act([run, run, other])
    mixed = one_of_runs([other, dataclasses.replace(other, kind=Kind.ESTIMATE)])
    assert (mixed.adjacency, mixed.unit) == (other.adjacency, other.unit)
    assert TradeOff.from_json(other.to_json()) == other


def test_runs_of_real_accountants_under_two_relations_are_refused():
    """By zero-out each is smaller than by replace-one, so the mix would look like a bargain."""
    runs = [
        TradeOff.of(account(POISSON, delta=1e-5, adjacency=each))
        for each in (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE)
    ]
    with pytest.raises(ValueError, match=r"adjacency 'zero_out' and .* 'replace_one'"):
        compose_runs(runs, delta=1e-4)


def test_refusals():
    with pytest.raises(ValueError, match="at least one"):
        compose_runs([], delta=1e-5)
    with pytest.raises(ValueError, match="delta"):
        compose_runs([bare(1.0, 1e-6)], delta=1.0)
    with pytest.raises(TypeError, match="runs"):
        compose_runs([(1.0, 1e-5)], delta=1e-5)
