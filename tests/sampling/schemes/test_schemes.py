"""The three schemes: the contract, their identities, and their laws against enumeration."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tracemalloc

import numpy as np
import pytest

from dptrain.core.json_value import JsonValue
from dptrain.sampling import (
    AttributionGraph,
    BallsInBins,
    MinSep,
    Poisson,
    RandomAllocation,
    Scheme,
    Shuffled,
)
from dptrain.testing.scheme_contract import (
    ExchangeableSchemeContract,
    bernstein_tolerance,
    participation,
)


def min_sep_joint(steps: int, b: int, p: float, warm: bool) -> np.ndarray:
    """P(in t and in u) of b-min-sep from the chain of "steps still barred", by matrix powers."""
    start = np.zeros(b)
    start[0] = 1.0
    if warm:
        start[:] = p / (1 + (b - 1) * p)
        start[0] = 1 / (1 + (b - 1) * p)
    chain = np.zeros((b, b))  # state s = steps still barred
    chain[0, 0] += 1 - p
    chain[0, b - 1] += p
    for s in range(1, b):
        chain[s, s - 1] += 1.0
    powers = [np.linalg.matrix_power(chain, k) for k in range(steps + 1)]
    joint = np.zeros((steps, steps))
    for t in range(steps):
        first = (start @ powers[t])[0] * p
        joint[t, t] = first
        for u in range(t + 1, steps):
            joint[t, u] = joint[u, t] = first * powers[u - t - 1][b - 1, 0] * p
    return joint


def pattern_law(steps: int, b: int, p: float, warm: bool) -> dict[tuple[int, ...], float]:
    """Probability of every participation pattern, straight from the definition of the law."""
    starts = {0: 1.0}
    if warm:
        starts = {s: (p if s else 1.0) / (1 + (b - 1) * p) for s in range(b)}
    law = {}
    for pattern in itertools.product((0, 1), repeat=steps):
        law[pattern] = 0.0
        for barred, weight in starts.items():
            probability = weight
            for t, taken in enumerate(pattern):
                available = t >= barred and not any(pattern[max(0, t - b + 1) : t])
                chance = p if available else 0.0
                probability *= chance if taken else 1 - chance
            law[pattern] += probability
    assert math.isclose(sum(law.values()), 1.0)
    return law


def assert_follows(taken: np.ndarray, law: dict[tuple[int, ...], float]) -> None:
    """Pattern frequencies within Bernstein's bound at 2e-9 each, at most 2^8 patterns."""
    seen, counts = np.unique(taken.astype(int), axis=0, return_counts=True)
    found = {tuple(map(int, row)): int(count) for row, count in zip(seen, counts, strict=True)}
    size = len(taken)
    for pattern, probability in law.items():
        expected = size * probability
        if probability == 0:
            assert pattern not in found, pattern
        else:
            tolerance = bernstein_tolerance(expected * (1 - probability))
            assert abs(found.get(pattern, 0) - expected) <= tolerance, pattern


class TestPoisson(ExchangeableSchemeContract):
    def scheme(self):
        return Poisson(probability=0.15, dataset_size=60, steps=12)

    def joint_probabilities(self):
        return np.full((12, 12), 0.15**2) + np.eye(12) * (0.15 - 0.15**2)


class TestPoissonDense(ExchangeableSchemeContract):
    """Above p = 1/3 numpy draws geometric variates by another algorithm."""

    def scheme(self):
        return Poisson(probability=0.6, dataset_size=20, steps=8)

    def joint_probabilities(self):
        return np.full((8, 8), 0.36) + np.eye(8) * 0.24


class TestBallsInBins(ExchangeableSchemeContract):
    def scheme(self):
        return BallsInBins(bins=5, epochs=3, dataset_size=40)

    def joint_probabilities(self):
        same_bin = np.subtract.outer(np.arange(15), np.arange(15)) % 5 == 0
        return same_bin / 5


