"""Claims without amplification against every participation pattern, signs of C included."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dptrain.sampling import (
    CyclicPoisson,
    MinSep,
    Poisson,
    RandomAllocation,
    Scheme,
    Shuffled,
    UserFixed,
    UserMinSep,
)
from dptrain.sampling.users.graph import AttributionGraph
from tests.oracles import user_level as oracle
from tests.oracles.test_user_level import CHAIN, ROUNDING, banded, claimed


def patterns(scheme: Scheme) -> list[tuple[int, ...]]:
    """Steps of every way to take part that the scheme's definition allows one unit."""
    steps = range(scheme.steps)
    if isinstance(scheme, RandomAllocation | Shuffled):
        length = scheme.steps_per_epoch
        picks = list(itertools.combinations(range(length), getattr(scheme, "participations", 1)))
        kept = isinstance(scheme, Shuffled) and not scheme.reshuffle
        chosen = [(c,) * scheme.epochs for c in picks]
        if not kept:
            chosen = list(itertools.product(picks, repeat=scheme.epochs))
        return [tuple(e * length + i for e, c in enumerate(one) for i in c) for one in chosen]
    b = {"CyclicPoisson": "cycle", "Poisson": ""}.get(type(scheme).__name__, "min_sep")
    gap = getattr(scheme, b) if b else 1
    exactly = isinstance(scheme, CyclicPoisson)
    most = scheme.max_participations if isinstance(scheme, UserFixed) else scheme.steps
    return [
        hits
        for size in range(most + 1)
        for hits in itertools.combinations(steps, size)
        if all((j - i) % gap == 0 if exactly else j - i >= gap for i, j in itertools.pairwise(hits))
    ]


GRAPH = AttributionGraph.from_lists(CHAIN)
UNAMPLIFIED: list[Scheme] = [
    Poisson(probability=0.3, dataset_size=9, steps=4, max_batch_size=2),
    MinSep(probability=0.3, min_sep=2, dataset_size=9, steps=5, max_batch_size=2),
    RandomAllocation(steps_per_epoch=3, participations=2, epochs=2, dataset_size=9),
    CyclicPoisson(probability=0.3, cycle=2, dataset_size=9, steps=5, max_batch_size=2),
    UserFixed(graph=GRAPH, batch_size=2, min_sep=2, steps=6, max_participations=2),
    UserMinSep(graph=GRAPH, probability=0.3, min_sep=2, steps=5, batch_size=1),
    Shuffled(batch_size=4, dataset_size=9, epochs=2),
    Shuffled(batch_size=4, dataset_size=9, epochs=2, reshuffle=False),
]


@pytest.mark.parametrize("scheme", UNAMPLIFIED, ids=lambda scheme: type(scheme).__name__)
def test_unamplified_claims_cover_every_pattern(scheme: Scheme) -> None:
    """Signs too: gradients may turn around between steps where C has negative entries."""
    most = 3 if isinstance(scheme, UserMinSep) else 1  # user 2 of the chain has three examples
    for seed in range(3):
        matrix = banded(scheme.steps, scheme.steps, seed, spread=0.5)
        if seed == 2:
            matrix[np.tril_indices(scheme.steps, -1)] *= -1
        largest = 0.0
        for hits in patterns(scheme):
            for signs in itertools.product((1, -1), repeat=len(hits)):
                x = np.zeros(scheme.steps)
                x[list(hits)] = signs
                largest = max(largest, float(np.linalg.norm(matrix @ x)))
        for epsilon in (0.1, 2.0):
            found = claimed(scheme, matrix, 4.0, epsilon, accountant="gaussian")
            assert found >= oracle.gaussian_delta(epsilon, most * largest / 4.0) * (1 - ROUNDING)
