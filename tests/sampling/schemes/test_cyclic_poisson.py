"""CyclicPoisson: its law over whole runs for both assignments, with and without truncation."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from dptrain.sampling import Poisson
from dptrain.sampling.schemes.cyclic_poisson import CyclicPoisson
from dptrain.testing.scheme_contract import (
    ExchangeableSchemeContract,
    bernstein_tolerance,
    participation,
)
from tests.oracles import batch_sequences as oracle

# (N, n, p, b, B): parts that differ in size, that do not; one part; as many parts as examples;
# more parts than steps; a run that stops amid a cycle; p = 1.
CASES = [
    (3, 3, 0.5, 2, None),
    (4, 2, 0.6, 2, None),
    (2, 4, 0.5, 2, None),
    (3, 4, 1.0, 3, None),
    (4, 2, 0.7, 3, None),
    (3, 2, 0.4, 1, None),
    (4, 2, 0.7, 2, 1),
    (3, 4, 0.8, 2, 1),
    (4, 2, 1.0, 2, 1),
    (3, 2, 0.6, 1, 2),
]
WHOLE_RUNS = [(*case, 2_000) for case in CASES]
WHOLE_RUNS += [pytest.param(*case, 20_000, marks=pytest.mark.slow) for case in CASES[6:8]]


def make(size, steps, p, cycle, largest=None, assignment="equal") -> CyclicPoisson:
    return CyclicPoisson(
        probability=p,
        cycle=cycle,
        dataset_size=size,
        steps=steps,
        assignment=assignment,
        max_batch_size=largest,
    )


def joint(steps: int, cycle: int, once: float, twice: float) -> np.ndarray:
    """P(in t and in u): ``once`` if t = u, ``twice`` if the turns are the same part's."""
    same = np.subtract.outer(np.arange(steps), np.arange(steps)) % cycle == 0
    table = np.where(same, twice, 0.0)
    np.fill_diagonal(table, once)
    return table


class _Contract(ExchangeableSchemeContract):
    """The parts of an equal split are negatively associated, and the coins independent of them.
    What truncation adds to the spread is negative (see test_truncated_poisson), or, through the
    random part size of independent assignment, within the same variance: given the size M a joint
    count has variance at most M·q²(1-q²), q = q(M), and its mean M·q² moves by at most q² with M.
    """

    def large_scheme(self):
        scheme = self.scheme()
        largest = scheme.max_batch_size
        if largest is not None:
            largest = round(largest * self.examples / scheme.dataset_size)
        return dataclasses.replace(scheme, dataset_size=self.examples, max_batch_size=largest)


class TestEqual(_Contract):
    def scheme(self):
        return make(61, 14, 0.4, 4)

    def joint_probabilities(self):
        return joint(14, 4, 0.4 / 4, 0.4**2 / 4)


class TestIndependent(_Contract):
    def scheme(self):
        return make(61, 14, 0.4, 4, assignment="independent")

    def joint_probabilities(self):
        return joint(14, 4, 0.4 / 4, 0.4**2 / 4)


class TestLongerThanTheRun(_Contract):
    def scheme(self):
        return make(100, 8, 0.5, 12)

    def joint_probabilities(self):
        return np.eye(8) * 0.5 / 12


class TestEqualTruncated(_Contract):
    def scheme(self):
        return make(61, 14, 0.5, 4, largest=8)

    def joint_probabilities(self):
        # 20,000/4 = 5,000 in every part; the cap is round(8·20000/61) = 2623 > 5000/2 + 3 sd,
        # so next to nothing is cut; TestEqualCut has a tight one.
        return joint(14, 4, 0.5 / 4, 0.5**2 / 4)


class TestEqualCut(_Contract):
    def scheme(self):
        return make(60, 14, 0.9, 4, largest=3)

    def joint_probabilities(self):
        # Parts of 5,000 of which 4,500 ± 21 are drawn and 1,000 kept, at every step.
        return joint(14, 4, 1000 / 20_000, (1000 / 5000) ** 2 / 4)