class TestMinSepWarm(ExchangeableSchemeContract):
    def scheme(self):
        return MinSep(probability=0.25, min_sep=4, dataset_size=60, steps=18)

    def joint_probabilities(self):
        return min_sep_joint(18, 4, 0.25, warm=True)

    def test_stationary_from_the_first_step(self):
        marginals = np.diag(self.joint_probabilities())
        np.testing.assert_allclose(marginals, self.scheme().rate, rtol=1e-12)


class TestMinSepCold(ExchangeableSchemeContract):
    def scheme(self):
        return MinSep(probability=0.25, min_sep=4, dataset_size=60, steps=18, warm_start=False)

    def joint_probabilities(self):
        return min_sep_joint(18, 4, 0.25, warm=False)

    def stationary_scheme(self):
        # After 60 steps the marginal is within 1e-6 of p0 (asserted), against a tolerance of 1e-2.
        assert abs(min_sep_joint(60, 4, 0.25, warm=False)[-1, -1] - self.scheme().rate) < 1e-6
        return dataclasses.replace(self.large_scheme(), steps=60)


class TestMinSepLongerThanTheRun(ExchangeableSchemeContract):
    def scheme(self):
        return MinSep(probability=0.1, min_sep=30, dataset_size=100, steps=8)

    def joint_probabilities(self):
        return min_sep_joint(8, 30, 0.1, warm=True)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("b", "p"), [(1, 0.3), (2, 0.7), (3, 0.4), (4, 1.0), (9, 0.5)])
def test_min_sep_patterns(b, p, warm):
    scheme = MinSep(probability=p, min_sep=b, dataset_size=100_000, steps=7, warm_start=warm)
    law = pattern_law(7, b, p, warm)
    assert_follows(participation(scheme.stream(1), 100_000), law)
    assert_follows(scheme.sample_participation(np.random.default_rng(2), 100_000), law)


@pytest.mark.parametrize("warm", [False, True])
def test_min_sep_of_one_is_poisson(warm):
    law = {w: 0.3 ** sum(w) * 0.7 ** (6 - sum(w)) for w in itertools.product((0, 1), repeat=6)}
    poisson = Poisson(probability=0.3, dataset_size=100_000, steps=6)
    min_sep = MinSep(probability=0.3, min_sep=1, dataset_size=100_000, steps=6, warm_start=warm)
    for scheme in (poisson, min_sep):
        assert_follows(participation(scheme.stream(3), 100_000), law)
        assert_follows(scheme.sample_participation(np.random.default_rng(4), 100_000), law)
    assert min_sep.rate == poisson.rate
    assert min_sep.max_participations == poisson.max_participations


def test_certain_min_sep_is_balls_in_bins():
    law = dict.fromkeys(itertools.product((0, 1), repeat=6), 0.0)
    for s in range(3):
        law[tuple(int(t % 3 == s) for t in range(6))] = 1 / 3
    bins = BallsInBins(bins=3, epochs=2, dataset_size=100_000)
    min_sep = MinSep(probability=1.0, min_sep=3, dataset_size=100_000, steps=6)
    for scheme in (bins, min_sep):
        assert_follows(participation(scheme.stream(5), 100_000), law)
        assert_follows(scheme.sample_participation(np.random.default_rng(6), 100_000), law)
    assert min_sep.rate == bins.rate
    assert min_sep.max_participations == bins.max_participations


def test_gaps_are_a_bar_and_a_geometric():
    """Gap = b-1 + Geometric(p). Over a long run a gap up to k is seen whatever its length if it
    starts k steps before the end, so gaps from such starts have exactly this law below k."""
    b, p, steps, longest = 5, 0.3, 60, 25
    scheme = MinSep(probability=p, min_sep=b, dataset_size=4_000, steps=steps)
    taken = participation(scheme.stream(7), 4_000)
    gaps = []
    for row in taken:
        at = np.flatnonzero(row)
        following = np.append(at[1:], 10**6)
        gaps.extend((following - at)[at < steps - longest].tolist())
    counts = np.bincount(np.minimum(gaps, longest + 1), minlength=longest + 2)
    assert len(gaps) > 10_000
    for gap in range(longest + 1):
        probability = 0.0 if gap < b else p * (1 - p) ** (gap - b)
        expected = len(gaps) * probability
        # Whether a gap is counted is settled at its start, so count - expected is a martingale
        # and Freedman's inequality gives the same bound: 2e-9 each.
        tolerance = bernstein_tolerance(expected * (1 - probability)) if probability else 0
        assert abs(counts[gap] - expected) <= tolerance, gap


