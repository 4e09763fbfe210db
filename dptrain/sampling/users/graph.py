"""Attribution: which users each example belongs to, as public knowledge."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, Subset

from dptrain.core import JsonValue, checks
from dptrain.sampling import fields
from dptrain.sampling.users import neighbors
from dptrain.sampling.users.bounding import bounded_rows
from dptrain.sampling.users.graph_edges import Offsets, Users, count_users, edges_from_csr, gather
from dptrain.sampling.users.graph_sources import (
    edges_from_dataset,
    edges_from_lists,
    edges_from_pairs,
)
from dptrain.sampling.users.graph_statistics import Distribution, GraphStatistics


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttributionGraph(JsonValue, family="attribution graph"):
    """The users of every example, in compressed rows: any number of users an example.

    This is the multi-attribution model of Ganesh et al. 2025 (arXiv 2503.03622). Who belongs to
    which example is public in this model (fixed-graph adjacency): only the contents of a user's
    examples are protected. The value that schemes, accountants and checkpoints share holds a few
    facts and a fingerprint; the edges themselves stay out of its JSON. A graph read back from JSON
    is *detached*: accountants can use it, and ``attach`` gives it its edges.

    Build it with ``from_lists``, ``from_pairs``, ``from_dataset`` or ``from_csr``.

    Args:
        examples: number of examples N ≥ 1.
        users: number of users ≥ 1.
        edges: number of (example, user) pairs.
        max_examples: k, the most examples that one user has.
        fingerprint: SHA-256 (hex) of the edges.
    """

    examples: int
    users: int
    edges: int
    max_examples: int
    fingerprint: str

    def __post_init__(self) -> None:
        fields.settle(self, integers=("examples", "users", "edges", "max_examples"))
        if not (
            max(self.examples, self.users) <= self.edges <= self.users * self.max_examples
            and self.max_examples <= self.examples
        ):
            raise ValueError(
                f"AttributionGraph: edges={self.edges} and max_examples={self.max_examples} are "
                f"impossible with {self.examples} examples and {self.users} users, each with at "
                "least one edge; build the graph from the data"
            )
        if not isinstance(self.fingerprint, str):
            raise ValueError(f"AttributionGraph: fingerprint={self.fingerprint!r} must be a string")

    @classmethod
    def from_csr(cls, offsets: npt.ArrayLike, members: npt.ArrayLike) -> Self:
        """The graph whose example e has the users ``members[offsets[e]:offsets[e + 1]]``.

        Args:
            offsets: shape (examples + 1,), not descending, from 0.
            members: shape (edges,), user numbers from 0 up, each used; none twice in an example.

        Raises:
            ValueError: if there is no example, an example has no user or one twice, or a user
                number below the largest has no example.
        """
        return cls._of(*edges_from_csr(offsets, members))

    @classmethod
    def from_lists(cls, column: Iterable[Iterable[Hashable]]) -> Self:
        """The graph of a column of user lists, one list an example, read once and in chunks.

        Users are numbered in order of first appearance, those of a set in ascending order; one
        named twice in an example counts once.

        Args:
            column: an iterable of iterables of ids that are hashable and equal for equal users:
                text, integers, tuples of them.

        Raises:
            ValueError: if the column is empty, an example has no user, or an id cannot be one.
        """
        return cls._of(*edges_from_lists(column))

    @classmethod
    def from_pairs(
        cls, examples: Sequence[int], users: Sequence[Hashable], *, dataset_size: int | None = None
    ) -> Self:
        """The graph of (example number, user id) pairs, in any order.

        Args:
            examples: example numbers from 0 up, shape (pairs,).
            users: integer ids, or any hashable ones as in ``from_lists``, shape (pairs,).
            dataset_size: number of examples; one more than the largest number unless given.

        Raises:
            ValueError: if the lengths differ, a number is out of range, or an example has no user.
        """
        if dataset_size is not None:
            dataset_size = checks.integer("dataset_size", dataset_size, owner="AttributionGraph")
        return cls._of(*edges_from_pairs(examples, users, dataset_size))

    @classmethod
    def from_dataset(cls, dataset: Any, column: str) -> Self:
        """The graph of the list column of a ``datasets.Dataset``, or of any columns by name.

        The ids of an arrow data set never become Python objects, also after ``select``, ``shuffle``
        or ``filter``. The graph is the one that ``from_lists`` builds from the same lists.

        Args:
            dataset: a ``datasets.Dataset``, or anything that gives lists as ``dataset[column]``.
            column: the name of a column of lists of text or integers.

        Raises:
            ValueError: if there is no such column, an example has no user, or an id cannot be one.
        """
        return cls._of(*edges_from_dataset(dataset, column))

    @classmethod
    def _of(cls, offsets: Offsets, members: Users) -> Self:
        """The graph of canonical edges, which it keeps and makes read-only."""
        offsets.setflags(write=False)
        members.setflags(write=False)
        per_user = count_users(members, int(members.max()) + 1)
        graph = cls(
            examples=len(offsets) - 1,
            users=len(per_user),
            edges=len(members),
            max_examples=int(per_user.max()),
            fingerprint=_fingerprint(offsets, members),
        )
        object.__setattr__(graph, "_offsets", offsets)
        object.__setattr__(graph, "_members", members)
        return graph

    @property
    def attached(self) -> bool:
        """True if this value holds the edges."""
        return hasattr(self, "_offsets")

    @property
    def offsets(self) -> Offsets:
        """Index at which each example's users begin, int64, shape (examples + 1,); read-only."""
        return self._edges()[0]

    @property
    def members(self) -> Users:
        """The users of example after example, int32, shape (edges,); read-only."""
        return self._edges()[1]

    @property
    def is_disjoint(self) -> bool:
        """True if every example has one user, as the theorems on single attribution need."""
        return self.edges == self.examples

    def users_per_example(self) -> Offsets:
        """Number of users of every example, shape (examples,)."""
        return np.diff(self.offsets)

    def examples_per_user(self) -> Offsets:
        """Number of examples of every user, shape (users,)."""
        return count_users(self.members, self.users)

    def by_user(self) -> tuple[Offsets, npt.NDArray[np.int64]]:
        """The same edges from users to examples, computed anew at each call.

        Returns:
            (offsets, examples): user u has the examples ``examples[offsets[u]:offsets[u + 1]]``,
            ascending; int64, shapes (users + 1,) and (edges,).
        """
        return neighbors.reverse(self.offsets, self.members, self.users)

    def neighborhood_sizes(self, *, progress: bool = True) -> Offsets:
        """|N(e)|, the number of examples sharing a user with e, itself included; (examples,)."""
        return neighbors.neighborhood_sizes(
            self.offsets, self.members, self.users, progress=progress
        )

    def select(self, rows: npt.ArrayLike) -> AttributionGraph:
        """The graph of the examples ``rows``, in that order; users keep theirs, renumbered.

        Args:
            rows: example numbers, which may repeat: each is an example of its own in the result.

        Raises:
            ValueError: if there is none, or a number is out of range.
        """
        at = np.asarray(rows)
        if at.ndim != 1 or at.size == 0 or at.dtype.kind not in "iu":
            raise ValueError(
                f"rows of type {at.dtype} and shape {at.shape}: give at least one example number"
            )
        low, high = int(at.min()), int(at.max())
        if low < 0 or high >= self.examples:
            raise ValueError(
                f"rows hold example {low if low < 0 else high}, out of range: the graph has "
                f"examples 0 to {self.examples - 1}"
            )
        offsets, members = gather(self.offsets, self.members, at.astype(np.int64))
        used = np.bincount(members, minlength=self.users) > 0
        number = np.cumsum(used, dtype=np.int32) - np.int32(1)
        return AttributionGraph._of(offsets, number[members])

    def bound(
        self,
        k: int,
        *,
        duplicates: bool = False,
        max_neighbors: int | None = None,
        seed: int,
        progress: bool = True,
    ) -> BoundedGraph:
        """Keep examples greedily in a uniformly random order, none that takes a user above ``k``.

        (Dong & Ganesh 2026, arXiv 2602.09338, section 7.3 and Appendix C, after Ganesh et al. 2025,
        arXiv 2503.03622.) The result depends on the graph and the seed only, which are public in
        this model, never on contents. It is maximal: no other example (no other copy, with
        ``duplicates``) fits under the bounds.

        Args:
            k: most examples of a user in the result, copies counted; at least 1.
            duplicates: go through the data again and again, in the same order, each time adding one
                more copy of every example all of whose users are still below k, until nothing fits.
            max_neighbors: k_e, most |N(e)| of any kept example e, copies counted and e included:
                an example is left out if it or one already kept would get more.
            seed: non-negative; it need not be secret.
            progress: whether a bar is shown when it takes over two seconds.

        Raises:
            TypeError, ValueError: if a bound is below 1 or no integer, or the graph is detached.
        """
        k = checks.integer("k", k, owner="bound")
        seed = checks.integer("seed", seed, minimum=0, owner="bound")
        checks.flag("duplicates", duplicates, owner="bound")
        if max_neighbors is not None:
            max_neighbors = checks.integer("max_neighbors", max_neighbors, owner="bound")
        rows = bounded_rows(
            self.offsets,
            self.members,
            users=self.users,
            k=k,
            duplicates=duplicates,
            max_neighbors=max_neighbors,
            seed=seed,
            progress=progress,
        )
        return BoundedGraph(
            rows=rows,
            graph=self.select(rows),
            source=self,
            k=k,
            duplicates=duplicates,
            max_neighbors=max_neighbors,
            seed=seed,
        )

    def attach(self, graph: AttributionGraph) -> AttributionGraph:
        """``graph``, once it is seen to be the one that this value stands for.

        Raises:
            TypeError: if it is no graph.
            ValueError: if it has other edges.
        """
        checks.instance("graph", graph, AttributionGraph, owner="attach")
        if graph != self:  # the facts too: accountants read them, and a file may lie
            raise ValueError(
                f"the attribution graph has changed: it has {graph.examples} examples and "
                f"{graph.users} users (fingerprint {graph.fingerprint[:12]}…) instead of "
                f"{self.examples} and {self.users} ({self.fingerprint[:12]}…). Use the graph that "
                "the run started with"
            )
        return graph

    def _edges(self) -> tuple[Offsets, Users]:
        if not self.attached:
            raise ValueError(
                "this attribution graph was read from a file and holds no edges: build the graph "
                "from the data again and pass it to attach()"
            )
        return self._offsets, self._members  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # immutable, and its arrays may be large


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BoundedGraph:
    """The result of ``AttributionGraph.bound``.

    Args:
        rows: positions in the original data set, ascending, int64; an example that is kept c times
            stands c times in a row.
        graph: the graph of these rows, example i being row ``rows[i]``; users are renumbered in
            ascending order, those without an example dropped.
        source: the graph that was bounded.
        k: the bound on the examples of a user.
        duplicates: whether copies were added.
        max_neighbors: the bound on |N(e)|, or ``None``.
        seed: of the random order.
    """

    rows: npt.NDArray[np.int64]
    graph: AttributionGraph
    source: AttributionGraph
    k: int
    duplicates: bool
    max_neighbors: int | None
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
        """Counts of what was kept, distributions before and after, and the batch sizes to expect.

        The neighborhoods take the time, with a progress bar.
        """
        source, graph = self.source, self.graph
        per_user = graph.examples_per_user()
        return GraphStatistics(
            k=self.k,
            max_neighbors=self.max_neighbors,
            examples_before=source.examples,
            users_before=source.users,
            examples=graph.examples,
            examples_distinct=1 + int(np.count_nonzero(np.diff(self.rows))),
            users=graph.users,
            users_at_bound=int(np.count_nonzero(per_user == self.k)),
            examples_per_user_before=Distribution.of(source.examples_per_user()),
            examples_per_user=Distribution.of(per_user),
            users_per_example_before=Distribution.of(source.users_per_example()),
            users_per_example=Distribution.of(graph.users_per_example()),
            neighbors=Distribution.of(graph.neighborhood_sizes(progress=progress)),
        )


def _fingerprint(offsets: Offsets, members: Users) -> str:
    sha = hashlib.sha256(f"{len(offsets)} {len(members)} ".encode())
    # Little-endian whatever the machine, so that a checkpoint moves between machines.
    sha.update(offsets.astype("<i8", copy=False).data)
    sha.update(members.astype("<i4", copy=False).data)
    return sha.hexdigest()
