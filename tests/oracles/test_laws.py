"""Who draws what: every sampler against the exact probability of every pattern."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import binom

from dptrain.sampling import BallsInBins, MinSep, Poisson, Scheme
from tests.oracles import enumeration as oracle

# Each comparison is an exact binomial test that fails by chance with probability below 2e-9 (as 6
# standard deviations). At most 64 patterns, two samplers and a dozen schemes: below 4e-6 in all.
TAIL = 1e-9
SIZE = 100_000


def min_sep(p: float, b: int, steps: int, *, warm: bool) -> MinSep:
    return MinSep(probability=p, min_sep=b, dataset_size=SIZE, steps=steps, warm_start=warm)


CASES: list[tuple[Scheme, oracle.Law]] = [
    (Poisson(probability=0.3, dataset_size=SIZE, steps=5), oracle.poisson(5, 0.3)),
    (Poisson(probability=0.01, dataset_size=SIZE, steps=4), oracle.poisson(4, 0.01)),
    (BallsInBins(bins=3, epochs=2, dataset_size=SIZE), oracle.balls_in_bins(3, 2)),
    (BallsInBins(bins=8, epochs=1, dataset_size=SIZE), oracle.balls_in_bins(8, 1)),
    *(
        (min_sep(p, b, steps, warm=warm), (chain_warm if warm else chain_cold)(steps, p, b))
        for chain_warm, chain_cold in [(oracle.min_sep_warm, oracle.min_sep_cold)]
        for p, b, steps in [(0.4, 2, 6), (0.3, 3, 8), (0.15, 6, 8), (0.2, 9, 5), (0.5, 1, 5)]
        for warm in (False, True)
    ),
    (min_sep(1.0, 3, 8, warm=True), oracle.min_sep_warm(8, 1.0, 3)),
    (min_sep(1.0, 3, 8, warm=False), oracle.min_sep_cold(8, 1.0, 3)),
]
IDS = [repr(scheme) for scheme, _ in CASES]


def compare(taken: npt.NDArray[np.bool_], law: oracle.Law) -> None:
    """Every pattern as often as it should, and none that cannot occur."""
    size = len(taken)
    assert taken.shape == (size, law.steps)
    seen, counts = np.unique(taken, axis=0, return_counts=True)
    drawn = {tuple(x): int(k) for x, k in zip(seen.astype(int).tolist(), counts, strict=True)}
    total = 0
    for x, q in zip(law.patterns.astype(int).tolist(), law.probabilities, strict=True):
        k = drawn.get(tuple(x), 0)
        total += k
        tail = min(binom.cdf(k, size, q), binom.sf(k - 1, size, q))
        assert tail > TAIL, f"{x}: {k} times of {size}, probability {q}"
    assert total == size, "a pattern of probability zero was drawn"


@pytest.mark.sample(every=5)
@pytest.mark.parametrize(("scheme", "law"), CASES, ids=IDS)
def test_participation_vectors(scheme: Scheme, law: oracle.Law) -> None:
    compare(scheme.sample_participation(np.random.default_rng(20_261_120), SIZE), law)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize(("scheme", "law"), CASES, ids=IDS)
def test_batches_of_a_run(scheme: Scheme, law: oracle.Law) -> None:
    """The rows of one stream are independent examples."""
    taken = np.zeros((scheme.dataset_size, scheme.steps), dtype=bool)
    for step, batch in enumerate(scheme.stream(77)):
        taken[batch, step] = True
    compare(taken, law)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("steps", [1, 2])
def test_two_examples_are_independent(steps: int) -> None:
    """Runs over N = 2 examples: the pair's pattern against the product of the exact laws."""
    scheme = dataclasses.replace(min_sep(0.4, 2, steps, warm=True), dataset_size=2)
    law = oracle.min_sep_warm(steps, 0.4, 2)
    pairs = oracle.Law(
        np.array([[*x, *y] for x in law.patterns for y in law.patterns]),
        np.outer(law.probabilities, law.probabilities).ravel(),
    )
    taken = np.zeros((4000, 2, steps), dtype=bool)
    for seed in range(len(taken)):
        for step, batch in enumerate(scheme.stream(seed)):
            taken[seed, batch, step] = True
    compare(taken.reshape(len(taken), -1), pairs)


@pytest.mark.parametrize(("bins", "epochs"), [(2, 3), (3, 2), (5, 1), (1, 3)])
def test_certain_warm_min_sep_is_balls_in_bins(bins: int, epochs: int) -> None:
    """The identity of the two laws themselves; the samplers were held to each of them above."""
    one, other = oracle.min_sep_warm(bins * epochs, 1.0, bins), oracle.balls_in_bins(bins, epochs)
    assert len(one.patterns) == len(other.patterns)
    for x, q in zip(other.patterns, other.probabilities, strict=True):
        assert one.of(x) == pytest.approx(q, rel=1e-12)
