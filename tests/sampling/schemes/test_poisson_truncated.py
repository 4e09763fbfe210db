"""Poisson with max_batch_size: its law over whole runs, its truncation and its closed forms."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from dptrain.sampling import MicroBatch, Poisson
from dptrain.sampling.loading.position import BatchPlan
from dptrain.sampling.schemes.drawing import (
    inclusion_probability,
    mean_truncated_binomial,
    truncate,
)
from dptrain.testing.scheme_contract import ExchangeableSchemeContract, bernstein_tolerance
from tests.oracles import batch_sequences as oracle

# (N, n, p, B): cut often, seldom, always, never (B = N) and never by far (B > N); p = 1 with B < N
# is sampling of a fixed size.
CASES = [(3, 2, 0.6, 2), (4, 2, 0.5, 1), (3, 3, 0.5, 2), (4, 1, 0.7, 3), (2, 4, 0.4, 1)]
CASES += [(4, 2, 1.0, 2), (1, 4, 0.3, 1), (3, 2, 0.3, 3), (2, 2, 0.3, 7)]
WHOLE_RUNS = [(*case, 2_000) for case in CASES]
WHOLE_RUNS += [pytest.param(*case, 20_000, marks=pytest.mark.slow) for case in CASES[:2]]


def make(size: int, steps: int, p: float, largest: int) -> Poisson:
    return Poisson(probability=p, dataset_size=size, steps=steps, max_batch_size=largest)


def brute_mean(trials: int, p: Fraction, largest: int) -> Fraction:
    """E[min(Bin(m, p), B)], term by term in exact arithmetic."""
    return sum(
        (
            min(k, largest) * math.comb(trials, k) * p**k * (1 - p) ** (trials - k)
            for k in range(trials + 1)
        ),
        Fraction(0),
    )


class _Contract(ExchangeableSchemeContract):
    """Given the numbers of kept examples, the sets are uniform and independent, and a number
    min(X, B) is below a binomial of the same mean in convex order (their probabilities cross
    twice); so are the joint counts, and Bernstein's bound for independent examples holds."""

    def large_scheme(self):
        scheme = self.scheme()
        scale = self.examples / scheme.dataset_size
        return dataclasses.replace(
            scheme,
            dataset_size=self.examples,
            max_batch_size=round(scheme.max_batch_size * scale),
        )

    def joint_probabilities(self):
        scheme = self.large_scheme()
        m = scheme.dataset_size
        p0 = brute_float_mean(m, scheme.probability, scheme.max_batch_size) / m
        return np.full((scheme.steps,) * 2, p0**2) + np.eye(scheme.steps) * (p0 - p0**2)


def brute_float_mean(trials: int, p: float, largest: int) -> float:
    """The same from logarithms of factorials, for thousands of trials."""
    k = np.arange(trials + 1)
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, trials + 1)))))
    log_pmf = log_factorial[-1] - log_factorial - log_factorial[::-1]
    pmf = np.exp(log_pmf + k * math.log(p) + (trials - k) * math.log1p(-p))
    return float((np.minimum(k, largest) * pmf).sum())


class TestOftenCut(_Contract):
    def scheme(self):
        return make(60, 12, 0.15, 9)


class TestAlwaysCut(_Contract):
    def scheme(self):
        return make(60, 12, 0.5, 10)


class TestNeverCut(_Contract):
    def scheme(self):
        return make(60, 12, 0.15, 60)


@pytest.mark.parametrize(("size", "steps", "p", "largest", "runs"), WHOLE_RUNS)
def test_whole_runs(size, steps, p, largest, runs):
    scheme = make(size, steps, p, largest)
    law = oracle.poisson(size, steps, p, largest)
    oracle.assert_runs_follow(scheme.stream, law, runs)
    vectors = scheme.sample_participation(np.random.default_rng(1), 10 * runs)
    oracle.assert_vectors_follow(vectors, law)
    oracle.assert_public_constants(scheme, law)


@pytest.mark.parametrize("largest", [4, 5, 10**9])
def test_without_a_cut_it_is_poisson(largest):
    """The same numbers, not just the same law: nothing is drawn for a cut that is not made."""
    poisson = Poisson(probability=0.4, dataset_size=4, steps=5)
    scheme = make(4, 5, 0.4, largest)
    assert scheme.rate == pytest.approx(poisson.rate, rel=1e-15)
    for seed in range(20):
        for one, other in zip(scheme.stream(seed), poisson.stream(seed), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("trials", "p", "largest"),
    [
        (1, "1/3", 1),
        (5, "1", 2),
        (5, "1", 5),
        (7, "1/2", 3),
        (12, "1/50", 12),
        (12, "9/10", 4),
        (120, "1/4", 1),
        (120, "1/4", 30),
        (120, "1/4", 300),
        (200, "3/1000", 2),
    ],
)
def test_mean_of_a_truncated_binomial(trials, p, largest):
    p = Fraction(p)
    expected = float(brute_mean(trials, p, largest))
    assert mean_truncated_binomial(trials, float(p), largest) == pytest.approx(expected, rel=1e-12)
    others = trials - 1
    kept = p * sum(
        min(Fraction(1), Fraction(largest, 1 + k))
        * math.comb(others, k)
        * p**k
        * (1 - p) ** (others - k)
        for k in range(others + 1)
    )
    found = inclusion_probability(np.array([trials, trials]), float(p), largest)
    assert found == pytest.approx(float(kept), rel=1e-12)
    assert kept * trials == brute_mean(trials, p, largest)  # both are the same number


