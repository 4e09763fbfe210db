"""The exposed-steps claim by summation over every outcome; nothing here imports the library."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

from tests.oracles.user_level import Counts, Graph, Mixture, neighbors


def outside_neighbors(graph: Graph, user: int) -> int:
    """d: examples not of the user that share a user with one of the user's."""
    mine = {e for e, users in enumerate(graph) if user in users}
    near = neighbors(graph)
    return len(set().union(*(near[e] for e in mine)) - mine)


def chain(draws: Sequence[int], b: int, *, sampled: bool = True) -> Counts:
    """x of one outcome of a user's draws."""
    x: list[int] = []
    for t, r in enumerate(draws):
        barring = draws if sampled else x
        x.append(0 if any(barring[max(0, t - b + 1) : t]) else r)
    return tuple(x)


def exposed(seen: Sequence[int], b: int) -> tuple[bool, ...]:
    """Which steps t have a U_j = 1 with j in {t+1..t+b-1}."""
    return tuple(any(seen[t + 1 : t + b]) for t in range(len(seen)))


def known_law(
    k: int, d: int, *, p: float, b: int, steps: int
) -> dict[tuple[int | None, ...], tuple[float, Mixture]]:
    """Public pattern (r_t at exposed steps, None at others) to its chance and the law of x."""
    coin = 1 - (1 - p) ** d
    binomial = [math.comb(k, j) * p**j * (1 - p) ** (k - j) for j in range(k + 1)]
    shown: dict[tuple[bool, ...], float] = defaultdict(float)
    for seen in itertools.product((0, 1), repeat=steps):
        shown[exposed(seen, b)] += math.prod(coin if u else 1 - coin for u in seen)
    found: dict[tuple[int | None, ...], dict[Counts, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    for draws in itertools.product(range(k + 1), repeat=steps):
        weight, x = math.prod(binomial[r] for r in draws), chain(draws, b)
        for steps_shown, chance in shown.items():
            key = tuple(r if e else None for r, e in zip(draws, steps_shown, strict=True))
            found[key][x] += weight * chance
    law = {}
    for key, mixture in found.items():
        total = math.fsum(mixture.values())
        if total > 0:
            law[key] = total, {x: q / total for x, q in mixture.items() if q > 0}
    assert math.isclose(math.fsum(q for q, _ in law.values()), 1.0, rel_tol=1e-12)
    return law


def claimed_mixtures(
    k: int, d: int, *, p: float, b: int, steps: int
) -> list[tuple[float, Mixture]]:
    """(probability, law of x given the public pattern), equal laws put together."""
    merged: dict[tuple[tuple[Counts, float], ...], float] = defaultdict(float)
    for total, mixture in known_law(k, d, p=p, b=b, steps=steps).values():
        merged[tuple(sorted((x, round(q, 13)) for x, q in mixture.items()))] += total
    return [(total, dict(given)) for given, total in merged.items()]
