"""Users as canaries in runs of the real engine: whole users, their own laws, and what is broken."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from scipy.stats import binom, hypergeom, norm

from dptrain import account, profile
from dptrain.auditing import StatedCurve, audit_canaries, count, run_user_canaries, whitening_matrix
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import (
    AttributionGraph,
    GraphPartition,
    MinSep,
    PerUser,
    Poisson,
    UserCyclic,
    UserFixed,
    UserMinSep,
)
from dptrain.strategies import BSR, BandMF, Identity
from tests.helpers.broken_user_engines import CYCLIC, USER_FAULTS, canaries, own, shared

# User 0 has examples in every slot, user 3 only shares; all sizes differ.
LISTS = [[0], [0], [0, 3], [1], [1, 3], [2], [2], [2], [2, 4], [4], [5]] + [
    [6 + e] for e in range(9)
]


def in_slots(lists, *, steps, sigma, share=0.5, cycle=2, spread=2, strategy=None):
    partition = GraphPartition.of_graph(
        AttributionGraph.from_lists(lists), cycle=cycle, spread=spread, method="greedy"
    )
    scheme = UserCyclic(partition=partition, batch_size=share * min(partition.sizes), steps=steps)
    return MatrixMechanism(scheme=scheme, strategy=strategy or Identity(), noise_multiplier=sigma)


def separated(graph, *, steps=9, p=0.15, sigma=3.0, b=3, exclusion="sampling"):
    scheme = UserMinSep(
        graph=graph, probability=p, min_sep=b, steps=steps, batch_size=1, exclusion=exclusion
    )
    return MatrixMechanism(scheme=scheme, strategy=BandMF(bands=b), noise_multiplier=sigma)


def of_coins(graph, *, min_sep):
    return UserMinSep(graph=graph, probability=0.1, min_sep=min_sep, steps=3, batch_size=4)


def examples_of(lists, user):
    """Of the user whose number is ``user`` in the graph, which counts them as they come up."""
    names = list(dict.fromkeys(name for users in lists for name in users))
    return {e for e, users in enumerate(lists) if names[user] in users}


def slot_counts(mechanism, mine):
    """k and q of every step, from the partition."""
    scheme = mechanism.scheme
    found = []
    for t in range(scheme.steps):
        slot = t % scheme.cycle
        members = np.flatnonzero(scheme.partition.slots == slot)
        found.append((len(mine & set(members.tolist())), scheme.batch_size / len(members)))
    return found


def test_canaries_share_no_example_and_nobody_else_could_be_one():
    rng = np.random.default_rng(0)
    lists = [sorted(set(rng.integers(100, size=rng.integers(1, 4)).tolist())) for _ in range(120)]
    mechanism = in_slots(lists, steps=4, sigma=2.0)
    found = run_user_canaries(mechanism, seed=1, progress=False)
    sets = {user: examples_of(lists, user) for user in range(mechanism.scheme.graph.users)}
    chosen = [sets[user] for user in found.users]
    assert found.examples == tuple(len(each) for each in chosen)
    for one, other in itertools.combinations(chosen, 2):
        assert not one & other
    together = set().union(*chosen)
    for user in set(sets) - set(found.users):
        mine = sets[user]
        assert mine & together or not any(k for k, _ in slot_counts(mechanism, mine)), user
    few = run_user_canaries(mechanism, canaries=9, seed=1, progress=False)
    assert len(set(few.users)) == 9
    assert set(few.users) < set(found.users)
    assert few.released.shape == (9, 4)


def test_exposure_says_nothing_about_the_order():
    """Of 300 canaries 100 have three examples: in any half there are about 50 of them."""
    sizes = [3] * 100 + [1] * 200
    graph = AttributionGraph.from_lists([[u] for u, k in enumerate(sizes) for _ in range(k)])
    mechanism = separated(graph, steps=2, b=1)
    found, other = (run_user_canaries(mechanism, seed=s, progress=False) for s in (1, 2))
    assert sorted(found.examples) == sorted(sizes)
    assert found.users != other.users
    low, high = hypergeom.ppf([1e-9, 1 - 1e-9], 300, 100, 150)
    for run in (found, other):
        assert low <= run.examples[:150].count(3) <= high
        assert [sizes[user] for user in run.users] == list(run.examples)


@pytest.mark.slow
def test_a_true_statement_about_unequal_users_passes():
    """Two examples of half of the users, hardly any noise: numbered by exposure 8% failed here.

    A user is given away exactly if one of its coins comes up, with a chance of δ.
    """
    sizes, p, sigma = [2] * 500 + [1] * 500, 0.002, 0.05
    graph = AttributionGraph.from_lists([[u] for u, k in enumerate(sizes) for _ in range(k)])
    scheme = UserMinSep(graph=graph, probability=p, min_sep=1, steps=1, batch_size=3)
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)
    # Noise passes one half in one of 1e23 draws.
    delta = 1 - (1 - p) ** 2 + 1e-9
    at = np.array([delta])
    curve = StatedCurve(epsilon=np.zeros(1), remove=at, add=at)
    found = run_user_canaries(mechanism, spare=2, seed=3, progress=False)
    rng, failed, runs = np.random.default_rng(4), 0, 100
    for _ in range(runs):
        included = rng.random(1000) < 0.5
        taken = rng.binomial(found.examples, p) * included
        released = taken[:, None] + rng.normal(0, sigma, (1000, 1))
        played = dataclasses.replace(found, included=included, released=released)
        scores = played.scores(mechanism)
        even = min(included.sum(), (~included).sum())
        failed += count(
            scores[included][:even],
            scores[~included][:even],
            alpha=0.01 / 4,
            epsilon=1.0,
            delta=delta,
            curve=curve,
        ).violated
    assert failed <= binom.ppf(1 - 1e-6, runs, 0.01 / 4)


def test_a_coin_is_about_all_examples_of_a_user():
    """Every slot whole in every turn: what is released is how many examples the user has there."""
    lists = [[e // 3, 50 + e % 10] for e in range(60)]
    partition = GraphPartition.from_slots(
        AttributionGraph.from_lists(lists), np.arange(60) % 2, cycle=2
    )
    scheme = UserCyclic(partition=partition, batch_size=30, steps=4)
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1e-3)
    found = run_user_canaries(mechanism, max_grad_norm=0.3, seed=3, progress=False)
    assert len(found.users) >= 8
    assert 0 < np.count_nonzero(found.included) < len(found.users)
    for user, included, released in zip(found.users, found.included, found.released, strict=True):
        mine = examples_of(lists, user)
        expected = [len([e for e in mine if e % 2 == t % 2]) * included for t in range(4)]
        np.testing.assert_allclose(released, expected, rtol=0, atol=0.01)
    np.testing.assert_allclose(found.spare, 0, atol=0.01)


def test_each_canary_is_scored_by_the_law_of_its_own_draws():
    """Against the ratio by all values that its numbers of examples can have."""
    mechanism = in_slots(LISTS, steps=4, sigma=0.7, strategy=BSR(bands=2))
    found = run_user_canaries(mechanism, spare=5, seed=4, progress=False)
    assert len(set(found.examples)) > 1
    matrix = whitening_matrix(mechanism)
    sigma = mechanism.noise_multiplier
    scores = found.scores(mechanism)
    for user, released, score in zip(found.users, found.released, scores, strict=True):
        y, ratio = matrix @ released, 0.0
        steps = slot_counts(mechanism, examples_of(LISTS, user))
        for x in itertools.product(*(range(k + 1) for k, _ in steps)):
            mean = matrix @ np.array(x, float)
            chance = math.prod(binom.pmf(j, k, q) for j, (k, q) in zip(x, steps, strict=True))
            ratio += chance * math.exp((y @ mean - mean @ mean / 2) / sigma**2)
        assert score == pytest.approx(math.log(ratio), abs=1e-9), user


@pytest.mark.parametrize("seed", range(5))
def test_how_often_a_test_speaks_among_random_users(seed):
    """The law of Theorem 19.10: real zeros, and tails that the binomial law of the mean bounds."""
    rng = np.random.default_rng(seed)
    size, n = 9, 4
    p = rng.beta(0.3, 0.3, size)
    law = np.zeros(n + 1)
    for some in itertools.combinations(range(size), n):
        one = np.ones(1)
        for u in some:
            one = np.convolve(one, [1 - p[u], p[u]])
        law += one / math.comb(size, n)
    roots = np.roots(law[::-1])
    assert np.abs(roots.imag).max() < 1e-6 * np.abs(roots).max()
    mean = p.mean()
    assert law @ np.arange(n + 1) == pytest.approx(n * mean, rel=1e-12)
    for k in range(n + 1):
        if k >= n * mean + 1:
            assert law[k:].sum() <= binom.sf(k - 1, n, mean) + 1e-12
        if k <= n * mean - 1:
            assert law[: k + 1].sum() <= binom.cdf(k, n, mean) + 1e-12


def rates_by_simulation(scheme, mine, runs, seed):
    """The mean of x by the definition: a coin for each example, nobody near a coin is used."""
    rng = np.random.default_rng(seed)
    b, past = scheme.min_sep, scheme.burn_in
    coins = rng.random((runs, past + scheme.steps, mine)) < scheme.probability
    some = coins.any(axis=2)
    near = np.zeros_like(some)
    for lag in range(1, b):
        near[:, lag:] |= some[:, :-lag]
    used = coins.sum(axis=2) * ~near
    return used[:, past:].mean(axis=0), used[:, past:].var(axis=0)


@pytest.mark.parametrize("kind", ["slots", "separation"])
def test_what_is_released_is_the_game(kind):
    """Mean and spread of the whitened release, of users who are in and of those who are out."""
    if kind == "slots":
        lists = [[e // 4, 700 + e % 50] for e in range(2000)] + [[e] for e in range(1000, 1100)]
        mechanism = in_slots(
            lists,
            steps=6,
            sigma=2.0,
            cycle=4,
            strategy=BSR(bands=2),
        )
        found = run_user_canaries(mechanism, spare=400, seed=5, progress=False)
        each = [slot_counts(mechanism, examples_of(lists, user)) for user in found.users]
        means = np.array([[k * q for k, q in steps] for steps in each])
        spreads = np.array([[k * q * (1 - q) for k, q in steps] for steps in each])
    else:
        mechanism = separated(own(600, 3))
        found = run_user_canaries(mechanism, spare=400, seed=6, progress=False)
        assert len(found.users) == 600
        mean, spread = rates_by_simulation(mechanism.scheme, 3, 200_000, 7)
        means, spreads = np.tile(mean, (600, 1)), np.tile(spread, (600, 1))
    matrix, sigma = whitening_matrix(mechanism), mechanism.noise_multiplier
    inside, outside = (
        found.released[rows] @ matrix.T for rows in (found.included, ~found.included)
    )
    expected = means[found.included].mean(axis=0) @ matrix.T
    # A sum of so many steps has at most their deviations added up.
    deviation = np.sqrt(spreads[found.included].mean(axis=0)) @ np.abs(matrix).T
    slack = 6 * np.sqrt((sigma**2 + deviation**2) / len(inside)) + 6 * deviation / np.sqrt(200_000)
    assert (np.abs(inside.mean(axis=0) - expected) < slack).all()
    assert abs(outside.mean()) < 6 * sigma / np.sqrt(outside.size)
    assert abs(outside.var() / sigma**2 - 1) < 6 * np.sqrt(2 / outside.size)


def test_the_engine_passes_and_users_are_told_apart():
    """Everybody takes part with all examples in every step: a Gaussian of μ = k √n / σ."""
    graph = own(800, 2)
    scheme = UserMinSep(graph=graph, probability=1.0, min_sep=1, steps=4, batch_size=1600)
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=2.0)
    mu, delta = 2 * np.sqrt(4) / 2.0, 1e-6
    found = run_user_canaries(mechanism, seed=8, progress=False)
    assert found.who == "users of 2 examples as canaries"
    scores = found.scores(mechanism)
    # Of the log-likelihood ratio half is above zero less Φ(-μ/2).
    right = np.count_nonzero((scores > 0) == found.included)
    expected = norm.cdf(mu / 2) * 800
    assert abs(right - expected) < 6 * np.sqrt(expected * norm.sf(mu / 2))
    epsilon = account(mechanism, delta=delta).epsilon
    stated = profile(mechanism, np.linspace(0.0, 1.5 * epsilon, 13))
    curve = StatedCurve(epsilon=stated.epsilon, remove=stated.remove, add=stated.add)
    audit = audit_canaries(mechanism, found, epsilon=epsilon, delta=delta, curve=curve)
    assert audit.passed, audit.violations
    assert 0.5 < audit.one_run.epsilon_lower < epsilon
    assert "800 users of 2 examples as canaries, in or out by coins" in str(audit)
    value = json.loads(audit.to_json())
    assert (value["canaries"], value["who"]) == (800, "users of 2 examples as canaries")
    # Half of that cannot be claimed of users: of examples it could.
    claim = account(
        MatrixMechanism(
            scheme=Poisson(probability=1.0, dataset_size=1600, steps=4),
            strategy=Identity(),
            noise_multiplier=2.0,
        ),
        delta=delta,
    )
    grid = np.linspace(0.0, 3.0, 13)
    one = norm.cdf(mu / 4 - grid / (mu / 2)) - np.exp(grid) * norm.cdf(-mu / 4 - grid / (mu / 2))
    per_example = StatedCurve(epsilon=grid, remove=one, add=one)
    wrong = audit_canaries(mechanism, found, epsilon=claim.epsilon, delta=delta, curve=per_example)
    assert wrong.counted.violated


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("name", USER_FAULTS)
def test_what_is_broken_is_found(name):
    """At a chance of a millionth that what is right fails."""
    fault = USER_FAULTS[name]
    assert fault.power() > 0.999
    assert fault.audited(seed=2) == ()
    with fault.broken():
        assert fault.audited(seed=2)
    assert fault.audited(seed=2) == ()


def test_the_power_knows_how_many_canaries_there_are():
    found = run_user_canaries(CYCLIC, spare=2, seed=1, progress=False)
    assert canaries() <= len(found.users)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (
            UserMinSep(graph=shared(40), probability=0.1, min_sep=2, steps=3, batch_size=9),
            "min_sep=2",
        ),
        (UserMinSep(graph=own(1), probability=0.1, min_sep=1, steps=3, batch_size=1), "1 users"),
        (UserFixed(graph=own(40), batch_size=4, min_sep=2, steps=3), "UserMinSep"),
        (MinSep(probability=0.1, min_sep=2, steps=3, dataset_size=50), "use audit_mechanism"),
        (
            PerUser(
                users=Poisson(probability=0.1, steps=3, dataset_size=40),
                graph=own(40),
                group_size=2,
            ),
            "audit_mechanism, which audits it",
        ),
    ],
    ids=["neighbors are barred", "one user", "fixed", "examples", "per user"],
)
def test_who_cannot_be_a_canary_is_said(scheme, message):
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
    with pytest.raises(ValueError, match=message):
        run_user_canaries(mechanism, progress=False)


def test_arguments_are_checked():
    mechanism = separated(own(9, 2))
    for name, value in [
        ("canaries", 7),
        ("spare", 1),
        ("layers", 9 + 3),
        ("seed", -1),
        ("max_grad_norm", 0.0),
    ]:
        with pytest.raises(ValueError, match=f"{name}={value}"):
            run_user_canaries(mechanism, **{"spare": 2, name: value}, progress=False)
    with pytest.raises(ValueError, match="noise_multiplier=0"):
        run_user_canaries(mechanism.with_noise(0.0), progress=False)
    with pytest.raises(TypeError, match="max_grad_norm='1'"):
        run_user_canaries(mechanism, max_grad_norm="1", progress=False)


def test_a_run_is_judged_by_its_own_mechanism():
    mechanism = separated(own(20, 2), steps=4)
    found = run_user_canaries(mechanism, spare=2, seed=1, progress=False)
    others = {
        "steps, but mechanism has 5": separated(own(20, 2), steps=5),
        r"\(20 users\) do not have as many": separated(own(20, 3), steps=4),
        r"\(9 users\)": separated(own(9, 2), steps=4),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=message):
            audit_canaries(other, found, epsilon=1.0, delta=1e-3)


def test_too_few_of_either_kind_are_told():
    found = run_user_canaries(separated(own(20, 2), steps=4), spare=2, seed=1, progress=False)
    few = dataclasses.replace(found, included=np.arange(20) < 3)
    with pytest.raises(ValueError, match="3 of 20 canaries are in, but counting needs 4"):
        audit_canaries(separated(own(20, 2), steps=4), few, epsilon=1.0, delta=1e-3)
