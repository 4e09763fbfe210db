"""Sensitivity of a tiny strategy matrix, by trying every pattern of participation.

Nothing here imports the library. A pattern is a set of steps with at most m members of which any
two lie at least b apart; the squared sensitivity is the largest ‖Σ_{i in S} C_{:,i} ⊗ u_i‖² over
patterns S and contributions u_i of norm at most 1. With C non-negative, equal u_i are the worst,
so that 0/1 vectors suffice; otherwise opposite signs or unrelated directions can be worse.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def supports(steps: int, max_participations: int, min_sep: int) -> list[tuple[int, ...]]:
    """Every non-empty set of at most m steps with gaps of at least b."""
    return [
        chosen
        for size in range(1, min(max_participations, steps) + 1)
        for chosen in itertools.combinations(range(steps), size)
        if all(after - before >= min_sep for before, after in itertools.pairwise(chosen))
    ]


def patterns(steps: int, max_participations: int, min_sep: int, *, signs: bool = False) -> Array:
    """Every pattern as a row: entries 0 and 1, or also -1 (the first one is 1) with ``signs``."""
    rows = []
    for chosen in supports(steps, max_participations, min_sep):
        others = itertools.product((1.0, -1.0) if signs else (1.0,), repeat=len(chosen) - 1)
        for rest in others:
            x = np.zeros(steps)
            x[list(chosen)] = (1.0, *rest)
            rows.append(x)
    return np.array(rows)


def largest_norm(matrix: Array, rows: Array) -> float:
    """max ‖C x‖ over the rows x."""
    return float(np.sqrt(((rows @ matrix.T) ** 2).sum(axis=1).max()))


def sensitivity(matrix: Array, max_participations: int, min_sep: int) -> float:
    """max ‖C x‖ over x in {0, 1}^n."""
    return largest_norm(matrix, patterns(matrix.shape[1], max_participations, min_sep))


def signed_sensitivity(matrix: Array, max_participations: int, min_sep: int) -> float:
    """max ‖C x‖ over x in {-1, 0, 1}^n: contributions along one line."""
    return largest_norm(matrix, patterns(matrix.shape[1], max_participations, min_sep, signs=True))


def whole_epochs(steps: int, epochs: int) -> list[tuple[int, ...]]:
    """The patterns of an example that is at the same place of every epoch."""
    period = steps // epochs
    return [tuple(range(start, steps, period)) for start in range(period)]


def vector_sensitivity(matrix: Array, max_participations: int, min_sep: int) -> float:
    """The worst contributions in any directions: see ``sensitivity_of_supports``."""
    allowed = supports(matrix.shape[1], max_participations, min_sep)
    return sensitivity_of_supports(matrix, allowed)


def sensitivity_of_supports(matrix: Array, allowed: list[tuple[int, ...]], seed: int = 0) -> float:
    """A lower bound, in practice the value, for contributions in any directions.

    Σ_{i,j} G_ij u_i·u_j with G = CᵀC is convex in all u together, so that the step to the unit
    vectors along Σ_j G_ij u_j never lowers it. As many dimensions as members lose nothing.
    """
    rng = np.random.default_rng(seed)
    gram = matrix.T @ matrix
    best = 0.0
    for chosen in allowed:
        g = gram[np.ix_(chosen, chosen)]
        signs = np.array(
            [(1.0, *rest) for rest in itertools.product((1.0, -1.0), repeat=len(g) - 1)]
        )
        if len(g) < 3 or (g >= 0).all():
            signs = signs[:1] if (g >= 0).all() else signs
            best = max(best, float(((signs @ g) * signs).sum(axis=1).max()))
            continue  # two directions, or none that disagree: a line is enough
        line = signs[((signs @ g) * signs).sum(axis=1).argmax()]
        for start in (np.outer(line, np.eye(len(g))[0]), np.zeros((len(g), len(g)))):
            u = start + 0.1 * rng.standard_normal((len(g), len(g)))
            u /= np.linalg.norm(u, axis=1, keepdims=True)
            for _ in range(60):
                u = g @ u
                u /= np.linalg.norm(u, axis=1, keepdims=True)
            best = max(best, float(line @ g @ line), float(np.sum(g * (u @ u.T))))
    return float(np.sqrt(best))