class TestIndependentCut(_Contract):
    def scheme(self):
        return make(60, 14, 0.9, 4, largest=3, assignment="independent")

    def joint_probabilities(self):
        # Parts of M = 1 + Bin(N-1, 1/4) = 5,000 ± 61, of which 1,000 are kept: once B/N, and
        # twice E[(B/M)²]/4 with E[1/M] = b(1-(1-1/b)^N)/N ≈ b/N, and E[1/M²] = E[1/M]²(1 + 1.5e-4)
        # by its variance: 1.5e-4 of 200 is 0.03, against a tolerance of 100.
        return joint(14, 4, 1000 / 20_000, (1000 / 5000) ** 2 / 4)


@pytest.mark.slow
@pytest.mark.parametrize("assignment", ["equal", "independent"])
@pytest.mark.parametrize(("size", "steps", "p", "cycle", "largest", "runs"), WHOLE_RUNS)
def test_whole_runs(size, steps, p, cycle, largest, assignment, runs):
    scheme = make(size, steps, p, cycle, largest, assignment)
    law = oracle.cyclic(size, steps, p, cycle, equal=assignment == "equal", largest=largest)
    oracle.assert_runs_follow(scheme.stream, law, runs)
    vectors = scheme.sample_participation(np.random.default_rng(1), 10 * runs)
    oracle.assert_vectors_follow(vectors, law)
    oracle.assert_public_constants(scheme, law)
    each_step = oracle.mean_batch_sizes(law)  # exact at every step, not only on average
    assert each_step == pytest.approx([scheme.expected_batch_size] * steps, rel=1e-12)


@pytest.mark.parametrize("assignment", ["equal", "independent"])
@pytest.mark.parametrize("largest", [None, 1, 2])
def test_a_cycle_of_one_is_poisson(assignment, largest):
    """The laws are the same, and so are the constants; the streams were held to the laws."""
    equal = assignment == "equal"
    one = oracle.cyclic(3, 2, 0.6, 1, equal=equal, largest=largest)
    other = oracle.poisson(3, 2, 0.6, largest)
    assert one.keys() == other.keys()
    assert [one[run] for run in other] == pytest.approx(list(other.values()), rel=1e-12)
    scheme = make(3, 2, 0.6, 1, largest, assignment)
    oracle.assert_runs_follow(scheme.stream, other, 3_000)
    plain = Poisson(probability=0.6, dataset_size=3, steps=2, max_batch_size=largest)
    assert scheme.rate == pytest.approx(plain.rate, rel=1e-15)
    for name in ("min_sep", "max_participations", "physical_batch_size"):
        assert getattr(scheme, name) == getattr(plain, name)


def test_it_is_no_poisson():
    """A part is drawn with b times the rate: an accountant of plain Poisson must not take it."""
    assert not isinstance(make(4, 4, 0.5, 2), Poisson)


@pytest.mark.parametrize("size", [12, 13, 15])
def test_equal_parts(size):
    """With p = 1 a step shows its part: all examples, sizes within one, the same each cycle, and
    every one of the parts is as likely a large one (1,000 splits, Bernstein)."""
    scheme = make(size, 8, 1.0, 4)
    large = np.zeros(4)
    for seed in range(1000):
        batches = list(scheme.stream(seed))
        sizes = [len(batch) for batch in batches[:4]]
        assert {min(sizes), max(sizes)} == set(scheme.part_sizes)
        assert sum(size > min(scheme.part_sizes) for size in sizes) == size % 4
        assert sorted(np.concatenate(batches[:4]).tolist()) == list(range(size))
        for one, again in zip(batches[:4], batches[4:], strict=True):
            np.testing.assert_array_equal(one, again)
        large += np.array(sizes) > min(scheme.part_sizes)
    share = (size % 4) / 4
    assert (np.abs(large - 1000 * share) <= bernstein_tolerance(1000 * share * (1 - share))).all()