@pytest.mark.slow
def test_examples_are_independent_of_each_other():
    """Pairs of neighbors, in a small pool where swap removal reuses the same slots often: the
    joint law of two examples' steps is the product (Bernstein, 2e-9 for each of 2·36 cells)."""
    scheme = MinSep(probability=0.5, min_sep=2, dataset_size=4, steps=6)
    runs = 8_000
    taken = np.stack([participation(scheme.stream(seed), 4) for seed in range(runs)])
    marginal = np.diag(min_sep_joint(6, 2, 0.5, warm=True))
    probability = np.outer(marginal, marginal)
    tolerance = bernstein_tolerance(runs * probability * (1 - probability))
    for one, other in ((0, 1), (1, 3)):
        both = taken[:, one].astype(float).T @ taken[:, other].astype(float)
        assert (np.abs(both - runs * probability) <= tolerance).all()


def test_for_batch_size_gives_the_asked_size():
    assert Poisson.for_batch_size(batch_size=32, dataset_size=100, steps=3).probability == 0.32
    assert BallsInBins.for_batch_size(batch_size=33, dataset_size=100, epochs=2).bins == 3
    for batch_size, n, b in ((32, 1000, 7), (512, 512 * 64, 64), (0.5, 100, 3), (7, 343, 49)):
        scheme = MinSep.for_batch_size(batch_size=batch_size, dataset_size=n, min_sep=b, steps=9)
        assert scheme.expected_batch_size == pytest.approx(batch_size, rel=1e-12)
        assert 1 / scheme.rate == pytest.approx(1 / scheme.probability + b - 1, rel=1e-12)


def test_every_scheme_is_made_for_a_batch_size():
    """With N (or a graph), B̄ and n; what else a scheme needs is its own."""
    graph = AttributionGraph.from_lists([[e] for e in range(100)])
    own = {
        "CyclicPoisson": {"cycle": 2},
        "MinSep": {"min_sep": 2},
        "UserMinSep": {"min_sep": 2, "graph": graph},
        "UserFixed": {"min_sep": 2, "graph": graph},
        "UserCyclic": {"cycle": 2, "graph": graph},
        "PerUser": {"group_size": 1, "graph": graph},
    }
    schemes = [
        member
        for name, member in JsonValue._families[Scheme._family].items()
        if member.__module__.startswith("dptrain.")
    ]
    assert len(schemes) >= 8
    for scheme in schemes:
        fields = own.get(scheme.__name__, {})
        who = {} if "graph" in fields else {"dataset_size": 100}
        found = scheme.for_batch_size(batch_size=20, steps=10, **who, **fields)
        assert found.steps == 10
        assert found.dataset_size == 100
        assert found.expected_batch_size == pytest.approx(20.0, rel=0.05)


@pytest.mark.parametrize("scheme", [BallsInBins, RandomAllocation, Shuffled])
def test_epochs_are_stated_as_such_or_in_steps(scheme):
    given = {"batch_size": 20, "dataset_size": 100}
    assert scheme.for_batch_size(**given, steps=15) == scheme.for_batch_size(**given, epochs=3)
    with pytest.raises(
        ValueError, match="steps=14 is not a whole number of epochs of 5 steps: use 10 or 15"
    ):
        scheme.for_batch_size(**given, steps=14)
    with pytest.raises(ValueError, match="use 5, or another"):
        scheme.for_batch_size(**given, steps=3)
    for both in ({}, {"epochs": 3, "steps": 15}):
        with pytest.raises(ValueError, match="exactly one of epochs and steps"):
            scheme.for_batch_size(**given, **both)
    for wrong in (0, 2.5, True):
        for name in ("epochs", "steps"):
            with pytest.raises(ValueError if wrong == 0 else TypeError, match=f"{name}="):
                scheme.for_batch_size(**given, **{name: wrong})


