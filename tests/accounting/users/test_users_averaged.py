"""Users in place of examples: the accountants of the other scheme answer, and they are right."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from dptrain import BSR, BandMF, Identity, MatrixMechanism, account, accountants_for, calibrate
from dptrain.accounting import find_accountants, profile, to_dp_event, trade_off
from dptrain.accounting.base.statement import of_units
from dptrain.accounting.min_sep import MinSepImportance
from dptrain.accounting.poisson import PoissonPLD
from dptrain.accounting.unamplified import UnsampledGaussian
from dptrain.commands.calibrate import keeping_certificates
from dptrain.core import Adjacency, Guarantee, Kind
from dptrain.individual import RenyiFilter
from dptrain.sampling import AttributionGraph, BallsInBins, CyclicPoisson, MinSep, PerUser, Poisson

USERS = 400
GRAPH = AttributionGraph.from_lists([[e % USERS] for e in range(3 * USERS + 100)])

PAIRS = {
    "Poisson": (Poisson(probability=0.05, dataset_size=USERS, steps=40), Identity()),
    "Poisson, cut": (
        Poisson(probability=0.05, dataset_size=USERS, steps=40, max_batch_size=30),
        Identity(),
    ),
    "CyclicPoisson": (
        CyclicPoisson(probability=0.2, cycle=4, dataset_size=USERS, steps=40),
        BandMF(bands=4),
    ),
    "BallsInBins": (BallsInBins(bins=10, epochs=4, dataset_size=USERS), BSR(bands=4)),
    "mmcc": (Poisson(probability=0.05, dataset_size=USERS, steps=40), BandMF(bands=4)),
}

# Where the automatic one simulates, each time with other seeds.
BY_NAME = {"BallsInBins": "balls-in-bins-renyi"}


def pair(name, sigma=1.5):
    """The mechanism of users, and that of examples whose theorems it takes over."""
    users, strategy = PAIRS[name]
    scheme = PerUser(graph=GRAPH, users=users, group_size=2)
    of_users = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)
    return of_users, dataclasses.replace(of_users, scheme=users)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", PAIRS)
def test_a_user_costs_what_an_example_does(name):
    ours, theirs = pair(name)
    who = {"accountant": BY_NAME[name]} if name in BY_NAME else {}
    found, expected = (account(each, delta=1e-4, **who) for each in (ours, theirs))
    assert found.epsilon == expected.epsilon
    assert found.accountant == expected.accountant
    assert found.kind is expected.kind
    assert found.mechanism_hash == ours.hash != theirs.hash
    assert found.scheme == ours.scheme.to_dict()
    profiles = [profile(each, [0.0, 1.0], **who).delta for each in (ours, theirs)]
    np.testing.assert_array_equal(*profiles)


@pytest.mark.slow
def test_calibration_and_what_attacks_reach_are_the_same():
    ours, theirs = pair("Poisson")
    noise, least = (
        calibrate(scheme=each.scheme, strategy=each.strategy, epsilon=2.0, delta=1e-4)
        for each in (ours, theirs)
    )
    assert noise.mechanism.noise_multiplier == least.mechanism.noise_multiplier
    assert noise.mechanism.scheme == ours.scheme
    assert noise.guarantee.mechanism_hash == noise.mechanism.hash
    found, expected = (trade_off(each, account(each, delta=1e-4)) for each in (ours, theirs))
    assert found.advantage == expected.advantage
    assert found.mu == expected.mu


def test_the_statement_is_about_users_and_all_of_their_examples():
    ours, _ = pair("Poisson")
    found = account(ours, delta=1e-4)
    assert found.unit.kind == "user"
    assert found.unit.max_examples is None
    text = str(found)
    assert "for each user (with all of their training examples, however many)" in text
    assert "Users participate as examples do under Poisson" in text
    assert "the mean of a user's gradients is clipped once" in text
    assert "Which examples belong to which users is assumed to be public" in text
    assert Guarantee.from_json(found.to_json()) == found


def test_every_accountant_is_asked_about_the_users():
    for name in PAIRS:
        ours, theirs = pair(name)
        for adjacency in Adjacency:
            tables = [accountants_for(each, adjacency=adjacency) for each in (ours, theirs)]
            for mine, other in zip(*tables, strict=True):
                assert mine.name == other.name
                assert (mine.refusal is None) == (other.refusal is None)
                assert (mine.kind, mine.cost, mine.reserved) == (
                    other.kind,
                    other.cost,
                    other.reserved,
                )
                assert mine.accountant == other.accountant


def test_by_name_or_by_hand():
    ours, theirs = pair("Poisson")
    expected = account(theirs, delta=1e-4, accountant="poisson-pld").epsilon
    for accountant in ("poisson-pld", PoissonPLD()):
        assert account(ours, delta=1e-4, accountant=accountant).epsilon == expected
    gaussian = account(ours, delta=1e-4, accountant="gaussian").epsilon
    assert gaussian == UnsampledGaussian().guarantee(ours, delta=1e-4).epsilon > expected
    with pytest.raises(ValueError, match="it needs Poisson or CyclicPoisson sampling"):
        PoissonPLD().guarantee(ours, delta=1e-4)  # of a scheme that it does not know
    (member,) = find_accountants(ours, "poisson-pld", adjacency=Adjacency.REPLACE_ONE)
    assert member.adjacency is Adjacency.REPLACE_ONE
    assert ours.participants == theirs
    assert theirs.participants is theirs
    assert to_dp_event(ours) == to_dp_event(theirs)
    with pytest.raises(ValueError, match="private under add_remove"):
        account(ours, delta=1e-4, adjacency=Adjacency.ADD_REMOVE)


def test_a_budget_for_every_example_is_refused():
    ours, _ = pair("Poisson")
    limits = {"target_epsilon": 4.0, "target_delta": 1e-4, "max_steps": 40}
    with pytest.raises(ValueError, match="scheme=PerUser"):
        RenyiFilter(**limits).check_plan(ours.scheme, ours.strategy)


@pytest.mark.slow
def test_simulation_is_of_users(tmp_path):
    users = MinSep(probability=0.05, min_sep=4, dataset_size=USERS, steps=12)
    scheme = PerUser(graph=GRAPH, users=users, group_size=2)
    ours = MatrixMechanism(scheme=scheme, strategy=BandMF(bands=3), noise_multiplier=1.5)
    theirs = dataclasses.replace(ours, scheme=users)
    simulating = MinSepImportance(seed=3, progress=False)
    found = account(ours, delta=1e-3, accountant=simulating)
    expected = account(theirs, delta=1e-3, accountant=simulating)
    assert found.epsilon == expected.epsilon
    assert found.certificate == expected.certificate
    assert found.kind is Kind.CONFIDENCE
    assert found.unit.kind == "user"
    member = keeping_certificates(ours, "min-sep-importance", None, tmp_path)
    assert isinstance(member, MinSepImportance)
    assert member.cache == tmp_path
    options = {"epsilon": 4.0, "delta": 2e-3, "accountant": dataclasses.replace(member, seed=3)}
    made = calibrate(scheme=scheme, strategy=BandMF(bands=3), **options)
    assert made.guarantee.kind is Kind.VERIFIED
    assert made.guarantee.mechanism_hash == made.mechanism.hash
    again = calibrate(scheme=users, strategy=BandMF(bands=3), **options)  # finds the certificate
    assert again.guarantee.certificate == made.guarantee.certificate


def hockey_stick(first, second, epsilon):
    """∫ (P - e^ε Q)_+ of two mixtures of Gaussians on a line, lists of (weight, mean, σ)."""
    y = np.linspace(-14.0, 14.0, 400_001)
    p, q = (sum(w * norm.pdf(y, m, s) for w, m, s in each) for each in (first, second))
    return float(np.sum(np.maximum(p - math.exp(epsilon) * q, 0.0)) * (y[1] - y[0]))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("group_size", [1, 2, 3])
@pytest.mark.parametrize("gradients", [(5.0, 5.0, 5.0), (9.0, -9.0, 0.4), (0.6, 1.4, -0.3)])
def test_one_step_of_one_user_by_quadrature(group_size, gradients):
    """δ of the very release, over participation and the choice of examples, R = 1.

    The bound is attained where all choices agree, and never exceeded.
    """
    p, sigma = 0.3, 0.8
    graph = AttributionGraph.from_lists([["ann"]] * 3 + [["bob"]])
    users = Poisson(probability=p, dataset_size=2, steps=1)
    mechanism = MatrixMechanism(
        scheme=PerUser(graph=graph, users=users, group_size=group_size),
        strategy=Identity(),
        noise_multiplier=sigma,
    )
    choices = list(itertools.combinations(gradients, group_size))
    means = [np.clip(np.mean(chosen), -1.0, 1.0) for chosen in choices]
    present = [(1 - p, 0.0, sigma), *((p / len(means), m, sigma) for m in means)]
    absent = [(1.0, 0.0, sigma)]
    for epsilon in (0.1, 0.5, 1.0):
        claimed = profile(mechanism, [epsilon])
        attained = len({float(m) for m in means}) == 1 and abs(means[0]) == 1.0
        for claim, (one, other) in (
            (claimed.remove[0], (present, absent)),
            (claimed.add[0], (absent, present)),
        ):
            true = hockey_stick(one, other, epsilon)
            assert true <= claim * (1 + 1e-6) + 1e-12
            if attained:
                assert claim == pytest.approx(true, rel=1e-3, abs=1e-9)


def test_a_statement_of_participants_is_none_where_the_number_of_users_is_private():
    ours, theirs = pair("Poisson")
    found = PoissonPLD().guarantee(theirs, delta=1e-4)
    about = of_units(found, ours)
    assert (about.unit, about.mechanism_hash) == (ours.scheme.unit, ours.hash)
    assert of_units(found, theirs) is found
    hidden = dataclasses.replace(found, adjacency=Adjacency.ADD_REMOVE)
    with pytest.raises(ValueError, match="private under add_remove"):
        of_units(hidden, ours)
