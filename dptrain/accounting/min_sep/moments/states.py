"""The states of the reduced program: ages of α copies of which at least one is free.

A state is named by the ages of the other α-1 copies, ascending, free ones b-1: a vector in
0 ≤ u_1 ≤ … ≤ u_{α-1} ≤ b-1. Vectors are numbered lexicographically, so those that begin with s, the
*block* s, follow each other.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from dptrain.core import Array

Ints = npt.NDArray[np.int32]
Ages = npt.NDArray[np.int16]


def state_count(min_sep: int, order: int) -> int:
    """C(b+α-2, α-1): the states of one level."""
    return math.comb(min_sep + order - 2, order - 1)


def waiting_count(min_sep: int, order: int) -> int:
    """C(b+α-1, α): values kept, block s of s+1 levels (the states of the program unreduced)."""
    return math.comb(min_sep + order - 1, order)


def _vectors(min_sep: int, length: int) -> Ages:
    """All ascending vectors, lexicographic, shape (k, length)."""
    rows = np.zeros((1, 0), dtype=np.int16)
    for _ in range(length):
        last = rows[:, -1].astype(np.int64) if rows.shape[1] else np.zeros(1, dtype=np.int64)
        room = min_sep - last
        parent = np.repeat(np.arange(room.size), room)
        first = np.repeat(np.cumsum(room) - room, room)
        value = last[parent] + np.arange(parent.size) - first
        rows = np.column_stack((rows[parent], value.astype(np.int16)))
    return rows


def _ranks(vectors: Ages, min_sep: int) -> Ints:
    """Numbers of ascending vectors."""
    length = vectors.shape[1]
    found = np.zeros(len(vectors), dtype=np.int64)
    before = np.zeros(len(vectors), dtype=np.int64)
    for column in range(length):
        left = length - column
        # Vectors of ``left`` entries that are all at least x.
        above = np.array([math.comb(min_sep - x + left - 1, left) for x in range(min_sep)])
        value = vectors[:, column]
        found += above[before] - above[value]
        before = value.astype(np.int64)
    return found.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class States:
    """Tables of where the messages of a step come from and go to.

    If every free copy takes part, nothing is free until the oldest copy is, s steps later: the
    value is that of block s of that later level, in which each state occurs once. So row k of the
    tables is about the state whose value, when all free copies take part, is number k of its block.

    Attributes:
        starts: the first number of each block, and the end, shape (b+1,).
        own: number of the state of row k.
        free: its free copies, 1..α.
        ages: ages of its other copies, free ones b-1, shape (states, α-1).
        rest: number of the state after nobody took part.
        some_row: rows of further choices, of 1..free-1 copies that take part, where there are any.
        some_taking: number of copies that do.
        some_next: number of the state that this leads to.
        orderings: α!/Π(multiplicities) of the state of *number* k.
        free_of: free copies of the state of number k.
    """

    starts: npt.NDArray[np.int64]
    own: Ints
    free: npt.NDArray[np.int8]
    ages: Ages
    rest: Ints
    some_row: Ints
    some_taking: npt.NDArray[np.int8]
    some_next: Ints
    orderings: Array
    free_of: npt.NDArray[np.int8]

    @classmethod
    def of(cls, min_sep: int, order: int) -> States:
        """The states of ``order`` copies, α ≥ 2."""
        last, others = min_sep - 1, order - 1
        vectors = _vectors(min_sep, others)
        block = vectors[:, 0]
        same = (vectors == block[:, None]).sum(axis=1)
        free = np.where(block == last, order, same).astype(np.int8)
        # Image {s × f, u_i + 1 + s}: the barred are the u_i and the oldest, of age b-2-s.
        ages = vectors - (block + 1)[:, None]
        ages[vectors == block[:, None]] = last
        ages[:, 0] = last - 1 - block
        ages[block == last] = last
        ages.sort(axis=1)
        aged = np.minimum(ages + 1, last).astype(np.int16)
        rows, taking, after = [], [], []
        for j in range(1, order):
            row = np.flatnonzero(free > j)
            # Ages ascend: the last free-1 of them are free, and j < free of the copies take part.
            moved = aged[row]
            moved[:, others - j :] = 0
            moved.sort(axis=1)
            rows.append(row.astype(np.int32))
            taking.append(np.full(row.size, j, dtype=np.int8))
            after.append(_ranks(moved, min_sep))
        free_of = ((vectors == last).sum(axis=1) + 1).astype(np.int8)
        return cls(
            starts=np.searchsorted(block, np.arange(min_sep + 1)).astype(np.int64),
            own=_ranks(ages, min_sep),
            free=free,
            ages=ages,
            rest=_ranks(aged, min_sep),
            some_row=np.concatenate(rows),
            some_taking=np.concatenate(taking),
            some_next=np.concatenate(after),
            orderings=_orderings(vectors, last, order),
            free_of=free_of,
        )


def _orderings(vectors: Ages, last: int, order: int) -> Array:
    """Number of ways in which the copies can have these ages, one more of them being free."""
    run = np.ones(len(vectors))
    divisor = np.ones(len(vectors))
    for column in range(1, vectors.shape[1]):
        run = np.where(vectors[:, column] == vectors[:, column - 1], run + 1.0, 1.0)
        divisor *= run
    free = (vectors == last).sum(axis=1)
    return np.asarray(math.factorial(order) / (divisor * (free + 1.0)))
