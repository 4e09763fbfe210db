"""User-level b-min-sep: the definition by sets, whole sequences by enumeration."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest

from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.user_min_sep import UserMinSep, UserMinSepStream
from dptrain.testing.scheme_contract import (
    SchemeContract,
    bernstein_tolerance,
    joint_counts,
    participation,
)
from tests.helpers.user_graphs import (
    HUB,
    LARGE,
    PATH,
    SMALL,
    TWO,
    assert_copies_follow,
    batches_by_sets,
    copies,
    graph_of,
    neighborhoods,
    random_lists,
    scheme_of,
    sequence_law,
)
from tests.oracles.enumeration import min_sep_cold

BOTH = pytest.mark.parametrize("exclusion", ["sampling", "participation"])


class _Contract(SchemeContract):
    exclusion = ""

    def scheme(self):
        return scheme_of(SMALL, steps=20, batch_size=8.0, exclusion=self.exclusion)

    def large_scheme(self):
        return dataclasses.replace(self.scheme(), graph=LARGE)

    # A burn-in of 0 is a cold start.
    @pytest.mark.parametrize("value", [-1, True, "7", math.nan, None])
    def test_bad_number_is_refused(self, value):
        super().test_bad_number_is_refused(value)

    @pytest.mark.parametrize("name", ["probability", "min_sep", "steps", "batch_size"])
    def test_zero_is_refused(self, name):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(self.scheme(), **{name: 0})

    def test_no_user_within_min_sep(self):
        """Also over a run whose separation is longer than the run."""
        for b in (2, 7, 50):
            scheme = dataclasses.replace(self.large_scheme(), min_sep=b, probability=0.01)
            taken = participation(scheme.stream(self.seed), scheme.dataset_size)
            users = np.zeros((LARGE.users, scheme.steps), dtype=np.int64)
            for e, row in enumerate(taken):
                users[LARGE.members[LARGE.offsets[e] : LARGE.offsets[e + 1]]] += row
            assert users.max() <= scheme.max_per_batch
            assert users.max() > 1  # several examples of a user may go together
            assert (users > 0).sum(axis=1).max() <= scheme.max_participations
            for gap in range(1, min(b, scheme.steps)):
                assert not ((users[:, gap:] > 0) & (users[:, :-gap] > 0)).any()


class TestSampling(_Contract):
    exclusion = "sampling"


class TestParticipation(_Contract):
    exclusion = "participation"


def injected(scheme: UserMinSep, samples, monkeypatch) -> list[set[int]]:
    """The batches of the scheme when the coins come out as ``samples``."""
    coins = iter([np.array(sorted(sample), dtype=np.int64) for sample in samples])
    monkeypatch.setattr(UserMinSepStream, "_sample", lambda self: next(coins))
    return [set(batch.tolist()) for batch in scheme.stream(0)]


@BOTH
@pytest.mark.parametrize("b", [1, 2, 3, 5, 40])
def test_batches_are_those_of_the_definition(exclusion, b, monkeypatch):
    """The same coins through the stream and through N(e) in sets, with and without a burn-in."""
    for seed in range(12):
        lists = random_lists(seed, examples=30, users=25, most=3)
        coins = np.random.default_rng(100 + seed).random((20, 30)) < 0.12
        samples = [np.flatnonzero(row).tolist() for row in coins]
        expected = batches_by_sets(lists, samples, b, exclusion)
        for burn_in in (0, 6):
            scheme = scheme_of(
                graph_of(lists),
                min_sep=b,
                steps=20 - burn_in,
                exclusion=exclusion,
                burn_in=burn_in,
            )
            assert injected(scheme, samples, monkeypatch) == expected[burn_in:]


def test_sampled_examples_exclude_whether_used_or_not(monkeypatch):
    """e0 bars e1, which is sampled and not used; e1 then bars e2, which e0 does not."""
    samples = [{0}, {1}, {2}]
    scheme = scheme_of(graph_of(PATH), min_sep=2, steps=3, burn_in=0)
    assert injected(scheme, samples, monkeypatch) == [{0}, set(), set()]
    other = dataclasses.replace(scheme, exclusion="participation")
    assert injected(other, samples, monkeypatch) == [{0}, set(), {2}]


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    ("lists", "b", "p", "steps"),
    [(PATH, 3, 0.4, 4), (HUB, 2, 0.3, 3), (TWO, 2, 0.5, 4), (TWO, 9, 0.2, 4)],
)
def test_law_of_whole_sequences(lists, b, p, steps, exclusion):
    """Cold start; every sequence of batches, over independent copies of a tiny graph."""
    count = 40_000
    scheme = scheme_of(
        copies(lists, count),
        probability=p,
        min_sep=b,
        steps=steps,
        exclusion=exclusion,
        burn_in=0,
    )
    law = sequence_law(lists, b, p, steps, exclusion)
    assert_copies_follow(list(scheme.stream(5)), len(lists), count, law)


@pytest.mark.parametrize(("lists", "b"), [(PATH, 2), (TWO, 3)])
def test_short_burn_in_is_the_stationary_regime(lists, b):
    """In exact arithmetic: the law at step 0 after b-1 steps is that at step b of a cold start,
    and a longer burn-in changes no joint law."""
    p = Fraction(1, 3)
    cold = sequence_law(lists, b, p, b + 1, "sampling")
    at_b = {}
    for batches, probability in cold.items():
        at_b[batches[b]] = at_b.get(batches[b], 0) + probability
    warm = sequence_law(lists, b, p, 1, "sampling", burn_in=b - 1)
    assert {batch: probability for (batch,), probability in warm.items()} == at_b
    if b == 2:
        assert sequence_law(lists, b, p, 2, "sampling", burn_in=1) == sequence_law(
            lists, b, p, 2, "sampling", burn_in=2
        )
    first = sequence_law(lists, b, p, 1, "sampling")
    assert {batch for (batch,) in first} == set(at_b)
    assert first != warm  # the cold start is another regime


@pytest.mark.slow
def test_default_burn_in_draws_the_stationary_law():
    scheme = scheme_of(copies(PATH, 40_000), min_sep=3, steps=2)
    assert scheme.burn_in == 2
    law = sequence_law(PATH, 3, 0.3, 2, "sampling", burn_in=2)
    assert_copies_follow(list(scheme.stream(6)), 4, 40_000, law)


def test_default_burn_in_of_participation():
    assert scheme_of(SMALL, min_sep=4, exclusion="participation").burn_in == 40
    assert scheme_of(SMALL, min_sep=4, exclusion="participation", burn_in=0).burn_in == 0


@pytest.mark.parametrize("b", [2, 3])
def test_expected_batch_size_by_enumeration(b):
    """p·Σ_e (1-p)^((b-1)|N(e)|) at step b-1 of a cold start, from the law of whole sequences."""
    p = 0.35
    for lists in (PATH, HUB, TWO):
        mean = sum(
            q * s[-1].bit_count() for s, q in sequence_law(lists, b, p, b, "sampling").items()
        )
        formula = p * sum((1 - p) ** ((b - 1) * len(near)) for near in neighborhoods(lists))
        assert mean == pytest.approx(formula, rel=1e-12)
        scheme = UserMinSep.for_batch_size(
            graph=graph_of(lists), batch_size=mean, min_sep=b, steps=3
        )
        # The smallest p that gives it: this one, or one on the rising side.
        q = scheme.probability
        again = q * sum((1 - q) ** ((b - 1) * len(near)) for near in neighborhoods(lists))
        assert again == pytest.approx(mean, rel=1e-9)
        assert q <= p * (1 + 1e-9)
        assert scheme.expected_batch_size == mean
        assert scheme.rate == pytest.approx(mean / len(lists))


def test_one_example_a_user():
    """Alone, an example is used if it is sampled for the first time in b steps: windows of two uses
    do not overlap, so uses b or more apart are independent of each other."""
    size, b, p, n = 50_000, 4, 0.2, 12
    graph = AttributionGraph.from_csr(np.arange(size + 1), np.arange(size))
    scheme = scheme_of(graph, probability=p, min_sep=b, steps=n)
    counts = joint_counts(participation(scheme.stream(8), size))
    use = p * (1 - p) ** (b - 1)
    apart = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    law = np.where(apart == 0, use, np.where(apart < b, 0.0, use**2))
    assert (counts[(apart > 0) & (apart < b)] == 0).all()
    assert (np.abs(counts - size * law) <= bernstein_tolerance(size * law * (1 - law))).all()


def test_participation_with_one_example_a_user_is_min_sep():
    """Algorithm 4 is then Algorithm 1, whose patterns are enumerated elsewhere."""
    law = min_sep_cold(6, 0.4, 3)
    keys = [tuple(map(int, pattern)) for pattern in law.patterns]
    scheme = scheme_of(
        copies([[0]], 50_000),
        probability=0.4,
        steps=6,
        exclusion="participation",
        burn_in=0,
    )
    assert_copies_follow(
        list(scheme.stream(9)), 1, 50_000, dict(zip(keys, law.probabilities, strict=True))
    )


def test_min_sep_of_one_is_poisson():
    """No exclusion: every example's coins are independent, whoever owns it."""
    for exclusion in ("sampling", "participation"):
        scheme = scheme_of(LARGE, min_sep=1, steps=6, exclusion=exclusion)
        counts = joint_counts(participation(scheme.stream(10), LARGE.examples))
        law = np.full((6, 6), 0.09) + np.eye(6) * 0.21
        tolerance = bernstein_tolerance(LARGE.examples * law * (1 - law))
        assert (np.abs(counts - LARGE.examples * law) <= tolerance).all()


def test_certain_sampling():
    """p = 1: everyone at once. Under participation again every b steps, else never."""
    first = scheme_of(SMALL, probability=1.0, steps=7, burn_in=0)
    assert [len(batch) for batch in first.stream(0)] == [80, 0, 0, 0, 0, 0, 0]
    again = dataclasses.replace(first, exclusion="participation")
    assert [len(batch) for batch in again.stream(0)] == [80, 0, 0, 80, 0, 0, 80]
