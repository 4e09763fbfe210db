"""Which examples fit into a batch when users are limited, taken in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.sampling.graph import AttributionGraph
from dptrain.sampling.graph_edges import Offsets, Users, any_in_row, gather

Examples = npt.NDArray[Any]


class Packing:
    """Users' last and total participations, and the greedy choice under their limits.

    Args:
        graph: with its edges.
        min_sep: b.
        max_participations: m.

    Attributes:
        last: int32, shape (users,): step of the last participation, negative before the first.
        used: int32, shape (users,): number of participations.
    """

    def __init__(self, graph: AttributionGraph, min_sep: int, max_participations: int) -> None:
        _ = graph.offsets  # refuse a graph without edges now, not at the first step
        self._graph = graph
        self._min_sep = min_sep
        self._most = max_participations
        self.last = np.full(graph.users, -1, dtype=np.int32)
        self.used = np.zeros(graph.users, dtype=np.int32)

    def choose(
        self, step: int, tried: Examples, most: int
    ) -> tuple[Examples, Examples, npt.NDArray[np.int64], int]:
        """Use the first ``most`` examples that fit into this step's batch, one after the other.

        Args:
            step: t.
            tried: distinct examples, in the order in which they are looked at.
            most: how many are wanted, ≥ 1.

        Returns:
            The examples used; those that were blocked and may be free later; the step at which to
            look at each of these again, none being free before; how many were looked at. An example
            with a user who has no participation left is in neither.
        """
        rows, users = gather(self._graph.offsets, self._graph.members, tried)
        last = self.last[users]
        # Those who are in the batch already were free when the step began.
        in_batch = any_in_row(last == step, rows)
        free_at = np.where((last < 0) | (last == step), 0, last + np.int64(self._min_sep))
        until = np.maximum.reduceat(free_at, rows[:-1])
        exhausted = any_in_row(self.used[users] >= self._most, rows)
        chosen = _first_disjoint(rows, users, (until <= step) & ~in_batch & ~exhausted)
        places = np.flatnonzero(chosen)[:most]
        looked_at = len(tried) if len(places) < most else int(places[-1]) + 1
        taken = np.zeros(len(tried), dtype=bool)
        taken[places] = True
        touched = users[np.repeat(taken, np.diff(rows))]
        self.last[touched] = step
        self.used[touched] += 1
        rest = np.flatnonzero(~(taken | exhausted)[:looked_at])
        # Who was free when the step began shares a user with the batch.
        later = np.where(until[rest] > step, until[rest], step + self._min_sep)
        return tried[places], tried[rest], later, looked_at


def _first_disjoint(
    rows: Offsets, users: Users, candidate: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """The candidates that a walk in order takes, taking each that shares no user with one taken.

    A candidate that comes first for all its users among the undecided is taken, and those who
    share a user with it are not. The first undecided one is decided in each round, and most are in
    a few.
    """
    chosen = np.zeros(len(candidate), dtype=bool)
    row = np.repeat(np.arange(len(candidate)), np.diff(rows))
    alive = candidate[row]
    users, row = users[alive], row[alive]
    while len(row):
        distinct, first, inverse = np.unique(users, return_index=True, return_inverse=True)
        is_first = np.zeros(len(row), dtype=bool)
        is_first[first] = True  # edges are in the order of their rows
        behind = np.zeros(len(candidate), dtype=bool)
        behind[row[~is_first]] = True
        wins = ~behind[row]
        chosen[row[wins]] = True
        taken = np.zeros(len(distinct), dtype=bool)
        taken[inverse[wins]] = True
        decided = np.zeros(len(candidate), dtype=bool)
        decided[row[taken[inverse]]] = True  # the winners, and those who share a user with one
        left = ~decided[row]
        users, row = users[left], row[left]
    return chosen
