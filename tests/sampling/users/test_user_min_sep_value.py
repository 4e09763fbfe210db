"""User-level b-min-sep as a value: what it says of itself, JSON, copies, and bad input."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import numpy as np
import pytest

from dptrain.core.guarantee import Unit
from dptrain.sampling.loading.position import BatchPlan
from dptrain.sampling.scheme import Scheme
from dptrain.sampling.users.user_min_sep import UserMinSep
from tests.helpers.user_graphs import LARGE, SMALL, scheme_of


def test_what_the_scheme_says():
    scheme = scheme_of(SMALL, min_sep=3, steps=10, batch_size=6.5)
    assert scheme.unit == Unit(kind="user", max_examples=SMALL.max_examples)
    assert scheme.max_per_batch == SMALL.max_examples
    assert scheme.population == SMALL.users
    assert scheme.dataset_size == SMALL.examples
    assert scheme.max_participations == 4
    assert scheme.expected_batch_size == 6.5
    assert scheme.rate == 6.5 / 80


def test_detached_graph():
    scheme = scheme_of(SMALL)
    read = Scheme.from_dict(json.loads(json.dumps(scheme.to_dict())))
    assert read == scheme
    for burn_in in (0, 5):
        with pytest.raises(ValueError, match=r"attach\(\)"):
            dataclasses.replace(read, burn_in=burn_in).stream(0)
    attached = read.attach(SMALL)
    for one, other in zip(attached.stream(3), scheme.stream(3), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="attribution graph has changed"):
        read.attach(LARGE)


def test_copies_share_the_graph():
    stream = scheme_of(SMALL).stream(0)
    assert copy.deepcopy(stream)._scheme.graph is SMALL
    batches = [request.micro.indices for request in BatchPlan(scheme_of(SMALL), 4, None)]
    for planned, drawn in zip(batches, scheme_of(SMALL).stream(4), strict=True):
        np.testing.assert_array_equal(planned, drawn)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"exclusion": "participate"}, r"exclusion='participate'.*sampling.*participation"),
        ({"exclusion": None}, "exclusion"),
        ({"probability": 1.5}, r"probability=1.5 .*\(0, 1\]"),
        ({"min_sep": 2.0}, "min_sep"),
        ({"burn_in": -1}, "burn_in=-1"),
        ({"burn_in": 1.5}, "burn_in"),
        ({"batch_size": 81}, "largest possible batch size is 80"),
        ({"batch_size": math.inf}, "batch_size"),
        ({"graph": None}, "graph=None must be a dptrain.AttributionGraph"),
    ],
)
def test_bad_input(changes, match):
    with pytest.raises((TypeError, ValueError), match=match):
        scheme_of(**{"graph": SMALL, **changes})


def test_batches_larger_than_exclusion_allows():
    with pytest.raises(ValueError, match="largest possible batch size is"):
        UserMinSep.for_batch_size(graph=SMALL, batch_size=40, min_sep=5, steps=3)


@pytest.mark.parametrize("b", [2, 8, 40])
def test_default_burn_in_of_participation_is_ample(b):
    """One example a user: the use x_t = p(1 - Σ of the last b-1) of the renewal process, to p0."""
    for c, tolerance in ((0.2, 1e-12), (1.0, 1e-6)):
        p = c / b
        use: list[float] = []
        burn_in = scheme_of(SMALL, min_sep=b, exclusion="participation").burn_in
        for t in range(burn_in + 2 * b):
            use.append(p * (1 - sum(use[max(0, t - b + 1) : t])))
        p0 = p / (1 + (b - 1) * p)
        assert max(abs(x / p0 - 1) for x in use[burn_in:]) < tolerance


@pytest.mark.parametrize(
    "changes", [{"min_sep": 10**12}, {"burn_in": 2**31}, {"min_sep": 2**31, "burn_in": 0}]
)
def test_more_steps_than_are_kept(changes):
    with pytest.raises(ValueError, match=r"min_sep=\d+ and burn_in=\d+"):
        scheme_of(SMALL, **changes)


def test_damaged_state_is_refused():
    stream = scheme_of(SMALL).stream(1)
    state = stream.state_dict()
    with pytest.raises(ValueError, match="damaged"):
        stream.load_state_dict({**state, "last_touched": state["last_touched"][:-1]})
