"""The greedy choice of examples such that no user has more than k of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from dptrain.sampling.users.graph_edges import Offsets, Users, any_in_row, gather

Rows = npt.NDArray[np.int64]

# Keeps the order of the examples apart from anything else that is derived from an equal seed.
_DOMAIN = 0x626F756E64
# Examples decided at a time.
_CHUNK = 1 << 15


def bounded_rows(
    offsets: Offsets,
    members: Users,
    *,
    users: int,
    k: int,
    duplicates: bool,
    max_neighbors: int | None,
    seed: int,
    progress: bool,
) -> Rows:
    """The rows that ``AttributionGraph.bound`` keeps, ascending, a copy as often as it is kept."""
    crowding = None if max_neighbors is None else _Crowding(users, max_neighbors)
    counts = np.zeros(users, dtype=np.int64)
    sequence = np.random.SeedSequence(seed, spawn_key=(_DOMAIN,))
    left = np.random.Generator(np.random.PCG64DXSM(sequence)).permutation(len(offsets) - 1)
    passes: list[Rows] = []
    while len(left):
        # What does not fit now never will, as counts only grow: the next pass looks at the rest.
        label = f"Bounding, pass {len(passes) + 1}"
        left = _pass(offsets, members, left, counts, k, crowding, label=label, progress=progress)
        passes.append(left)
        if not duplicates:
            break
    return np.sort(np.concatenate(passes))


def _pass(
    offsets: Offsets,
    members: Users,
    order: Rows,
    counts: npt.NDArray[np.int64],
    k: int,
    crowding: _Crowding | None,
    *,
    label: str,
    progress: bool,
) -> Rows:
    """The examples of ``order`` that are kept one after another; ``counts`` grows with them."""
    kept = []
    with tqdm(total=len(order), desc=label, unit="example", delay=2, disable=not progress) as bar:
        for begin in range(0, len(order), _CHUNK):
            rows = order[begin : begin + _CHUNK]
            bar.update(len(rows))
            begins, users = gather(offsets, members, rows)
            rows = rows[~any_in_row(counts[users] >= k, begins)]
            if not len(rows):
                continue
            begins, users = gather(offsets, members, rows)
            distinct, local = np.unique(users, return_inverse=True)
            before = counts[distinct]
            if crowding is None:
                # Users who stay within k even if the whole chunk were kept decide nothing.
                scarce = before + np.bincount(local) > k
                undecided = any_in_row(scarce[local], begins)
            else:
                undecided = np.ones(len(rows), dtype=bool)
            keep = ~undecided
            keep[undecided] = _one_by_one(
                np.flatnonzero(undecided), begins, local, before.tolist(), k, crowding, distinct
            )
            counts[distinct] += np.bincount(
                local[np.repeat(keep, np.diff(begins))], minlength=len(distinct)
            )
            kept.append(rows[keep])
    return np.concatenate(kept) if kept else order[:0]


def _one_by_one(
    chosen: Rows,
    offsets: npt.NDArray[np.int64],
    local: npt.NDArray[np.int64],
    counts: list[int],
    k: int,
    crowding: _Crowding | None,
    distinct: npt.NDArray[np.int32],
) -> list[bool]:
    """Decide the ``chosen`` rows of a chunk in order, from its users' ``counts`` (changed)."""
    users = local.tolist()
    names = distinct.tolist()
    keep = []
    for begin, end in zip(offsets[chosen].tolist(), offsets[chosen + 1].tolist(), strict=True):
        row = users[begin:end]
        fits = all(counts[user] < k for user in row)
        if fits and crowding is not None:
            fits = crowding.admit([names[user] for user in row])
        if fits:
            for user in row:
                counts[user] += 1
        keep.append(fits)
    return keep


class _Crowding:
    """|N(e)| of every kept copy, and the kept copies of every user as chains in flat arrays.

    Python lists of lists would take ten times the memory.
    """

    def __init__(self, users: int, most: int) -> None:
        self._most = most
        self._sizes = array("q")
        self._last = array("q", bytes(8 * users))  # 1 + the user's newest link; 0: none
        self._copy = array("q")
        self._older = array("q")

    def admit(self, users: Sequence[int]) -> bool:
        """Keep one more copy with these users, if its and its neighbors' |N| stay in bounds."""
        neighbors: set[int] = set()
        for user in users:
            link = self._last[user]
            while link:
                neighbors.add(self._copy[link - 1])
                if len(neighbors) >= self._most:
                    return False
                link = self._older[link - 1]
        if any(self._sizes[copy] >= self._most for copy in neighbors):
            return False
        for copy in neighbors:
            self._sizes[copy] += 1
        for user in users:
            self._copy.append(len(self._sizes))
            self._older.append(self._last[user])
            self._last[user] = len(self._copy)
        self._sizes.append(len(neighbors) + 1)
        return True
