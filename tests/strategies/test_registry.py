"""Strategies known by name: ours, a stranger's, and what may not become one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dptrain.configuration import build_strategy
from dptrain.core import JsonValue, checks
from dptrain.strategies import (
    BLT,
    BandMF,
    RunShape,
    Strategy,
    proposals,
    register_strategy,
    registry,
    strategy_types,
)
from dptrain.strategies.matrices import LowerTriangular
from dptrain.strategies.toeplitz import BandedToeplitz


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Undo what a test registers."""
    monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))
    known = dict(JsonValue._families["strategy"])
    yield
    JsonValue._families["strategy"] = known


def test_every_strategy_that_can_be_stored_is_registered():
    ours = {
        name: member
        for name, member in JsonValue._families["strategy"].items()
        if member.__module__.startswith("dptrain.")
    }
    registered = strategy_types()
    assert {n: registered[n] for n in ours} == ours


def _halves():
    @register_strategy(planned=True)
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Halves(BandedToeplitz):
        bands: int = 2

        @classmethod
        def proposals(cls, run):
            return [cls()] if run.steps > 1 else []

        def bind(self, steps):
            checks.steps(steps)
            return self

        def first_column(self, steps):
            return np.array([1.0, 0.5])[:steps]

    return Halves


def test_a_registered_class_is_built_by_its_name_and_proposed():
    assert "Halves" not in strategy_types()
    halves = _halves()
    assert strategy_types()["Halves"] is halves
    assert build_strategy({"type": "Halves", "bands": 2}) == halves()
    assert Strategy.from_dict(halves().to_dict()) == halves()
    assert halves() in proposals(RunShape(steps=4))
    assert halves() in proposals(RunShape(steps=4), planned=True)
    assert halves() not in proposals(RunShape(steps=1))


def test_a_class_that_is_not_registered_is_no_choice_of_a_configuration():
    dataclasses.dataclass(frozen=True)(type("Unheard", (BandedToeplitz,), {}))
    with pytest.raises(ValueError, match=r"strategy\.type='Unheard'.*choose one of"):
        build_strategy({"type": "Unheard"})


def test_a_class_that_exists_can_be_registered_as_a_function_would():
    halves = _halves()
    assert register_strategy(halves) is halves


def test_ours_cannot_be_subclassed():
    """A stream registered for BLT would draw its noise for whatever matrix the child has."""
    for name, member in strategy_types().items():
        with pytest.raises(TypeError, match=f"{name} cannot be subclassed"):
            type("Child", (member,), {})
    assert "Child" not in JsonValue._families["strategy"]


def test_refuses_an_abstract_class():
    with pytest.raises(TypeError, match=r"register_strategy\(LowerTriangular\).*abstract"):
        register_strategy(LowerTriangular)


def test_refuses_proposals_that_are_no_strategies():
    halves = _halves()
    halves.proposals = classmethod(lambda cls, run: [halves])
    with pytest.raises(TypeError, match=r"Halves\.proposals\(\).*the class itself"):
        proposals(RunShape(steps=4))


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"bands": (9,)}, ValueError, "bands=9 exceeds steps=8"),
        ({"bands": 4}, TypeError, "bands=4 must be numbers of bands"),
        ({"bands": (0,)}, ValueError, "bands=0"),
        ({"steps": 3000, "dense": True}, ValueError, "dense=True"),
        ({"min_sep": 0}, ValueError, "min_sep=0"),
        ({"buffers": -1}, ValueError, "buffers=-1"),
        ({"workload": "sgd"}, TypeError, "workload='sgd'"),
    ],
)
def test_the_shape_of_a_run_is_checked(fields, error, says):
    with pytest.raises(error, match=says):
        RunShape(**{"steps": 8, **fields})


def test_what_is_planned_follows_the_run():
    run = RunShape(steps=64, bands=(1, 2, 4), max_participations=4, min_sep=16, buffers=2)
    found = proposals(run, planned=True)
    assert [s.bands for s in found if isinstance(s, BandMF)] == [2, 4]
    (blt,) = (s for s in found if isinstance(s, BLT))
    assert (blt.buffers, blt.max_participations, blt.min_sep) == (2, 4, 16)
    none = proposals(dataclasses.replace(run, buffers=0), planned=True)
    assert not any(isinstance(s, BLT) for s in none)
