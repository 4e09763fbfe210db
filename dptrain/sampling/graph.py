"""Attribution: which users each example belongs to, as public knowledge."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.registry import JsonValue
from dptrain.sampling import fields, graph_build
from dptrain.sampling.graph_build import Offsets, Users


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttributionGraph(JsonValue, family="attribution graph"):
    """The users of every example (multi-attribution, Ganesh et al. 2025), in compressed rows.

    Who belongs to which example is public in this model (fixed-graph adjacency): only the contents
    of a user's examples are protected. The value that schemes, accountants and checkpoints share
    holds a few facts and a fingerprint; the edges themselves stay out of its JSON. A graph read
    back from JSON is *detached*: accountants can use it, and :meth:`attach` gives it its edges.

    Build it with :meth:`from_lists`, :meth:`from_pairs`, :meth:`from_dataset` or :meth:`from_csr`.

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
        for name in ("examples", "users", "edges", "max_examples"):
            value = fields.integer("AttributionGraph", name, getattr(self, name))
            object.__setattr__(self, name, value)
        if not isinstance(self.fingerprint, str):
            raise ValueError(f"AttributionGraph: fingerprint={self.fingerprint!r} must be text")

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
        return cls._of(*graph_build.edges_from_csr(offsets, members))

    @classmethod
    def from_lists(cls, column: Iterable[Iterable[Hashable]]) -> Self:
        """The graph of a column of user lists, one list an example; users are any hashable ids."""
        return cls._of(*graph_build.edges_from_lists(column))

    @classmethod
    def from_pairs(
        cls, examples: Sequence[int], users: Sequence[Hashable], *, dataset_size: int | None = None
    ) -> Self:
        """The graph of (example number, user id) pairs, in any order."""
        if dataset_size is not None:
            dataset_size = fields.integer("AttributionGraph", "dataset_size", dataset_size)
        return cls._of(*graph_build.edges_from_pairs(examples, users, dataset_size))

    @classmethod
    def from_dataset(cls, dataset: Any, column: str) -> Self:
        """The graph of a ``datasets.Dataset`` (or any columns by name) and its list column."""
        return cls._of(*graph_build.edges_from_dataset(dataset, column))

    @classmethod
    def _of(cls, offsets: Offsets, members: Users) -> Self:
        """The graph of canonical edges, which it keeps and makes read-only."""
        offsets.setflags(write=False)
        members.setflags(write=False)
        per_user = np.bincount(members)
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
        """Whether the edges are here."""
        return hasattr(self, "_offsets")

    @property
    def offsets(self) -> Offsets:
        """Where each example's users begin, int64, shape (examples + 1,); read-only."""
        return self._edges()[0]

    @property
    def members(self) -> Users:
        """The users of example after example, int32, shape (edges,); read-only."""
        return self._edges()[1]

    def attach(self, graph: AttributionGraph) -> AttributionGraph:
        """``graph``, once it is seen to be the one that this value stands for.

        Raises:
            ValueError: if it has other edges.
        """
        if graph.fingerprint != self.fingerprint:
            raise ValueError(
                f"the attribution graph has changed: {graph.examples} examples, {graph.users} "
                f"users (fingerprint {graph.fingerprint[:12]}…) instead of {self.examples}, "
                f"{self.users} ({self.fingerprint[:12]}…); use the graph that the run began with"
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


def _fingerprint(offsets: Offsets, members: Users) -> str:
    sha = hashlib.sha256(f"{len(offsets)} {len(members)} ".encode())
    # Little-endian whatever the machine, so that a checkpoint moves between machines.
    sha.update(memoryview(offsets.astype("<i8", copy=False)))
    sha.update(memoryview(members.astype("<i4", copy=False)))
    return sha.hexdigest()
