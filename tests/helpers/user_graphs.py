"""Attribution graphs for tests, and what the definitions say about them, in Python sets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.user_min_sep import UserMinSep
from dptrain.testing.scheme_contract import bernstein_tolerance

Lists = Sequence[Sequence[int]]

# A path of four examples, a hub shared by all, and two users who share no example.
PATH = [[0], [0, 1], [1, 2], [2]]
HUB = [[0, 1, 2], [0], [1], [2]]
TWO = [[0], [0], [1, 2]]


def random_lists(seed: int, examples: int, users: int, most: int) -> list[list[int]]:
    """Examples with 1..most distinct users each, drawn at random."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most + 1, size=examples)
    return [rng.choice(users, size=size, replace=False).tolist() for size in sizes]


def graph_of(lists: Lists) -> AttributionGraph:
    return AttributionGraph.from_lists(lists)


def copies(lists: Lists, count: int) -> AttributionGraph:
    """``count`` disjoint copies; example e of copy c has the number c·len(lists) + e."""
    users = 1 + max(itertools.chain.from_iterable(lists))
    return graph_of([[c * users + u for u in row] for c in range(count) for row in lists])


def neighborhoods(lists: Lists) -> list[set[int]]:
    """N(e) = {e' : U(e') and U(e) meet}, by the definition."""
    return [
        {other for other, row in enumerate(lists) if set(row) & set(mine)}
        for mine in map(set, lists)
    ]


def batches_by_sets(
    lists: Lists, samples: Iterable[Iterable[int]], b: int, exclusion: str
) -> list[set[int]]:
    """B_1, B_2, … from S_1, S_2, …: Dong & Ganesh 2026, Algorithm 3 or 4, line by line."""
    near = neighborhoods(lists)
    drawn: list[set[int]] = []
    batches: list[set[int]] = []
    for t, sample in enumerate(map(set, samples)):
        barring = drawn if exclusion == "sampling" else batches
        earlier = range(max(0, t - b + 1), t)
        excluded = set().union(*(near[e] for j in earlier for e in barring[j]))
        batches.append(sample - excluded)
        drawn.append(sample)
    return batches


def sequence_law(lists: Lists, b: int, p, steps: int, exclusion: str, burn_in: int = 0) -> dict:
    """Probability of every sequence (B_0, …) as bit masks: all coins of all steps enumerated."""
    near = [sum(1 << other for other in row) for row in neighborhoods(lists)]
    size = len(lists)
    masks = range(1 << size)
    barred_by = [0] * len(masks)
    weight = [p ** m.bit_count() * (1 - p) ** (size - m.bit_count()) for m in masks]
    for mask in masks:
        for e in range(size):
            barred_by[mask] |= near[e] if mask >> e & 1 else 0
    law: dict[tuple[int, ...], float] = {}
    for samples in itertools.product(masks, repeat=burn_in + steps):
        batches: list[int] = []
        barring = samples if exclusion == "sampling" else batches
        for t, sample in enumerate(samples):
            excluded = 0
            for j in range(max(0, t - b + 1), t):
                excluded |= barred_by[barring[j]]
            batches.append(sample & ~excluded)
        key = tuple(batches[burn_in:])
        law[key] = law.get(key, 0) + math.prod(weight[m] for m in samples)
    assert math.isclose(sum(law.values()), 1.0)
    return law


def assert_copies_follow(batches: Sequence[np.ndarray], size: int, count: int, law: dict) -> None:
    """Frequencies of the copies' batch sequences within Bernstein's bound, 2e-9 for each."""
    codes = np.zeros((count, len(batches)), dtype=np.int64)
    for t, batch in enumerate(batches):
        np.add.at(codes[:, t], batch // size, 1 << (batch % size))
    rows, counts = np.unique(codes, axis=0, return_counts=True)
    found = {tuple(map(int, row)): int(n) for row, n in zip(rows, counts, strict=True)}
    assert set(found) <= set(law)
    for key, probability in law.items():
        expected = count * float(probability)
        tolerance = bernstein_tolerance(expected * (1 - float(probability)))
        assert abs(found.get(key, 0) - expected) <= tolerance, key


SMALL = graph_of(random_lists(1, 80, 60, 3))
LARGE = graph_of(random_lists(2, 20_000, 15_000, 3))


def scheme_of(graph: AttributionGraph, **changes) -> UserMinSep:
    values = {"probability": 0.3, "min_sep": 3, "steps": 4, "batch_size": 1.0, **changes}
    return UserMinSep(graph=graph, **values)
