"""Events of dp_accounting: its accountant says the same of them, or something looser."""

import dataclasses

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from dptrain.accounting import account
from dptrain.contrib.accountants import to_dp_event
from dptrain.contrib.accountants.dp_event import neighboring_relation
from dptrain.core.guarantee import Adjacency
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import (
    AttributionGraph,
    BallsInBins,
    CyclicPoisson,
    MinSep,
    Poisson,
    Shuffled,
    UserFixed,
)
from dptrain.strategies import BSR, Dense, Identity

POISSON = Poisson(probability=0.02, dataset_size=2000, steps=100)
CYCLIC = CyclicPoisson(probability=0.1, cycle=5, dataset_size=2000, steps=98)
TRUNCATED = Poisson(probability=0.02, dataset_size=2000, steps=100, max_batch_size=50)
SHUFFLED = Shuffled(batch_size=100, dataset_size=2000, epochs=3)
DELTA = 1e-5


def mechanism(scheme, strategy=None, sigma=1.0):
    return MatrixMechanism(scheme=scheme, strategy=strategy or Identity(), noise_multiplier=sigma)


def theirs(item, adjacency=Adjacency.ZERO_OUT):
    # A grid ten times their own default costs them 1e-3 of ε at most, and a tenth of the time.
    accountant = PLDAccountant(neighboring_relation(adjacency), value_discretization_interval=1e-3)
    return accountant.compose(to_dp_event(item, adjacency)).get_epsilon(DELTA)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("item", "name"),
    [
        (mechanism(POISSON), None),
        (mechanism(MinSep(probability=0.02, min_sep=1, dataset_size=2000, steps=100)), None),
        (mechanism(POISSON, Dense(matrix=2.0 * np.eye(100)), 2.0), None),
        (mechanism(CYCLIC, BSR(bands=3), 1.5), "poisson-pld"),
        (mechanism(dataclasses.replace(TRUNCATED, max_batch_size=2000)), None),
        (mechanism(dataclasses.replace(TRUNCATED, max_batch_size=90)), None),
        (mechanism(SHUFFLED, BSR(bands=3), 4.0), None),
        (mechanism(dataclasses.replace(SHUFFLED, reshuffle=False), BSR(bands=3), 4.0), None),
    ],
)
def test_same_epsilon(item, name):
    ours = account(item, delta=DELTA, accountant=name).epsilon
    assert theirs(item) == pytest.approx(ours, rel=0.01)


def test_truncation_that_shows_is_looser_there():
    item = mechanism(TRUNCATED)
    assert theirs(item) > account(item, delta=DELTA).epsilon * 1.005


def test_poisson_under_the_three_relations():
    item = mechanism(POISSON)
    hidden = mechanism(dataclasses.replace(POISSON, nominal_size=1900))
    zero_out, add_remove = theirs(item), theirs(hidden, Adjacency.ADD_REMOVE)
    assert zero_out == pytest.approx(add_remove, rel=1e-6)
    # x against -x is a pair of twice the distance.
    assert theirs(item, Adjacency.REPLACE_ONE) > 1.2 * zero_out


def test_users_and_single_steps():
    graph = AttributionGraph(examples=9, users=9, edges=9, max_examples=1, fingerprint="0" * 64)
    fixed = UserFixed(graph=graph, batch_size=3, min_sep=2, steps=6)
    item = mechanism(fixed, sigma=2.0)
    assert to_dp_event(item) == dp_event.GaussianDpEvent(2.0 / np.sqrt(3))
    once = mechanism(dataclasses.replace(POISSON, steps=1))
    assert isinstance(to_dp_event(once), dp_event.PoissonSampledDpEvent)


def test_no_noise_is_no_privacy():
    for scheme in (POISSON, SHUFFLED, TRUNCATED):
        assert to_dp_event(mechanism(scheme, sigma=0.0)) == dp_event.NonPrivateDpEvent()
    assert theirs(mechanism(POISSON, sigma=0.0)) == np.inf


@pytest.mark.parametrize(
    ("item", "adjacency", "why"),
    [
        (mechanism(POISSON, BSR(bands=2)), Adjacency.ZERO_OUT, "bands=2"),
        (mechanism(TRUNCATED, BSR(bands=2)), Adjacency.ZERO_OUT, "bands=2"),
        (mechanism(CYCLIC, BSR(bands=6)), Adjacency.ZERO_OUT, "cycle=5"),
        (
            mechanism(dataclasses.replace(CYCLIC, nominal_size=2000)),
            Adjacency.ADD_REMOVE,
            "assignment='independent'",
        ),
        (mechanism(POISSON), Adjacency.ADD_REMOVE, "nominal_size="),
        (mechanism(dataclasses.replace(POISSON, nominal_size=9)), Adjacency.ZERO_OUT, "add_remove"),
        (
            mechanism(dataclasses.replace(TRUNCATED, nominal_size=2000)),
            Adjacency.ADD_REMOVE,
            "one number of examples",
        ),
        (
            mechanism(dataclasses.replace(CYCLIC, max_batch_size=50)),
            Adjacency.ZERO_OUT,
            "no event",
        ),
        (mechanism(SHUFFLED), Adjacency.ADD_REMOVE, "private under add_remove"),
        (mechanism(SHUFFLED), Adjacency.REPLACE_ONE, "which examples exist"),
        (
            mechanism(BallsInBins(bins=10, epochs=2, dataset_size=2000)),
            Adjacency.ZERO_OUT,
            "no event",
        ),
        (
            mechanism(MinSep(probability=0.1, min_sep=2, dataset_size=2000, steps=20)),
            Adjacency.ZERO_OUT,
            "no event",
        ),
        (
            mechanism(
                MinSep(probability=0.1, min_sep=1, dataset_size=2000, steps=20, max_batch_size=300)
            ),
            Adjacency.ZERO_OUT,
            "no event",
        ),
    ],
)
def test_says_why_there_is_no_event(item, adjacency, why):
    with pytest.raises(ValueError, match=why):
        to_dp_event(item, adjacency)


def test_independent_parts_have_an_event_when_examples_come_and_go():
    hidden = dataclasses.replace(CYCLIC, assignment="independent", nominal_size=2000)
    item = mechanism(hidden)
    event = to_dp_event(item)
    assert event == dp_event.SelfComposedDpEvent(
        dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(1.0)), 20
    )


def test_zero_out_is_their_replace_special():
    relations = dp_accounting.NeighboringRelation
    assert neighboring_relation(Adjacency.ZERO_OUT) is relations.REPLACE_SPECIAL