def test_independent_parts_have_binomial_sizes():
    scheme = make(5, 2, 1.0, 2, assignment="independent")
    sizes = [len(next(scheme.stream(seed))) for seed in range(4000)]
    counts = np.bincount(sizes, minlength=6)
    for k, count in enumerate(counts):
        q = math.comb(5, k) / 32
        assert abs(count - 4000 * q) <= bernstein_tolerance(4000 * q * (1 - q))
    assert list(scheme.part_sizes) == [1, 2, 3, 4, 5]


def test_two_examples_share_a_part_as_often_as_they_should():
    """Equal: (N/b - 1)/(N - 1) for equal sizes; independent: 1/b."""
    for assignment, q in (("equal", 2 / 8), ("independent", 1 / 3)):
        scheme = make(9, 3, 1.0, 3, assignment=assignment)
        together = 0
        for seed in range(3000):
            taken = participation(scheme.stream(seed), 9)
            together += int((taken[2] & taken[7]).any())
        assert abs(together - 3000 * q) <= bernstein_tolerance(3000 * q * (1 - q))


def test_for_batch_size():
    for assignment in ("equal", "independent"):
        scheme = CyclicPoisson.for_batch_size(
            batch_size=32, dataset_size=1000, cycle=7, steps=9, assignment=assignment
        )
        assert scheme.probability == pytest.approx(0.224, rel=1e-15)
        assert scheme.expected_batch_size == pytest.approx(32, rel=1e-12)
        assert scheme.assignment == assignment
    most = CyclicPoisson.for_batch_size(batch_size=1000 / 7, dataset_size=1000, cycle=7, steps=9)
    assert most.probability == 1.0
    padded = CyclicPoisson.for_batch_size(
        batch_size=32, dataset_size=1000, cycle=7, steps=9, max_batch_size=40
    )
    assert padded.physical_batch_size == 40
    assert 31 < padded.expected_batch_size < 32


@pytest.mark.parametrize("assignment", ["equal", "independent"])
def test_state_takes_at_most_8_bytes_an_example(assignment):
    scheme = make(10**6, 50, 1e-3, 256, assignment=assignment)
    stream = scheme.stream(0)
    for _ in range(9):
        next(stream)
    tensors = [value for value in stream.state_dict().values() if hasattr(value, "nbytes")]
    assert sum(tensor.nbytes for tensor in tensors) <= 8 * 10**6
    arrays = [value for value in vars(stream).values() if isinstance(value, np.ndarray)]
    assert sum(a.nbytes if a.base is None else a.base.nbytes for a in arrays) <= 8 * 10**6


GOOD = {"probability": 0.5, "cycle": 2, "dataset_size": 10, "steps": 3, "max_batch_size": 4}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("cycle", 0, "cycle=0 must be at least 1"),
        ("cycle", 2.0, "cycle=2.0 must be an integer, not float"),
        ("cycle", 11, "cycle=11 equal parts of dataset_size=10 .* lower cycle to at most 10"),
        ("max_batch_size", 0, "max_batch_size=0 must be at least 1"),
        ("max_batch_size", "4", "max_batch_size='4' must be an integer"),
        ("assignment", "random", "assignment='random' is unknown; use 'equal' .*'independent'"),
        ("assignment", None, "assignment=None is unknown"),
        ("probability", 1.01, r"probability=1.01 must be a probability in \(0, 1\]"),
        ("steps", 0, "steps=0 must be at least 1"),
    ],
)
def test_bad_input(field, value, message):
    with pytest.raises((TypeError, ValueError), match=f"CyclicPoisson: {message}"):
        CyclicPoisson(**{**GOOD, field: value})


def test_bad_batch_size():
    with pytest.raises(
        ValueError, match=r"batch_size=26 .*largest possible batch size is 25 .*cycle=4"
    ):
        CyclicPoisson.for_batch_size(batch_size=26, dataset_size=100, cycle=4, steps=9)
    for value in (0, -1.0, math.nan, "8"):
        with pytest.raises((TypeError, ValueError), match="batch_size"):
            CyclicPoisson.for_batch_size(batch_size=value, dataset_size=100, cycle=4, steps=9)
    with pytest.raises((TypeError, ValueError), match="cycle=0"):
        CyclicPoisson.for_batch_size(batch_size=8, dataset_size=100, cycle=0, steps=9)