def test_largest_possible_batch_size():
    scheme = MinSep.for_batch_size(batch_size=25, dataset_size=100, min_sep=4, steps=9)
    assert scheme.probability == 1.0
    with pytest.raises(ValueError, match="largest possible batch size is 25"):
        MinSep.for_batch_size(batch_size=26, dataset_size=100, min_sep=4, steps=9)
    with pytest.raises(ValueError, match="largest possible batch size is 100"):
        Poisson.for_batch_size(batch_size=101, dataset_size=100, steps=9)
    with pytest.raises(ValueError, match="largest possible batch size is 100"):
        BallsInBins.for_batch_size(batch_size=101, dataset_size=100, epochs=9)


@pytest.mark.parametrize("batch_size", [0, -1, True, math.nan, math.inf, "8"])
def test_bad_batch_size(batch_size):
    with pytest.raises((TypeError, ValueError), match=r"batch_size|batch size"):
        Poisson.for_batch_size(batch_size=batch_size, dataset_size=100, steps=9)


@pytest.mark.parametrize("probability", [0.0, -0.1, 1.0000001, math.inf])
def test_probability_out_of_range(probability):
    with pytest.raises(ValueError, match=r"probability.*\(0, 1\]"):
        Poisson(probability=probability, dataset_size=10, steps=1)
    with pytest.raises(ValueError, match=r"probability.*\(0, 1\]"):
        MinSep(probability=probability, min_sep=2, dataset_size=10, steps=1)


def test_bad_bins_and_warm_start():
    for value in (0, 2.0, True):
        with pytest.raises((TypeError, ValueError), match="bins"):
            BallsInBins(bins=value, epochs=1, dataset_size=10)
        with pytest.raises((TypeError, ValueError), match="epochs"):
            BallsInBins(bins=1, epochs=value, dataset_size=10)
    with pytest.raises((TypeError, ValueError), match="warm_start"):
        MinSep(probability=0.5, min_sep=2, dataset_size=10, steps=1, warm_start=1)


def test_equal_values_have_one_json():
    """A numpy integer or the int 1 for a probability must not change the hash of a mechanism."""
    plain = MinSep(probability=1.0, min_sep=2, dataset_size=10, steps=3)
    loose = MinSep(probability=1, min_sep=np.int64(2), dataset_size=np.int32(10), steps=3)
    assert plain.to_dict() == loose.to_dict()
    assert [type(v) for v in loose.to_dict().values()] == [str, float, int, int, int, bool]


@pytest.mark.parametrize(
    "scheme",
    [
        Poisson(probability=1e-4, dataset_size=10**6, steps=9),
        BallsInBins(bins=10**4, epochs=1, dataset_size=10**6),
        MinSep(probability=1e-4, min_sep=64, dataset_size=10**6, steps=200),
        MinSep(probability=1.0, min_sep=64, dataset_size=10**6, steps=200),
    ],
    ids=lambda scheme: type(scheme).__name__,
)
def test_state_takes_at_most_8_bytes_an_example(scheme):
    """What a checkpoint holds, and what the stream itself does; twice that while it is built."""
    tracemalloc.start()
    try:
        stream = scheme.stream(0)
        _, peak = tracemalloc.get_traced_memory()
        for _ in range(9):
            next(stream)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 16 * scheme.dataset_size
    assert held <= 8.1 * scheme.dataset_size
    tensors = [value for value in stream.state_dict().values() if hasattr(value, "nbytes")]
    assert sum(tensor.nbytes for tensor in tensors) <= 8 * scheme.dataset_size


def test_tiny_probability_does_not_overflow():
    """A geometric distance may be near 2^63; a block of them must not wrap around."""
    scheme = Poisson(probability=1e-18, dataset_size=1000, steps=50)
    assert sum(len(batch) for batch in scheme.stream(0)) == 0  # expected 5e-14
