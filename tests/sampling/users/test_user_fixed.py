"""Unamplified user-level batches: limits by sets, the greedy walk one by one, and known cases."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from dptrain.core.guarantee import Unit
from dptrain.sampling.scheme import Scheme
from dptrain.sampling.users import user_fixed_limits
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.user_fixed import Fill, Queue, UserFixed
from dptrain.sampling.users.user_fixed_limits import (
    fewest_participations,
    largest_batch_size,
    largest_min_sep,
)
from dptrain.testing.scheme_contract import SchemeContract
from tests.helpers.user_graphs import graph_of, random_lists

SMALL = graph_of(random_lists(1, 80, 120, 3))
LARGE = graph_of(random_lists(2, 20_000, 15_000, 3))


def scheme_of(graph: AttributionGraph, **changes) -> UserFixed:
    return UserFixed(graph=graph, **{"batch_size": 4, "min_sep": 3, "steps": 12, **changes})


def batches_of(scheme: UserFixed, seed: int) -> list[list[int]]:
    return [batch.tolist() for batch in scheme.stream(seed)]


def cycle(examples: int) -> AttributionGraph:
    """One example a user."""
    return AttributionGraph.from_csr(np.arange(examples + 1), np.arange(examples))


class TestContract(SchemeContract):
    def scheme(self):
        return scheme_of(SMALL, batch_size=8, steps=20, max_participations=4)

    def large_scheme(self):
        return dataclasses.replace(self.scheme(), graph=LARGE)


class TestNoLimitOnParticipations(SchemeContract):
    def scheme(self):
        return scheme_of(SMALL, batch_size=10, min_sep=1, steps=15)

    def large_scheme(self):
        return dataclasses.replace(self.scheme(), graph=LARGE, batch_size=2_000)


def walk(lists, order, batch_size, b, m, steps):
    """The greedy choice, example after example, in lists and sets.

    An example is looked at again when its users are free of what they did before the step at which
    it was refused, or b steps after a batch that it was refused because of.
    """
    queue, waiting = list(order), {}
    last: dict[int, int] = {}
    used: dict[int, int] = {}
    batches = []
    for t in range(steps):
        queue = waiting.pop(t, []) + queue
        before = dict(last)
        batch, busy = [], set()
        while queue and len(batch) < batch_size:
            e = queue.pop(0)
            if any(used.get(u, 0) >= m for u in lists[e]):
                continue
            free = max(before.get(u, -b) + b for u in lists[e])
            if free > t or busy & set(lists[e]):
                waiting.setdefault(free if free > t else t + b, []).append(e)
                continue
            batch.append(e)
            for u in lists[e]:
                busy.add(u)
                last[u] = t
                used[u] = used.get(u, 0) + 1
        queue += batch
        batches.append(sorted(batch))
    return batches


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("b", "m"), [(1, 30), (1, 3), (3, 30), (4, 2), (50, 30)])
def test_the_walk_and_its_limits(seed, b, m):
    """Batches are those of the walk; limits hold; a short batch is one to which nothing fits."""
    lists = random_lists(seed, examples=60, users=(20, 70, 200)[seed % 3], most=4)
    size, steps = (5, 12)[seed % 2], 25
    scheme = scheme_of(
        graph_of(lists), batch_size=size, min_sep=b, steps=steps, max_participations=m
    )
    order = scheme.stream(seed)._queue.entries().tolist()
    batches = batches_of(scheme, seed)
    assert sorted(order) == list(range(60))
    assert batches == walk(lists, order, size, b, m, steps)
    users = [{u for e in batch for u in lists[e]} for batch in batches]
    used: dict[int, int] = {}
    for t, batch in enumerate(batches):
        assert sum(len(lists[e]) for e in batch) == len(users[t])  # one example of any user
        recent = set().union(*users[max(0, t - b + 1) : t])
        assert not users[t] & recent
        exhausted = {u for u, times in used.items() if times >= m}
        assert not users[t] & exhausted
        if len(batch) < size:
            refused = users[t] | recent | exhausted
            assert all(refused & set(lists[e]) for e in range(60) if e not in batch)
        for u in users[t]:
            used[u] = used.get(u, 0) + 1
    assert max(used.values()) <= scheme.max_participations


def test_many_conflicts_in_one_batch():
    """A chain in order: every example shares a user with the next, so that every second one fits
    and the rounds of the choice are many."""
    lists = [[i, i + 1] for i in range(300)]
    scheme = scheme_of(graph_of(lists), batch_size=150, min_sep=1, steps=6)
    stream = scheme.stream(0)
    stream._queue = Queue(np.arange(300, dtype=np.int32))
    batches = [next(stream).tolist() for _ in range(6)]
    assert batches == walk(lists, range(300), 150, 1, 6, 6)
    assert batches[0] == list(range(0, 300, 2))
    assert batches[1] == list(range(1, 300, 2))


def test_every_example_has_its_turn():
    """N = 12, B = 3: a pass takes 4 steps, and the next one uses everybody again."""
    batches = batches_of(scheme_of(cycle(12), batch_size=3, min_sep=4, steps=12), 5)
    for first in (0, 4, 8):
        assert sorted(itertools.chain(*batches[first : first + 4])) == list(range(12))


@pytest.mark.parametrize(
    ("examples", "changes", "expected"),
    [
        (12, {"batch_size": 3, "min_sep": 4}, Fill(3, 0, None, 0)),
        (12, {"batch_size": 3, "min_sep": 5, "steps": 10}, Fill(0, 2, 4, 6)),
        (12, {"batch_size": 5, "min_sep": 3, "steps": 6}, Fill(2, 2, 2, 6)),
        (
            12,
            {"batch_size": 3, "min_sep": 1, "max_participations": 2, "steps": 9},
            Fill(0, 1, 8, 3),
        ),
    ],
)
def test_check_of_one_example_a_user(examples, changes, expected):
    assert scheme_of(cycle(examples), **changes).check(7) == expected


def test_check_of_a_single_user():
    graph = graph_of([[0], [0], [0]])
    scheme = scheme_of(graph, batch_size=2, min_sep=2, steps=4)
    assert [len(batch) for batch in batches_of(scheme, 1)] == [1, 0, 1, 0]
    assert scheme.check(1) == Fill(smallest=0, short_steps=4, first_short_step=0, missing=6)
    assert scheme.max_participations == 2
    once = dataclasses.replace(scheme, max_participations=1)
    assert [len(batch) for batch in batches_of(once, 1)] == [1, 0, 0, 0]


def test_check_is_what_the_run_finds():
    scheme = scheme_of(SMALL, batch_size=20, min_sep=4, steps=25)
    sizes = [len(batch) for batch in batches_of(scheme, 3)]
    fill = scheme.check(3)
    short = [t for t, size in enumerate(sizes) if size < 20]
    assert short
    assert fill == Fill(min(sizes), len(short), short[0], sum(20 - size for size in sizes))


def test_largest_min_sep():
    found = largest_min_sep(cycle(12), batch_size=3, steps=12, seed=0)
    assert found.min_sep == 4  # N/B: a pass
    assert found.max_participations == 3
    # n·B of N·m uses: 3 steps in 12, so m = 1 lasts four steps and b may be all of the run.
    once = largest_min_sep(cycle(12), batch_size=3, steps=4, seed=0, max_participations=1)
    assert (once.min_sep, once.max_participations) == (4, 1)
    for seed in range(3):
        found = largest_min_sep(LARGE, batch_size=300, steps=40, seed=seed)
        assert found.check(seed).short_steps == 0
        assert dataclasses.replace(found, min_sep=found.min_sep + 1).check(seed).short_steps


@pytest.mark.slow
def test_largest_batch_size():
    # Twelve users of an example each: a pass in four steps.
    assert largest_batch_size(cycle(12), min_sep=4, steps=12, seed=0).batch_size == 3
    for seed in range(3):
        found = largest_batch_size(LARGE, min_sep=3, steps=40, seed=seed, max_participations=6)
        assert found.check(seed).short_steps == 0
        larger = dataclasses.replace(found, batch_size=found.batch_size + 1)
        assert larger.check(seed).short_steps
    alone = graph_of([[0], [0]])
    with pytest.raises(ValueError, match="batches have fewer"):
        largest_batch_size(alone, min_sep=2, steps=4, seed=0)


def test_the_shortfall_says_what_a_batch_has_on_average_and_a_remedy():
    scheme = scheme_of(SMALL, batch_size=20, min_sep=4, steps=25)
    average = np.mean([len(batch) for batch in batches_of(scheme, 3)])
    text = scheme.shortfall(3)
    assert (
        f"on average {average:.6g} examples share it. Lower batch_size to at most that number"
        in text
    )
    for name in ("largest_batch_size", "largest_min_sep", "fewest_participations"):
        assert name in text
        assert name in vars(user_fixed_limits)
    full = largest_batch_size(SMALL, min_sep=4, steps=25, seed=3)
    assert full.shortfall(3) is None


def test_fewest_participations():
    found = fewest_participations(cycle(12), batch_size=3, min_sep=1, steps=8, seed=0)
    assert found.max_participations == 2  # 24 uses of 12 users
    found = fewest_participations(LARGE, batch_size=300, min_sep=3, steps=40, seed=1)
    assert found.check(1).short_steps == 0
    m = found.max_participations
    assert 1 < m < 14
    assert dataclasses.replace(found, max_participations=m - 1).check(1).short_steps


def test_nothing_fills_the_batches():
    graph = graph_of([[0], [0], [0]])
    with pytest.raises(ValueError, match=r"4 of 4 batches have fewer than batch_size=2.*lower"):
        largest_min_sep(graph, batch_size=2, steps=4, seed=0)
    with pytest.raises(ValueError, match=r"min_sep=2 .* 4 of 4 batches"):
        fewest_participations(graph, batch_size=2, min_sep=2, steps=4, seed=0)


def test_what_the_scheme_says():
    scheme = scheme_of(SMALL, batch_size=8, min_sep=3, steps=20)
    assert scheme.unit == Unit(kind="user", max_examples=SMALL.max_examples)
    assert scheme.max_per_batch == 1
    assert scheme.population == SMALL.users
    assert scheme.max_participations == 7
    assert scheme.expected_batch_size == 8.0
    assert scheme.rate == 0.1
    # More than can be b apart is no limit.
    assert scheme == dataclasses.replace(scheme, max_participations=100)
    assert dataclasses.replace(scheme, max_participations=2).max_participations == 2


def test_detached_graph():
    scheme = scheme_of(SMALL)
    read = Scheme.from_dict(json.loads(json.dumps(scheme.to_dict())))
    assert read == scheme
    for call in (read.stream, read.check):
        with pytest.raises(ValueError, match=r"attach\(\)"):
            call(0)
    assert batches_of(read.attach(SMALL), 3) == batches_of(scheme, 3)
    with pytest.raises(ValueError, match="attribution graph has changed"):
        read.attach(LARGE)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"batch_size": 81}, "batch_size=81 is more than the 80 examples"),
        ({"batch_size": 8.0}, "batch_size"),
        ({"min_sep": 0}, "min_sep"),
        ({"steps": math.nan}, "steps"),
        ({"max_participations": 0}, "max_participations=0"),
        ({"max_participations": 1.5}, "max_participations"),
        ({"graph": [[0]]}, "must be a dptrain.AttributionGraph"),
    ],
)
def test_bad_input(changes, match):
    with pytest.raises((TypeError, ValueError), match=match):
        scheme_of(**{"graph": SMALL, **changes})


def test_queue_against_a_list():
    rng = np.random.default_rng(0)
    queue, model = Queue(np.arange(30, dtype=np.int32)), list(range(30))
    out: list[int] = []
    for _ in range(500):
        count = int(rng.integers(0, 8))
        match rng.integers(3):
            case 0:
                taken = queue.pop_front(min(count, len(queue))).tolist()
                assert taken == model[: len(taken)]
                model = model[len(taken) :]
                out += taken
            case 1:
                put, out = out[:count], out[count:]
                queue.push_back(np.array(put, dtype=np.int32))
                model = model + put
            case _:
                put, out = out[:count], out[count:]
                queue.push_front(np.array(put, dtype=np.int32))
                model = put + model
        assert len(queue) == len(model)
        assert queue.entries().tolist() == model


@pytest.mark.parametrize("name", ["last_used", "times_used"])
def test_damaged_state_is_refused(name):
    stream = UserFixed(graph=SMALL, batch_size=5, min_sep=2, steps=6).stream(1)
    state = stream.state_dict()
    with pytest.raises(ValueError, match="damaged"):
        stream.load_state_dict({**state, name: state[name][:-1]})
