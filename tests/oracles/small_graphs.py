"""Every small attribution graph, and what a user loses on it, by enumeration and quadrature.

Nothing here imports dptrain.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np


def small_graphs(most_examples: int, most_users: int) -> list[list[list[int]]]:
    """Graphs with 1..``most_examples`` examples of some of ``most_users`` users, up to their order.

    Users that have no example do not count: the others are numbered without gaps.
    """
    rows = [[u for u in range(most_users) if mask >> u & 1] for mask in range(1, 1 << most_users)]
    found = []
    for size in range(1, most_examples + 1):
        for chosen in itertools.combinations_with_replacement(rows, size):
            used = sorted(set(itertools.chain.from_iterable(chosen)))
            if used == list(range(len(used))):
                found.append([list(row) for row in chosen])
    return found


def step_law(members: tuple[int, ...], q: float, largest: int | None) -> dict[frozenset, float]:
    """Probability of every batch: coins of all members, and of more than B each B as likely."""
    law: dict[frozenset, float] = {}
    for coins in itertools.product((0, 1), repeat=len(members)):
        drawn = [e for e, coin in zip(members, coins, strict=True) if coin]
        chance = math.prod(q if coin else 1 - q for coin in coins)
        if largest is None or len(drawn) <= largest:
            kept = [tuple(drawn)]
        else:
            kept = list(itertools.combinations(drawn, largest))
        for batch in kept:
            key = frozenset(batch)
            law[key] = law.get(key, 0.0) + chance / len(kept)
    return law


def known_others(law: dict[frozenset, float], mine: frozenset) -> list[tuple[float, tuple]]:
    """(probability, law of the number of mine) for everything that the others' batch can show."""
    groups: dict[frozenset, dict[int, float]] = {}
    for batch, chance in law.items():
        own = groups.setdefault(batch - mine, {})
        own[len(batch & mine)] = own.get(len(batch & mine), 0.0) + chance
    merged: dict[tuple, float] = {}
    for own in groups.values():
        total = sum(own.values())
        given = tuple(sorted((j, round(p / total, 14)) for j, p in own.items()))
        merged[given] = merged.get(given, 0.0) + total
    return [(chance, given) for given, chance in merged.items()]


def two_step_delta(laws: list[list[tuple[float, tuple]]], c, sigma, epsilon) -> tuple[float, float]:
    """δ (remove, add) of C x + σz against σz, both steps' others known; ``c`` is C, (2, 2).

    ``laws`` holds for each of the two steps what ``known_others`` gives.
    """
    remove = add = 0.0
    for (p, first), (q, second) in itertools.product(*laws):
        found = _delta(first, second, tuple(map(tuple, np.asarray(c, float))), sigma, epsilon)
        remove += p * q * found[0]
        add += p * q * found[1]
    return remove, add


@functools.cache
def _delta(first, second, c, sigma, epsilon):
    matrix = np.array(c) / sigma
    points = [
        (p * q, matrix @ np.array([i, j], float))
        for (i, p), (j, q) in itertools.product(first, second)
    ]
    y = np.linspace(-8.0, 8.0 + max(float(at.max()) for _, at in points), 700)
    weight = np.exp(-0.5 * y**2) * (y[1] - y[0]) / math.sqrt(2 * math.pi)
    q = np.outer(weight, weight)
    ratio = np.zeros_like(q)
    for chance, at in points:
        ratio += chance * np.exp(np.add.outer(y * at[0], y * at[1]) - 0.5 * float(at @ at))
    return (
        float((q * np.maximum(ratio - math.exp(epsilon), 0.0)).sum()),
        float((q * np.maximum(1.0 - math.exp(epsilon) * ratio, 0.0)).sum()),
    )
