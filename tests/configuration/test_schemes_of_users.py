"""A scheme of users in a configuration, looked at before there is a graph."""

from __future__ import annotations

import inspect
import time

import pytest

from dptrain.configuration import build_scheme, check_scheme
from dptrain.sampling import AttributionGraph, UserFixed, UserScheme, scheme_types

FIXED = {"type": "UserFixed", "batch_size": 1024, "min_sep": 8}
SEPARATED = {"type": "UserMinSep", "batch_size": 1024, "min_sep": 16}
BAD = [
    ({**FIXED, "min_sep": 0}, "min_sep=0 must be at least 1"),
    ({**FIXED, "max_participations": 0}, "max_participations=0 must be at least 1"),
    ({**FIXED, "max_participations": 1.5}, "must be an integer"),
    ({**SEPARATED, "min_sep": "8"}, "min_sep='8' must be an integer"),
    ({**SEPARATED, "exclusion": "some"}, "exclusion='some' must be one of"),
]


@pytest.mark.parametrize(("settings", "reason"), BAD)
def test_values_are_refused_as_the_scheme_itself_refuses_them(settings, reason):
    with pytest.raises(ValueError, match=f"scheme: {settings['type']}: .*{reason}"):
        check_scheme(settings)
    graph = AttributionGraph.from_lists([[e] for e in range(2048)])
    with pytest.raises(ValueError, match=reason):
        build_scheme(settings, dataset_size=2048, steps=9, graph=graph)


@pytest.mark.parametrize("batch_size", [1, 1024, 1e6, 0.5])
@pytest.mark.parametrize("min_sep", [1, 16, 10_000])
@pytest.mark.parametrize("exclusion", ["sampling", "participation"])
def test_what_only_the_graph_can_refuse_is_left_to_it(batch_size, min_sep, exclusion):
    """And it takes no time, also where the real probability is found by simulation."""
    start = time.perf_counter()
    for settings in (FIXED, {**SEPARATED, "exclusion": exclusion}):
        check_scheme({**settings, "batch_size": batch_size, "min_sep": min_sep}, steps=1000)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    "users",
    [
        "Poisson",
        "BallsInBins",
        "Shuffled",
        {"type": "MinSep", "min_sep": 5000},
        {"type": "CyclicPoisson", "cycle": 16},
        {"type": "Poisson", "max_batch_size": 2000},
    ],
)
@pytest.mark.parametrize("steps", [None, 7])
def test_how_users_take_part_is_looked_at(users, steps):
    settings = {"type": "PerUser", "batch_size": 1024, "group_size": 4, "users": users}
    check_scheme(settings, users=True, steps=steps)


@pytest.mark.parametrize(
    ("users", "reason"),
    [
        ("Poison", "did you mean Poisson"),
        ({"type": "MinSep", "minsep": 4}, "minsep"),
        ({"type": "Poisson", "max_batch_size": 0}, "max_batch_size=0"),
        ({"type": "UserMinSep", "min_sep": 4}, "draws the examples of users itself"),
        (3, "name of a scheme"),
    ],
)
def test_ways_to_take_part_that_are_none_are_refused_before_data_are_read(users, reason):
    settings = {"type": "PerUser", "batch_size": 1024, "group_size": 4, "users": users}
    with pytest.raises(ValueError, match=reason):
        check_scheme(settings, users=True)


def test_a_simulation_divides_the_largest_batches_of_users_too():
    graph = AttributionGraph.from_lists([[e // 2] for e in range(400)])
    users = {"type": "Poisson", "max_batch_size": 30}
    settings = {"type": "PerUser", "batch_size": 16, "group_size": 2, "users": users}
    scheme = build_scheme(settings, dataset_size=400, steps=9, graph=graph, divisor=4)
    assert scheme.expected_batch_size <= 4
    assert scheme.participants.max_batch_size == 8
    assert users["max_batch_size"] == 30  # what was stated stays


def test_schemes_and_data_have_to_agree_on_users():
    poisson = {"type": "Poisson", "batch_size": 8}
    with pytest.raises(ValueError, match="this data set has none"):
        check_scheme(FIXED, users=False)
    with pytest.raises(ValueError, match="would protect single examples"):
        check_scheme(poisson, users=True)
    check_scheme(FIXED, users=True)
    check_scheme(poisson, users=False)


def test_every_scheme_of_users_is_looked_at():
    """They can be made of what is known beforehand and what a configuration states."""
    known = {"graph", "batch_size", "probability", "steps"}
    for name, kind in scheme_types().items():
        if not issubclass(kind, UserScheme) or not kind.__module__.startswith("dptrain."):
            continue
        stated = inspect.signature(kind.for_batch_size).parameters
        own = inspect.signature(kind).parameters
        needed = {key for key in own if own[key].default is inspect.Parameter.empty}
        if needed <= known | set(stated):
            continue
        needed = {key for key, p in stated.items() if p.default is inspect.Parameter.empty}
        assert needed <= {"graph", "batch_size", "steps", "cycle", "group_size", "users"}, name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"cycle": 0}, "cycle"), ({"spread": 3}, "does not divide"), ({"method": "x"}, "x")],
)
def test_slots_that_cannot_be_are_refused_before_the_data_are_read(wrong, message):
    with pytest.raises(ValueError, match=message):
        check_scheme({"type": "UserCyclic", "batch_size": 8, "cycle": 4, **wrong})
    check_scheme({"type": "UserCyclic", "batch_size": 8, "cycle": 10_000, "spread": 2})


def test_a_scheme_that_is_made_in_another_way_is_left_alone(monkeypatch):
    class Other:
        for_batch_size = UserFixed.for_batch_size

        def __init__(self, *, secret, graph):
            pytest.fail("made without what it needs")

    monkeypatch.setattr("dptrain.configuration.schemes.scheme_types", lambda: {"Other": Other})
    check_scheme({**FIXED, "type": "Other"})
