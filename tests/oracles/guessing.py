"""The best that any private mechanism can do at a game of guesses, as a linear program."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix


def most_correct(
    *, canaries: int, guesses: int, correct: int, curve: Sequence[tuple[float, float, float]]
) -> float:
    """Largest chance of ``correct`` right guesses over all mechanisms under a curve.

    A mechanism is a table q(t | s): coins s of all canaries to answers t, an answer being which
    canaries are guessed and what. Nothing else about it can matter.

    Args:
        canaries: m, each in or out by a fair coin.
        guesses: r ≤ m, made in every answer.
        correct: v.
        curve: ε, δ of H(in‖out) and δ of H(out‖in): of every canary, whatever the others are.
    """
    worlds = list(itertools.product((0, 1), repeat=canaries))
    answers = [
        dict(zip(who, what, strict=True))
        for who in itertools.combinations(range(canaries), guesses)
        for what in itertools.product((0, 1), repeat=guesses)
    ]
    place = {(s, t): i for i, (s, t) in enumerate(itertools.product(worlds, range(len(answers))))}
    known = len(place)
    rows: list[tuple[int, int, float]] = []  # of A x <= b
    bounds_above: list[float] = []
    for s in worlds:
        for i in range(canaries):
            other = (*s[:i], 1 - s[i], *s[i + 1 :])
            for epsilon, remove, add in curve:
                slacks = range(known, known + len(answers))
                known += len(answers)
                for t, slack in enumerate(slacks):
                    row = len(bounds_above)
                    rows += [
                        (row, place[s, t], 1.0),
                        (row, place[other, t], -np.exp(epsilon)),
                        (row, slack, -1.0),
                    ]
                    bounds_above.append(0.0)
                rows += [(len(bounds_above), slack, 1.0) for slack in slacks]
                bounds_above.append(remove if s[i] else add)
    gain = np.zeros(known)
    for (s, t), column in place.items():
        right = sum(s[i] == said for i, said in answers[t].items())
        gain[column] = -float(right >= correct) / len(worlds)
    sums = [(n, place[s, t], 1.0) for n, s in enumerate(worlds) for t in range(len(answers))]
    solved = linprog(
        gain,
        A_ub=_matrix(rows, len(bounds_above), known),
        b_ub=bounds_above,
        A_eq=_matrix(sums, len(worlds), known),
        b_eq=np.ones(len(worlds)),
        method="highs",
    )
    assert solved.success, solved.message
    return float(-solved.fun)


def _matrix(entries: list[tuple[int, int, float]], height: int, width: int) -> coo_matrix:
    i, j, values = zip(*entries, strict=True)
    return coo_matrix((values, (i, j)), shape=(height, width)).tocsr()
