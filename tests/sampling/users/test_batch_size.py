"""The p that gives a batch size: closed forms, a dense grid, and simulation against both."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from tqdm import tqdm

from dptrain.sampling.users.batch_simulation import BatchSizeSimulation, arrival_before
from dptrain.sampling.users.batch_size import (
    BatchSizeCurve,
    probability_for_batch_size,
)
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.testing.scheme_contract import bernstein_tolerance
from tests.helpers.user_graphs import graph_of, neighborhoods, random_lists

SINGLES = AttributionGraph.from_csr(np.arange(1001), np.arange(1000))
LISTS = random_lists(3, examples=600, users=500, most=3)
GRAPH = graph_of(LISTS)
NEAR = np.array([len(near) for near in neighborhoods(LISTS)])
# A clique that soon excludes itself, and a few examples that nobody excludes: two peaks.
TWO_PEAKS = graph_of([[0]] * 400 + [[1 + i] for i in range(20)])


def mean_batch(p, b, near=NEAR):
    """p·Σ_e (1-p)^((b-1)|N(e)|) over a row of p."""
    return p * ((1 - np.asarray(p)[..., None]) ** ((b - 1) * near)).sum(axis=-1)


@pytest.mark.parametrize("b", [2, 3, 9])
def test_smallest_probability_on_a_dense_grid(b):
    grid = np.geomspace(1e-6, 1.0, 4_000)
    values = mean_batch(grid, b)
    for share in (1e-3, 0.3, 0.9, 0.999):
        size = share * values.max()
        p = probability_for_batch_size(GRAPH, batch_size=size, min_sep=b)
        assert mean_batch(p, b) == pytest.approx(size, rel=1e-9)
        assert (values[grid < p * (1 - 1e-6)] < size).all()


def test_first_of_two_peaks():
    near = np.array([400] * 400 + [1] * 20)
    # 400·p(1-p)^400 is largest at p = 1/401, 20·p(1-p) at p = 1/2.
    first = mean_batch(1 / 401, 2, near)
    assert mean_batch(0.01, 2, near) < 0.3 < first < 0.5 < mean_batch(0.5, 2, near)
    for size, low, high in ((0.3, 0, 1 / 401), (0.999 * first, 0, 1 / 401), (0.5, 0.02, 0.04)):
        p = probability_for_batch_size(TWO_PEAKS, batch_size=size, min_sep=2)
        assert low < p < high
        assert mean_batch(p, 2, near) == pytest.approx(size, rel=1e-9)


def test_peak_between_the_points_looked_at():
    """The largest value is that of the peak, not of a point near it."""
    for sizes in ([400] * 400 + [1] * 20, [7] * 50, [3] * 9 + [5] * 10 + [50] * 50):
        curve = BatchSizeCurve(np.array(sizes), 4)
        at, value = curve.largest()
        around = at * np.linspace(0.9, 1.1, 2_001)
        values = mean_batch(around, 4, np.array(sizes))
        assert value >= values.max() * (1 - 1e-12)
        assert curve.smallest_probability(value * (1 - 1e-9)) <= at * (1 + 1e-12)
        assert curve.smallest_probability(value * (1 + 1e-9)) is None


@pytest.mark.parametrize("b", [2, 5, 40])
def test_one_example_a_user(b):
    """N·p(1-p)^(b-1), largest at p = 1/b."""
    largest = 1000 / b * (1 - 1 / b) ** (b - 1)
    p = probability_for_batch_size(SINGLES, batch_size=largest * (1 - 1e-12), min_sep=b)
    assert p == pytest.approx(1 / b, rel=1e-4)  # flat at its top
    with pytest.raises(ValueError, match="not reachable at any probability"):
        probability_for_batch_size(SINGLES, batch_size=largest * 1.0001, min_sep=b)


def test_largest_possible_is_stated_rounded_down():
    # 1000·p(1-p) is 250 at most; b = 5: 200·0.8^4 = 81.92.
    for b, stated in ((2, "250"), (5, "81.92"), (3, "148.1")):
        match = f"min_sep={b} the largest possible batch size is {stated} "
        with pytest.raises(ValueError, match=match):
            probability_for_batch_size(SINGLES, batch_size=300, min_sep=b)
        assert probability_for_batch_size(SINGLES, batch_size=float(stated), min_sep=b) <= 1 / b


@pytest.mark.parametrize("exclusion", ["sampling", "participation"])
def test_min_sep_of_one(exclusion):
    p = probability_for_batch_size(GRAPH, batch_size=30, min_sep=1, exclusion=exclusion)
    assert p == 30 / 600


def test_coins_follow_their_law_and_are_nested():
    """Every example's coin at every step has probability p, whatever p began the layers; and what
    is sampled at a smaller p is sampled at a larger one."""
    size, steps = 2_000, 40
    graph = AttributionGraph.from_csr(np.arange(size + 1), np.arange(size))
    with tqdm(disable=True) as bar:
        simulation = BatchSizeSimulation(
            graph,
            min_sep=2,
            exclusion="sampling",
            steps=1,
            burn_in=0,
            seed=4,
            first=0.01,
            bar=bar,
        )
        before = [set() for _ in range(steps)]
        for p in (0.004, 0.01, 0.013, 0.3, 0.9, 1.0):
            drawn = [simulation._sample(t, arrival_before(p)) for t in range(steps)]
            assert all((np.diff(sample) > 0).all() for sample in drawn)
            now = [set(sample.tolist()) for sample in drawn]
            assert all(small <= large for small, large in zip(before, now, strict=True))
            before = now
            total = sum(map(len, drawn))
            trials = size * steps
            assert abs(total - trials * p) <= bernstein_tolerance(trials * p * (1 - p))
            # Two steps have independent coins.
            both = sum(len(a & b) for a, b in zip(now[::2], now[1::2], strict=True))
            pairs = size * steps // 2
            assert abs(both - pairs * p**2) <= bernstein_tolerance(pairs * p**2 * (1 - p**2))


def test_simulated_mean_is_the_exact_one():
    for b, p in ((2, 0.05), (6, 0.02)):
        simulation = BatchSizeSimulation(
            GRAPH,
            min_sep=b,
            exclusion="sampling",
            steps=1_500,
            burn_in=None,
            seed=1,
            first=p,
            bar=tqdm(disable=True),
        )
        found = simulation.batch_size(arrival_before(p))
        assert found.steps >= 1_500
        assert found.steps % (16 * b) == 0
        # 16 blocks: Student's t with 15 degrees of freedom is beyond 10 with probability 5e-8.
        assert abs(found.mean - mean_batch(p, b)) <= 10 * found.standard_error
        assert found.standard_error < 0.02 * found.mean


@pytest.mark.slow
def test_simulation_of_the_smallest_p():
    error = 0.01
    for b, size in ((2, 15.0), (5, 8.0)):
        p = probability_for_batch_size(
            GRAPH,
            batch_size=size,
            min_sep=b,
            method="simulation",
            relative_error=error,
            seed=2,
        )
        assert mean_batch(p, b) == pytest.approx(size, rel=6 * error)
        exact = probability_for_batch_size(GRAPH, batch_size=size, min_sep=b)
        assert mean_batch(min(p, exact), b) <= size  # the same side of the peak
        assert p == pytest.approx(exact, rel=0.2)


def test_simulation_of_participation_against_min_sep():
    """With one example a user Algorithm 4 is b-min-sep: p0 = p/(1 + (b-1)p)."""
    for b, size in ((3, 50.0), (8, 90.0)):
        p = probability_for_batch_size(
            SINGLES,
            batch_size=size,
            min_sep=b,
            exclusion="participation",
            relative_error=0.01,
            seed=3,
        )
        assert 1000 * p / (1 + (b - 1) * p) == pytest.approx(size, rel=0.06)


def test_everyone_at_once():
    """N/b a step is reached under participation as p nears 1, and more is not."""
    p = probability_for_batch_size(
        SINGLES, batch_size=250, min_sep=4, exclusion="participation", relative_error=0.1
    )
    assert 1000 * p / (1 + 3 * p) == pytest.approx(250, rel=0.01)
    with pytest.raises(ValueError, match="largest possible batch size is 250"):
        probability_for_batch_size(SINGLES, batch_size=251, min_sep=4, exclusion="participation")


def test_participation_needs_fewer_samples():
    """Whoever is excluded excludes nobody, so that a smaller p gives the same batches."""
    changes = {"batch_size": 10.0, "min_sep": 5, "relative_error": 0.02}
    by_sampling = probability_for_batch_size(GRAPH, **changes)
    assert probability_for_batch_size(GRAPH, exclusion="participation", **changes) < by_sampling


def test_same_seed_same_probability():
    changes = {"batch_size": 12.0, "min_sep": 3, "exclusion": "participation"}
    found = [
        probability_for_batch_size(GRAPH, relative_error=0.05, seed=seed, **changes)
        for seed in (0, 0, 1)
    ]
    assert found[0] == found[1] != found[2]


def test_detached_graph():
    detached = AttributionGraph.from_dict(GRAPH.to_dict())
    with pytest.raises(ValueError, match=r"attach\(\)"):
        probability_for_batch_size(detached, batch_size=9, min_sep=3)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": math.nan}, "batch_size"),
        ({"batch_size": "9"}, "batch_size"),
        ({"batch_size": 150}, "lower batch_size or min_sep, or bound the graph"),
        ({"min_sep": 0}, "min_sep"),
        ({"exclusion": "used"}, "exclusion='used'"),
        ({"method": "guess"}, "method='guess'"),
        ({"method": "exact", "exclusion": "participation"}, "use method='simulation'"),
        ({"steps": 0}, "steps"),
        ({"relative_error": 0.0}, "relative_error"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_input(changes, match):
    with pytest.raises((TypeError, ValueError), match=match):
        probability_for_batch_size(GRAPH, **{"batch_size": 9, "min_sep": 5, **changes})


def test_more_than_there_are_examples_names_what_can_be_reached():
    """PATH has far fewer than N reachable: the message gives the maximum of the curve."""
    graph = graph_of([[0, 1], [1, 2], [2, 3]])
    sizes = [2, 3, 2]
    p = np.linspace(0, 1, 200_001)
    best = sum(p * (1 - p) ** (2 * n) for n in sizes).max()
    with pytest.raises(ValueError, match="largest possible batch size is") as caught:
        probability_for_batch_size(graph, batch_size=100, min_sep=3)
    named = float(re.search(r"batch size is ([\d.]+)", str(caught.value))[1])
    assert named <= best
    assert named == pytest.approx(best, rel=1e-3)
