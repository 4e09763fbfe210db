"""b-min-sep cut to a constant size: who stays barred, and the law of whole runs on tiny data."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter

import numpy as np
import pytest

from dptrain.sampling import MinSep, Poisson
from dptrain.sampling.schemes.min_sep import MinSepStream
from dptrain.testing.scheme_contract import ExchangeableSchemeContract
from tests.oracles.batch_sequences import (
    RunLaw,
    assert_frequencies,
    assert_public_constants,
    assert_runs_follow,
    assert_vectors_follow,
    mean_batch_sizes,
    poisson,
)


def first_bars(p: float, b: int, warm: bool) -> dict[int, float]:
    """P(barred for the next s steps) at the start."""
    if not warm:
        return {0: 1.0}
    return {s: (p if s else 1.0) / (1 + (b - 1) * p) for s in range(b)}


def draw_and_run_law(
    size: int, steps: int, p: float, b: int, largest: int, warm: bool, cut_go_free: bool = False
) -> tuple[RunLaw, RunLaw]:
    """Of the drawn sets and of the batches of a run: all bars, coins and subsets.

    With ``cut_go_free`` the law of a wrong scheme, in which examples that were cut are available.
    """
    start = first_bars(p, b, warm)
    states: Counter = Counter()
    for bars in itertools.product(start, repeat=size):
        states[(bars, (), ())] += math.prod(start[s] for s in bars)
    for _ in range(steps):
        following: Counter = Counter()
        for (bars, draws, run), weight in states.items():
            free = [i for i in range(size) if bars[i] == 0]
            for coins in itertools.product((0, 1), repeat=len(free)):
                heads = tuple(i for i, coin in zip(free, coins, strict=True) if coin)
                chance = p ** len(heads) * (1 - p) ** (len(free) - len(heads))
                kept = list(itertools.combinations(heads, min(largest, len(heads))))
                for batch in kept:
                    barred = batch if cut_go_free else heads
                    after = tuple(
                        b - 1 if i in barred else max(bars[i] - 1, 0) for i in range(size)
                    )
                    q = weight * chance / len(kept)
                    if q > 0:
                        following[(after, (*draws, heads), (*run, batch))] += q
        states = following
    draw_law, run_law = Counter(), Counter()
    for (_, draws, run), q in states.items():
        draw_law[draws] += q
        run_law[run] += q
    assert math.isclose(math.fsum(run_law.values()), 1.0, rel_tol=1e-12)
    return dict(draw_law), dict(run_law)


RUNS = 3_000

# size, steps, p, b, B
TINY = [
    (3, 3, 0.6, 2, 1),
    (3, 4, 0.5, 3, 1),
    (4, 3, 0.5, 2, 2),
    (2, 4, 0.7, 4, 1),
    (4, 2, 1.0, 2, 1),
]


def untruncated(scheme: MinSep) -> MinSep:
    return dataclasses.replace(scheme, max_batch_size=None)


def tiny(size, steps, p, b, largest, warm) -> MinSep:
    return MinSep(
        probability=p,
        min_sep=b,
        dataset_size=size,
        steps=steps,
        max_batch_size=largest,
        warm_start=warm,
    )


class TruncatedContract(ExchangeableSchemeContract):
    """Half of the batches are cut.

    The frequency checks hold here too: a batch that is cut has a fixed size, which lowers the
    variance of every count below that of independent examples.
    """

    def large_scheme(self):
        scheme = dataclasses.replace(self.scheme(), dataset_size=self.examples)
        drawn = scheme.dataset_size * untruncated(scheme).rate
        return dataclasses.replace(scheme, max_batch_size=int(drawn))


class TestWarm(TruncatedContract):
    def scheme(self):
        return tiny(60, 18, 0.25, 4, 8, True)


class TestCold(TruncatedContract):
    def scheme(self):
        return tiny(60, 18, 0.25, 4, 8, False)

    def stationary_scheme(self):
        return dataclasses.replace(self.large_scheme(), steps=60)  # see MinSep's


class TestLongerThanTheRun(TruncatedContract):
    def scheme(self):
        return tiny(100, 8, 0.2, 30, 3, True)


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("size", "steps", "p", "b", "largest"), TINY)
def test_runs_against_enumeration(size, steps, p, b, largest, warm):
    scheme = tiny(size, steps, p, b, largest, warm)
    _, law = draw_and_run_law(size, steps, p, b, largest, warm)
    assert_runs_follow(scheme.stream, law, RUNS)
    assert_vectors_follow(scheme.sample_participation(np.random.default_rng(3), 100_000), law)
    sizes = mean_batch_sizes(law)
    if warm:
        assert_public_constants(scheme, law)
        assert sizes == pytest.approx([scheme.expected_batch_size] * steps, rel=1e-12)


class CutGoFree(MinSepStream):
    """The wrong scheme: examples that were cut may be drawn in the next step."""

    def _draw(self):
        batch = super()._draw()
        release = self.step + self._scheme.min_sep
        drawn = self._releases.pop(release, batch)
        cut = np.setdiff1d(drawn, batch).astype(self._dtype)
        if release < self.steps:
            self._releases[release] = batch.astype(self._dtype)
            self._pool.put(cut)
        return batch


@pytest.mark.slow
def test_the_enumeration_tells_when_cut_examples_go_free():
    """As many runs as above; the wrong stream follows the law of the wrong scheme."""
    shape = (3, 3, 0.5, 2, 1)
    scheme = dataclasses.replace(tiny(*shape, True), steps=5)  # all of the first 3 steps' bars

    def stream(seed):
        return itertools.islice(CutGoFree(scheme, seed), 3)

    _, right = draw_and_run_law(*shape, True)
    _, wrong = draw_and_run_law(*shape, True, cut_go_free=True)
    assert_runs_follow(stream, wrong, RUNS)
    with pytest.raises(AssertionError):
        assert_runs_follow(stream, right, RUNS)


@pytest.mark.parametrize("warm", [False, True])
def test_drawn_examples_are_barred_whether_kept_or_cut(warm):
    """Who is drawn shows in the state: available before, barred after."""
    b, largest = 5, 20
    scheme = tiny(2_000, 60, 0.03, b, largest, warm)
    stream = scheme.stream(8)
    draws: list[set[int]] = []
    was_cut = 0
    for step in range(scheme.steps - b):
        state = stream.state_dict()
        before = set(state["available"].tolist())
        times, sizes = state["release_times"].tolist(), state["release_sizes"].tolist()
        if times and times[0] == step:
            before |= set(state["barred"][: sizes[0]].tolist())
        batch = set(next(stream).tolist())
        drawn = before - set(stream.state_dict()["available"].tolist())
        assert batch <= drawn
        assert len(batch) == min(len(drawn), largest)
        assert not drawn & set().union(*draws[-(b - 1) :])
        if not warm or step >= b:
            lately = set().union(*draws[-(b - 1) :])
            assert before == set(range(2_000)) - lately
        draws.append(drawn)
        was_cut += len(drawn) > largest
    assert was_cut > 10


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("size", "steps", "p", "b", "largest"), TINY)
def test_draws_of_one_and_counts_of_the_others(size, steps, p, b, largest, warm):
    scheme = tiny(size, steps, p, b, largest, warm)
    law, _ = draw_and_run_law(size, steps, p, b, largest, warm)
    expected: Counter = Counter()
    for draws, q in law.items():
        mine = tuple(int(0 in heads) for heads in draws)
        expected[(*mine, *(len(set(heads) - {0}) for heads in draws))] += q
    drawn, others = scheme.sample_draws(np.random.default_rng(4), 50_000)
    rows = np.concatenate([drawn, others], axis=1).astype(int).tolist()
    assert_frequencies(Counter(map(tuple, rows)), expected, 50_000)


@pytest.mark.parametrize("warm", [False, True])
def test_min_sep_of_one_is_truncated_poisson(warm):
    _, law = draw_and_run_law(3, 3, 0.6, 1, 2, warm)
    expected = poisson(3, 3, 0.6, 2)
    assert law.keys() == expected.keys()
    assert all(math.isclose(law[run], q) for run, q in expected.items())
    scheme = tiny(3, 3, 0.6, 1, 2, warm)
    other = Poisson(probability=0.6, dataset_size=3, steps=3, max_batch_size=2)
    assert_runs_follow(scheme.stream, expected, RUNS)
    assert_vectors_follow(scheme.sample_participation(np.random.default_rng(5), 50_000), expected)
    for fact in ("rate", "max_participations", "min_sep", "physical_batch_size"):
        assert getattr(scheme, fact) == getattr(other, fact), fact


@pytest.mark.parametrize("warm", [False, True])
def test_without_a_cut_it_is_min_sep(warm):
    plain = MinSep(probability=0.3, min_sep=4, dataset_size=500, steps=40, warm_start=warm)
    scheme = tiny(500, 40, 0.3, 4, 500, warm)
    assert untruncated(scheme) == plain
    assert scheme.rate == pytest.approx(plain.rate, rel=1e-12)
    assert scheme.physical_batch_size == 500
    for batch, expected in zip(scheme.stream(9), plain.stream(9), strict=True):
        np.testing.assert_array_equal(batch, expected)


def test_for_batch_size_is_before_truncation():
    make = MinSep.for_batch_size
    scheme = make(batch_size=32, dataset_size=1_000, min_sep=7, steps=9, max_batch_size=40)
    assert untruncated(scheme).expected_batch_size == pytest.approx(32, rel=1e-12)
    assert 31 < scheme.expected_batch_size < 32
    with pytest.raises(ValueError, match=r"MinSep.*largest possible batch size is 25"):
        make(batch_size=26, dataset_size=100, min_sep=4, steps=9, max_batch_size=30)
    assert (
        make(batch_size=25, dataset_size=100, min_sep=4, steps=9, max_batch_size=30).probability
        == 1.0
    )


@pytest.mark.parametrize("field", ["min_sep", "dataset_size", "steps", "max_batch_size"])
@pytest.mark.parametrize("value", [0, 2.0, True, "7"])
def test_bad_integers(field, value):
    with pytest.raises((TypeError, ValueError), match=field):
        dataclasses.replace(tiny(10, 5, 0.5, 2, 3, True), **{field: value})


def test_bad_probability_and_warm_start():
    for value in (0.0, 1.5, math.nan, "x"):
        with pytest.raises((TypeError, ValueError), match="probability"):
            dataclasses.replace(tiny(10, 5, 0.5, 2, 3, True), probability=value)
    with pytest.raises((TypeError, ValueError), match="warm_start"):
        dataclasses.replace(tiny(10, 5, 0.5, 2, 3, True), warm_start=1)


def test_an_only_example():
    """N = 1: nobody else is drawn, nothing is cut."""
    scheme = tiny(1, 6, 0.5, 2, 1, True)
    drawn, others = scheme.sample_draws(np.random.default_rng(1), 100)
    assert not others.any()
    assert scheme.rate == pytest.approx(untruncated(scheme).rate, rel=1e-12)
    assert sum(len(batch) for batch in scheme.stream(2)) <= 3
    assert drawn.any()
