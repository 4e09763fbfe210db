"""A relation that somebody adds is accounted for as none of those that there are theorems for."""

from __future__ import annotations

import pytest

from dptrain import Identity, MatrixMechanism
from dptrain.accounting import registered_accountants, to_dp_event
from dptrain.accounting.poisson import PoissonPLD
from dptrain.accounting.poisson.curves import CasesCurve
from dptrain.accounting.poisson.parts import poisson_curve
from dptrain.accounting.poisson.truncated_step import Branches, full_pair, open_pair
from dptrain.auditing import audit_mechanism
from dptrain.contrib.accountants.dp_event import neighboring_relation
from dptrain.core import Adjacency, Unit
from dptrain.sampling import CyclicPoisson, Poisson, Shuffled

SIZE, STEPS, BATCH = 1000, 50, 20


@pytest.fixture
def edge(monkeypatch) -> Adjacency:
    """What ``EDGE = "edge"`` among the members would be."""
    new = object.__new__(Adjacency)
    new._name_, new._value_ = "EDGE", "edge"
    monkeypatch.setattr(Adjacency, "_member_names_", [*Adjacency._member_names_, "EDGE"])
    monkeypatch.setitem(Adjacency._member_map_, "EDGE", new)
    monkeypatch.setitem(Adjacency._value2member_map_, "edge", new)
    assert list(Adjacency)[-1] is Adjacency("edge") is new
    return new


def mechanism(scheme=None):
    scheme = scheme or Poisson.for_batch_size(batch_size=BATCH, dataset_size=SIZE, steps=STEPS)
    return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)


def cut():
    scheme = Poisson.for_batch_size(
        batch_size=BATCH, dataset_size=SIZE, steps=STEPS, max_batch_size=25
    )
    return mechanism(scheme)


def cyclic():
    return mechanism(
        CyclicPoisson.for_batch_size(batch_size=BATCH, dataset_size=SIZE, steps=STEPS, cycle=4)
    )


def test_no_accountant_claims_a_relation_that_it_has_no_theorem_for(edge):
    assert registered_accountants(edge) == []
    with pytest.raises(ValueError, match="adjacency='edge'"):
        PoissonPLD(adjacency=edge)


@pytest.mark.parametrize("run", [mechanism, cut, cyclic])
def test_an_accountant_that_claims_it_states_nothing(edge, monkeypatch, run):
    """As a developer would begin: by adding the relation to the accountant's."""
    monkeypatch.setattr(PoissonPLD, "adjacencies", (*PoissonPLD.adjacencies, edge))
    with pytest.raises(AssertionError, match="edge"):
        PoissonPLD(adjacency=edge).guarantee(run(), delta=1e-5)


def test_no_step_of_another_relation_stands_for_its(edge):
    branches = Branches(open=0.5, full=0.5, kept=0.01)
    questions = [
        lambda: poisson_curve(edge, probability=0.1, steps=3, sensitivity=1.0),
        lambda: open_pair(edge, 0.1, 1.0),
        lambda: full_pair(edge, 0.1, 1.0),
        lambda: CasesCurve(0.1, branches, 3, 1.0, edge).symmetric,
        lambda: CasesCurve(0.1, branches, 3, 1.0, edge).unsampled,
        lambda: neighboring_relation(edge),
        lambda: to_dp_event(mechanism(), adjacency=edge),
        lambda: to_dp_event(
            mechanism(Shuffled(dataset_size=SIZE, batch_size=BATCH, epochs=1)), adjacency=edge
        ),
        lambda: audit_mechanism(mechanism(), epsilon=1.0, delta=1e-5, adjacency=edge, runs=10),
        lambda: edge.public_size,
        lambda: edge.one_side_empty,
        lambda: edge.sentence(Unit()),
        lambda: Unit().protected(edge),
        lambda: Unit(kind="user", max_examples=2).protected(edge),
    ]
    for number, ask in enumerate(questions):
        with pytest.raises(AssertionError, match="edge"):
            pytest.fail(f"question {number}: {ask()}")


def test_what_is_said_of_the_relations_is_what_they_are():
    """Zero-out and replace-one keep N; of replace-one alone both worlds hold a contribution."""
    assert {each: each.public_size for each in Adjacency} == {
        Adjacency.ZERO_OUT: True,
        Adjacency.ADD_REMOVE: False,
        Adjacency.REPLACE_ONE: True,
    }
    assert [each for each in Adjacency if not each.one_side_empty] == [Adjacency.REPLACE_ONE]
