"""Exact laws of whole runs on tiny data: the probability of every sequence of batches.

Nothing here imports a scheme: each law is written from its definition, by listing every coin,
subset, split and order. A batch is a tuple of ascending indices, a run a tuple of batches.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from dptrain.testing.scheme_contract import LOG_ERROR, bernstein_tolerance

Batch = tuple[int, ...]
Run = tuple[Batch, ...]
BatchLaw = dict[Batch, float]
RunLaw = dict[Run, float]


def truncated_draw(pool: Iterable[int], p: float, largest: int | None = None) -> BatchLaw:
    """A coin of probability p each; of more than ``largest`` heads, a uniform subset."""
    pool = sorted(pool)
    law: BatchLaw = Counter()
    for coins in itertools.product((0, 1), repeat=len(pool)):
        heads = tuple(i for i, coin in zip(pool, coins, strict=True) if coin)
        weight = p ** len(heads) * (1 - p) ** (len(pool) - len(heads))
        kept = [heads]
        if largest is not None and len(heads) > largest:
            kept = list(itertools.combinations(heads, largest))
        for batch in kept:
            law[batch] += weight / len(kept)
    return law


def in_turn(laws: list[BatchLaw]) -> RunLaw:
    """The run whose steps are independent and follow these laws."""
    runs: RunLaw = {(): 1.0}
    for law in laws:
        runs = {(*run, batch): q * w for run, q in runs.items() for batch, w in law.items()}
    return runs


def mixture(weighted: list[tuple[float, RunLaw]]) -> RunLaw:
    """The runs of laws that are picked with these weights, without those of probability zero."""
    total: RunLaw = Counter()
    for weight, law in weighted:
        for run, q in law.items():
            total[run] += weight * q
    assert math.isclose(math.fsum(total.values()), 1.0, rel_tol=1e-12)
    return {run: q for run, q in total.items() if q > 0}


def poisson(size: int, steps: int, p: float, largest: int | None = None) -> RunLaw:
    """(Truncated) Poisson sampling of ``size`` examples."""
    return mixture([(1.0, in_turn([truncated_draw(range(size), p, largest)] * steps))])


def cyclic(
    size: int, steps: int, p: float, cycle: int, *, equal: bool, largest: int | None = None
) -> RunLaw:
    """Every assignment of examples to parts (equal: only those with sizes within one)."""
    assignments = list(itertools.product(range(cycle), repeat=size))
    if equal:
        counts = [[picks.count(part) for part in range(cycle)] for picks in assignments]
        assignments = [
            picks for picks, n in zip(assignments, counts, strict=True) if max(n) - min(n) <= 1
        ]
    runs = []
    for picks in assignments:
        parts = [[i for i in range(size) if picks[i] == t % cycle] for t in range(steps)]
        law = in_turn([truncated_draw(part, p, largest) for part in parts])
        runs.append((1 / len(assignments), law))
    return mixture(runs)


def shuffled(size: int, batch_size: int, epochs: int, *, reshuffle: bool) -> RunLaw:
    """Every order, cut into batches; a new order each epoch or the first one again."""
    one: RunLaw = Counter()
    for order in itertools.permutations(range(size)):
        cuts = range(0, size, batch_size)
        one[tuple(tuple(sorted(order[i : i + batch_size])) for i in cuts)] += 1.0
    one = {run: count / math.factorial(size) for run, count in one.items()}
    if not reshuffle:
        return mixture([(1.0, {run * epochs: q for run, q in one.items()})])
    runs: RunLaw = {(): 1.0}
    for _ in range(epochs):
        runs = {run + more: q * w for run, q in runs.items() for more, w in one.items()}
    return mixture([(1.0, runs)])


def pattern(run: Run, example: int) -> Batch:
    """The steps in which the example takes part, as zeros and ones."""
    return tuple(int(example in batch) for batch in run)


def pattern_law(law: RunLaw, example: int = 0) -> BatchLaw:
    """The law of one example's participation vector."""
    patterns: BatchLaw = Counter()
    for run, q in law.items():
        patterns[pattern(run, example)] += q
    return patterns


def mean_batch_sizes(law: RunLaw) -> list[float]:
    """Expected size of the batch of each step."""
    steps = len(next(iter(law)))
    return [math.fsum(q * len(run[t]) for run, q in law.items()) for t in range(steps)]


def assert_frequencies(counts: Counter, law: dict, total: int) -> None:
    """Every outcome as often as it should, at 2e-9 each, none that cannot occur, and all in all.

    The last is a bound on Σ|count/total - q|: its mean is at most Σ sqrt(q(1-q)/total), and by
    McDiarmid's inequality it exceeds that by sqrt(2·LOG_ERROR/total) with chance exp(-LOG_ERROR).
    """
    assert sum(counts.values()) == total
    assert set(counts) <= set(law), "an outcome of probability zero was drawn"
    outcomes = list(law)
    q = np.array([law[outcome] for outcome in outcomes])
    k = np.array([counts[outcome] for outcome in outcomes], dtype=np.float64)
    away = np.abs(k - total * q)
    tolerance = bernstein_tolerance(total * q * (1 - q))
    worst = int(np.argmax(away - tolerance))
    assert away[worst] <= tolerance[worst], f"{outcomes[worst]}: {k[worst]} of {total}, {q[worst]}"
    bound = np.sqrt(q * (1 - q) / total).sum() + math.sqrt(2 * LOG_ERROR / total)
    assert away.sum() / total <= bound


def assert_runs_follow(stream: Callable[[int], Iterable], law: RunLaw, runs: int) -> None:
    """The runs of ``stream(seed)``, seed = 0..runs-1, against the exact law."""
    drawn = (tuple(tuple(batch.tolist()) for batch in stream(seed)) for seed in range(runs))
    assert_frequencies(Counter(drawn), law, runs)


def assert_vectors_follow(vectors: np.ndarray, law: RunLaw) -> None:
    """Sampled participation vectors against those of the exact law."""
    drawn = Counter(map(tuple, vectors.astype(int).tolist()))
    assert_frequencies(drawn, pattern_law(law), len(vectors))


def assert_public_constants(scheme, law: RunLaw) -> None:
    """min_sep, max_participations and p0 of the scheme against every run that can occur.

    The two combinatorial constants have to hold for every run and to be reached by some run; p0 is
    the mean over the steps of one example's inclusion, B̄ that of the batch sizes.
    """
    steps = scheme.steps
    assert all(len(run) == steps for run in law)
    used = [[t for t, hit in enumerate(pattern(run, 0)) if hit] for run in law]
    assert max(len(at) for at in used) == scheme.max_participations
    gaps = [later - one for at in used for one, later in itertools.pairwise(at)]
    if scheme.max_participations > 1:
        assert min(gaps) == scheme.min_sep
    sizes = mean_batch_sizes(law)
    assert math.fsum(sizes) / steps == pytest.approx(scheme.expected_batch_size, rel=1e-12)
    inclusion = math.fsum(q * sum(x) for x, q in pattern_law(law).items()) / steps
    assert inclusion == pytest.approx(scheme.rate, rel=1e-12)
