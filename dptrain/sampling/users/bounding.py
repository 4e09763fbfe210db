"""Contribution bounding: the examples to train on so that no user has more than k of them."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, Subset
from tqdm.auto import tqdm

from dptrain.core import checks
from dptrain.sampling.users.graph_edges import any_in_row, gather

if TYPE_CHECKING:
    from dptrain.sampling.users.graph import AttributionGraph
    from dptrain.sampling.users.graph_statistics import GraphStatistics

Rows = npt.NDArray[np.int64]

# Keeps the order of the examples apart from anything else that is derived from an equal seed.
_DOMAIN = 0x626F756E64
# Examples decided at a time.
_CHUNK = 1 << 15


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BoundedGraph:
    """What ``AttributionGraph.bound`` kept.

    Args:
        rows: positions in the original data set, ascending, int64; an example that is kept c times
            stands c times in a row.
        graph: the graph of these rows, example i being row ``rows[i]``; users are renumbered in
            ascending order, those without an example dropped.
        source: the graph that was bounded.
        k: the bound on the examples of a user.
        duplicates: whether copies were added.
        max_neighbours: the bound on |N(e)|, or ``None``.
        seed: of the random order.
    """

    rows: Rows
    graph: AttributionGraph
    source: AttributionGraph
    k: int
    duplicates: bool
    max_neighbours: int | None
    seed: int

    def subset(self, dataset: Any) -> Any:
        """The rows of ``dataset``: ``dataset.select`` of a ``datasets.Dataset``, else a ``Subset``.

        Raises:
            ValueError: if the data set is not as long as the graph that was bounded.
        """
        if len(dataset) != self.source.examples:
            raise ValueError(
                f"the data set has {len(dataset)} examples and the attribution graph "
                f"{self.source.examples}: pass the data set that the graph was built from"
            )
        # A datasets.Dataset brings its own: it stays a table that arrow reads in bulk.
        if not isinstance(dataset, Dataset) and hasattr(dataset, "select"):
            return dataset.select(self.rows)
        return Subset(dataset, self.rows.tolist())

    def statistics(self, *, progress: bool = True) -> GraphStatistics:
        """What was kept, the distributions before and after, and the batch sizes to expect."""
        from dptrain.sampling.users.graph_statistics import statistics

        return statistics(self, progress=progress)


def bound(
    graph: AttributionGraph,
    k: int,
    *,
    duplicates: bool = False,
    max_neighbours: int | None = None,
    seed: int,
    progress: bool = True,
) -> BoundedGraph:
    """Keep examples greedily in a uniformly random order, none that takes a user above ``k``.

    Dong & Ganesh 2026, §7.3 and App. C, after Ganesh et al. 2025 (arXiv 2503.03622). The result
    depends on the graph and the seed only, which are public in this model, never on contents.
    It is maximal: no other example (no other copy, with ``duplicates``) fits under the bounds.

    Args:
        graph: who owns which example; attached.
        k: most examples of a user in the result, copies counted; at least 1.
        duplicates: go through the data again and again, in the same order, each time adding one
            more copy of every example all of whose users are still below k, until nothing fits.
        max_neighbours: k_e, most |N(e)| of any kept example e, copies counted and e included: an
            example is left out if it or one already kept would get more.
        seed: non-negative; it need not be secret.
        progress: whether a bar is shown when it takes over two seconds.

    Raises:
        ValueError: if a bound is below 1 or no integer, or the graph has no edges here.
    """
    k = checks.integer("k", k, owner="bound")
    seed = checks.integer("seed", seed, minimum=0, owner="bound")
    checks.flag("duplicates", duplicates, owner="bound")
    crowding = None
    if max_neighbours is not None:
        max_neighbours = checks.integer("max_neighbours", max_neighbours, owner="bound")
        crowding = _Crowding(graph.users, max_neighbours)
    counts = np.zeros(graph.users, dtype=np.int64)
    sequence = np.random.SeedSequence(seed, spawn_key=(_DOMAIN,))
    left = np.random.Generator(np.random.PCG64DXSM(sequence)).permutation(graph.examples)
    passes: list[Rows] = []
    while len(left):
        # What does not fit now never will, as counts only grow: the next pass looks at the rest.
        label = f"Bounding, pass {len(passes) + 1}"
        left = _pass(graph, left, counts, k, crowding, label=label, progress=progress)
        passes.append(left)
        if not duplicates:
            break
    rows = np.sort(np.concatenate(passes))
    return BoundedGraph(
        rows=rows,
        graph=graph.select(rows),
        source=graph,
        k=k,
        duplicates=duplicates,
        max_neighbours=max_neighbours,
        seed=seed,
    )


def _pass(
    graph: AttributionGraph,
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
            offsets, users = gather(graph.offsets, graph.members, rows)
            rows = rows[~any_in_row(counts[users] >= k, offsets)]
            if not len(rows):
                continue
            offsets, users = gather(graph.offsets, graph.members, rows)
            distinct, local = np.unique(users, return_inverse=True)
            before = counts[distinct]
            if crowding is None:
                # Users who stay within k even if the whole chunk were kept decide nothing.
                scarce = before + np.bincount(local) > k
                undecided = any_in_row(scarce[local], offsets)
            else:
                undecided = np.ones(len(rows), dtype=bool)
            keep = ~undecided
            keep[undecided] = _one_by_one(
                np.flatnonzero(undecided), offsets, local, before.tolist(), k, crowding, distinct
            )
            counts[distinct] += np.bincount(
                local[np.repeat(keep, np.diff(offsets))], minlength=len(distinct)
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
        """Keep one more copy with these users, if its and its neighbours' |N| stay in bounds."""
        neighbours: set[int] = set()
        for user in users:
            link = self._last[user]
            while link:
                neighbours.add(self._copy[link - 1])
                if len(neighbours) >= self._most:
                    return False
                link = self._older[link - 1]
        if any(self._sizes[copy] >= self._most for copy in neighbours):
            return False
        for copy in neighbours:
            self._sizes[copy] += 1
        for user in users:
            self._copy.append(len(self._sizes))
            self._older.append(self._last[user])
            self._last[user] = len(self._copy)
        self._sizes.append(len(neighbours) + 1)
        return True