def test_mean_at_size():
    """Far above every cut it is N·p, far below it is B, and at N·p = B it is B - sd·φ(0) + o(1)."""
    n_examples, p = 10**7, 1e-4
    assert mean_truncated_binomial(n_examples, p, 2000) == pytest.approx(1000, rel=1e-12)
    assert mean_truncated_binomial(n_examples, p, 500) == pytest.approx(500, rel=1e-12)
    loss = math.sqrt(1000 * (1 - p) / (2 * math.pi))
    assert mean_truncated_binomial(n_examples, p, 1000) == pytest.approx(1000 - loss, abs=0.1)


def test_truncate_is_uniform_among_the_sampled():
    rng = np.random.default_rng(5)
    batch = np.array([2, 3, 5, 7, 11], dtype=np.int64)
    kept = Counter(tuple(truncate(rng, batch, 2).tolist()) for _ in range(20_000))
    law = dict.fromkeys(itertools.combinations(batch.tolist(), 2), 0.1)
    oracle.assert_frequencies(kept, law, 20_000)


def test_truncate_is_uniform_when_few_of_many_are_kept():
    """Another algorithm of numpy's: counts in 30 sections, without replacement (Bernstein)."""
    rng = np.random.default_rng(6)
    batch = np.arange(30_000)
    counts = np.zeros(30)
    for _ in range(200):
        kept = truncate(rng, batch, 500)
        assert len(kept) == 500
        assert (np.diff(kept) > 0).all()
        counts += np.bincount(kept // 1000, minlength=30)
    tolerance = bernstein_tolerance(100_000 / 30 * (1 - 1 / 30))
    assert (np.abs(counts - 100_000 / 30) <= tolerance).all()


def test_truncate_leaves_what_fits():
    batch = np.array([1, 4, 6])
    for largest in (3, 4, 100):
        np.testing.assert_array_equal(truncate(np.random.default_rng(0), batch, largest), batch)


def test_every_batch_is_padded_to_the_cap():
    scheme = make(50, 40, 0.2, 10)
    requests: list[MicroBatch] = [request.micro for request in BatchPlan(scheme, 3, None)]
    assert {micro.rows for micro in requests} == {10}
    used = [len(micro.indices) for micro in requests]
    assert min(used) < 10 == max(used)
    for micro in requests:
        assert micro.weights.tolist() == [1.0] * len(micro.indices) + [0.0] * (
            10 - len(micro.indices)
        )


def test_for_batch_size_is_before_truncation():
    scheme = Poisson.for_batch_size(batch_size=32, dataset_size=100, steps=3, max_batch_size=32)
    assert scheme.probability == 0.32
    expected = float(brute_mean(100, Fraction(32, 100), 32))
    assert scheme.expected_batch_size == pytest.approx(expected, rel=1e-12)
    assert expected < 32


GOOD = {"probability": 0.5, "dataset_size": 10, "steps": 3, "max_batch_size": 4}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_batch_size", 0, "max_batch_size=0 must be at least 1"),
        ("max_batch_size", -3, "max_batch_size=-3 must be at least 1"),
        ("max_batch_size", 4.0, "max_batch_size=4.0 must be an integer, not float"),
        ("probability", 0.0, r"probability=0.0 must be a probability in \(0, 1\]"),
        ("probability", 1.5, r"probability=1.5 must be a probability in \(0, 1\]"),
        ("dataset_size", 0, "dataset_size=0 must be at least 1"),
        ("steps", True, "steps=True must be an integer, not bool"),
    ],
)
def test_bad_input(field, value, message):
    with pytest.raises((TypeError, ValueError), match=f"Poisson: {message}"):
        Poisson(**{**GOOD, field: value})


def test_bad_batch_size():
    sizes = {"dataset_size": 100, "steps": 9, "max_batch_size": 8}
    with pytest.raises((TypeError, ValueError), match="largest possible batch size is 100"):
        Poisson.for_batch_size(batch_size=101, **sizes)
    for value in (0, -1.0, math.nan, "8"):
        with pytest.raises((TypeError, ValueError), match="batch_size"):
            Poisson.for_batch_size(batch_size=value, **sizes)
