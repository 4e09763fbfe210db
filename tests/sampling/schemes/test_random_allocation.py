"""k of t steps: the contract, the law of whole runs on tiny data, and the work and memory."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest

from dptrain.sampling import BallsInBins
from dptrain.sampling.schemes.random_allocation import RandomAllocation
from dptrain.testing.scheme_contract import ExchangeableSchemeContract
from tests.oracles.batch_sequences import (
    RunLaw,
    assert_public_constants,
    assert_runs_follow,
    assert_vectors_follow,
    mixture,
)


def run_law(size: int, t: int, k: int, epochs: int) -> RunLaw:
    """Every choice of a k-subset by every example in every epoch: all are equally likely."""
    subsets = list(itertools.combinations(range(t), k))
    choices = list(itertools.product(subsets, repeat=size * epochs))
    runs: RunLaw = {}
    for chosen in choices:
        run = tuple(
            tuple(i for i in range(size) if s in chosen[epoch * size + i])
            for epoch in range(epochs)
            for s in range(t)
        )
        assert run not in runs  # a run shows all choices
        runs[run] = 1 / len(choices)
    return mixture([(1.0, runs)])


class AllocationContract(ExchangeableSchemeContract):
    def joint_probabilities(self):
        """k/t, k(k-1)/(t(t-1)) for two steps of an epoch, (k/t)² for steps of two epochs."""
        scheme = self.scheme()
        t, k = scheme.steps_per_epoch, scheme.participations
        epoch = np.arange(scheme.steps) // t
        together = k * (k - 1) / (t * max(t - 1, 1))
        joint = np.where(epoch[:, None] == epoch, together, (k / t) ** 2)
        np.fill_diagonal(joint, k / t)
        return joint


class TestOnePick(AllocationContract):
    def scheme(self):
        return RandomAllocation(steps_per_epoch=6, participations=1, epochs=3, dataset_size=50)


class TestOnePickInAll(AllocationContract):
    def scheme(self):
        return RandomAllocation(steps_per_epoch=7, participations=1, epochs=1, dataset_size=70)

    def test_an_example_takes_part_once(self):
        assert self.scheme().min_sep == 7
        assert self.scheme().max_participations == 1


class TestSeveralPicks(AllocationContract):
    def scheme(self):
        return RandomAllocation(steps_per_epoch=8, participations=3, epochs=2, dataset_size=40)


class TestNearlyEveryStep(AllocationContract):
    def scheme(self):
        return RandomAllocation(steps_per_epoch=9, participations=8, epochs=2, dataset_size=12)


@pytest.mark.parametrize(
    ("size", "t", "k", "epochs"),
    [
        (2, 3, 2, 1),
        (2, 2, 1, 2),
        (3, 4, 2, 1),
        (4, 3, 1, 1),
        (3, 2, 1, 2),
        (3, 4, 3, 1),
        (1, 4, 4, 1),
    ],
)
def test_runs_against_enumeration(size, t, k, epochs):
    scheme = RandomAllocation(steps_per_epoch=t, participations=k, epochs=epochs, dataset_size=size)
    law = run_law(size, t, k, epochs)
    assert_runs_follow(scheme.stream, law, 3_000)
    assert_vectors_follow(scheme.sample_participation(np.random.default_rng(5), 50_000), law)
    assert_public_constants(scheme, law)


@pytest.mark.parametrize(("t", "k"), [(5, 1), (5, 2), (6, 4), (4, 4), (1, 1)])
def test_every_example_takes_part_k_times_an_epoch(t, k):
    scheme = RandomAllocation(steps_per_epoch=t, participations=k, epochs=3, dataset_size=1_000)
    counts = np.zeros((3, 1_000), dtype=int)
    for step, batch in enumerate(scheme.stream(11)):
        counts[step // t, batch] += 1
    assert (counts == k).all()
    vectors = scheme.sample_participation(np.random.default_rng(12), 500).reshape(500, 3, t)
    assert (vectors.sum(axis=2) == k).all()


@pytest.mark.slow
def test_one_pick_in_one_epoch_is_balls_in_bins():
    allocation = RandomAllocation(steps_per_epoch=4, participations=1, epochs=1, dataset_size=3)
    bins = BallsInBins(bins=4, epochs=1, dataset_size=3)
    law = run_law(3, 4, 1, 1)
    for scheme in (allocation, bins):
        assert_runs_follow(scheme.stream, law, 3_000)
        assert_vectors_follow(scheme.sample_participation(np.random.default_rng(6), 50_000), law)
    for fact in ("steps", "rate", "expected_batch_size", "min_sep", "max_participations"):
        assert getattr(allocation, fact) == getattr(bins, fact), fact


def test_for_batch_size_chooses_the_steps_of_an_epoch():
    make = RandomAllocation.for_batch_size
    assert make(batch_size=50, dataset_size=1_000, epochs=3).steps_per_epoch == 20
    several = make(batch_size=50, dataset_size=1_000, epochs=3, participations=4)
    assert (several.steps_per_epoch, several.steps, several.expected_batch_size) == (80, 240, 50)
    everyone = make(batch_size=7, dataset_size=7, epochs=1, participations=5)
    assert everyone.steps_per_epoch == everyone.participations == 5
    with pytest.raises((TypeError, ValueError), match="largest possible batch size is 100"):
        make(batch_size=101, dataset_size=100, epochs=9)
    for bad in (0, -1, True, math.nan, "8"):
        with pytest.raises((TypeError, ValueError), match=r"batch_size|batch size"):
            make(batch_size=bad, dataset_size=100, epochs=9)


@pytest.mark.parametrize("field", ["steps_per_epoch", "participations", "epochs", "dataset_size"])
@pytest.mark.parametrize("value", [0, 2.0, True])
def test_bad_fields(field, value):
    good = {"steps_per_epoch": 5, "participations": 2, "epochs": 3, "dataset_size": 10}
    with pytest.raises((TypeError, ValueError), match=field):
        RandomAllocation(**{**good, field: value})


def test_more_picks_than_steps():
    with pytest.raises(ValueError, match=r"participations=6 .*steps_per_epoch=5"):
        RandomAllocation(steps_per_epoch=5, participations=6, epochs=1, dataset_size=10)


@pytest.mark.parametrize("k", [1, 20])
def test_4_bytes_an_example_and_no_work_on_those_not_drawn(k):
    """Also with many picks; a step of a hundred examples among 2·10^6 allocates next to nothing."""
    n = 2_000_000
    scheme = RandomAllocation.for_batch_size(
        batch_size=100, dataset_size=n, epochs=1, participations=k
    )
    tracemalloc.start()
    try:
        stream = scheme.stream(0)
        for _ in range(50):
            next(stream)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(20):
            next(stream)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4.1 * n
    assert peak - held < 100_000
