"""Facts of one user in the public graph: its examples, who is near them, and who is like it."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from dptrain.core import Array
from dptrain.sampling import AttributionGraph, UserCyclic, UserMinSep

Rows = npt.NDArray[np.int64]

_MOST_TWINS = 4096  # of one stream
_LOOKED_AT = 1 << 16  # candidates
_AT_ONCE = 1 << 10  # users whose neighbors are counted in one product


@dataclasses.dataclass(frozen=True, eq=False)
class Members:
    """A user of a public graph, by its number.

    Attributes:
        examples: D_u, ascending.
        groups: the examples outside D_u that share a user with one of D_u, by which of D_u these
            are: the positions in ``examples``, ascending, and the outside examples.
    """

    user: int
    examples: Rows
    groups: tuple[tuple[tuple[int, ...], Rows], ...]

    @property
    def neighbors(self) -> int:
        """d, the number of outside examples."""
        return sum(len(rows) for _, rows in self.groups)


class Lookup:
    """The examples of each user in a graph with its edges, and the users of each example."""

    def __init__(self, graph: AttributionGraph) -> None:
        self.graph = graph
        self._by_user, self._examples = graph.by_user()

    def examples(self, user: int) -> Rows:
        """D_u, ascending."""
        return self._examples[self._by_user[user] : self._by_user[user + 1]]

    def near(self, example: int) -> Rows:
        """N(e), e itself included, ascending."""
        graph = self.graph
        users = graph.members[graph.offsets[example] : graph.offsets[example + 1]]
        return np.unique(np.concatenate([self.examples(int(user)) for user in users]))

    def outside(self, users: Rows) -> Rows:
        """d of each user: others that share a user with one of its examples; shape (users,)."""
        graph = self.graph
        if graph.is_disjoint:
            return np.zeros(len(users), dtype=np.int64)
        ones = np.ones(graph.edges, dtype=bool)
        rows = csr_array((ones, graph.members, graph.offsets), shape=(graph.examples, graph.users))
        columns = csr_array(rows.T)
        found = [np.zeros(0, dtype=np.int64)]
        for start in range(0, len(users), _AT_ONCE):
            some = users[start : start + _AT_ONCE]
            reached = (columns[some] @ rows) @ columns  # sums of booleans are "or"
            found.append(np.diff(reached.indptr) - np.diff(columns.indptr)[some])
        return np.concatenate(found).astype(np.int64)

    def members(self, user: int) -> Members:
        """The user, with the examples that are near its own."""
        mine = self.examples(user)
        beside: dict[int, list[int]] = {}
        for place, example in enumerate(mine.tolist()):
            for other in np.setdiff1d(self.near(example), mine).tolist():
                beside.setdefault(other, []).append(place)
        groups: dict[tuple[int, ...], list[int]] = {}
        for other, places in sorted(beside.items()):
            groups.setdefault(tuple(places), []).append(other)
        return Members(
            user,
            mine,
            tuple((places, np.array(rows, dtype=np.int64)) for places, rows in groups.items()),
        )


def exposure(scheme: UserCyclic | UserMinSep) -> Array:
    """A measure of each user's likely privacy loss, up to the order; shape (users,).

    ``UserCyclic``: the mean square of its participations, added up over all steps; 0 if none of its
    examples is ever drawn. ``UserMinSep``: the number of its examples.
    """
    graph = scheme.graph
    if not isinstance(scheme, UserCyclic):
        return graph.examples_per_user().astype(np.float64)
    slots = np.asarray(scheme.partition.slots, dtype=np.int64)
    chances = np.array([scheme.probability(max(1, size)) for size in scheme.partition.sizes])
    turns = -(-(scheme.steps - np.arange(scheme.cycle)) // scheme.cycle)
    owners = graph.members.astype(np.int64)
    places = np.repeat(slots, np.diff(graph.offsets))
    drawn = places >= 0
    cells, counts = np.unique(owners[drawn] * scheme.cycle + places[drawn], return_counts=True)
    q, k = chances[cells % scheme.cycle], counts.astype(np.float64)
    squares = np.maximum(turns, 0)[cells % scheme.cycle] * (k * q * (1 - q) + (k * q) ** 2)
    users = cells // scheme.cycle
    return np.bincount(users, weights=squares, minlength=graph.users).astype(np.float64)


def most_exposed(scheme: UserCyclic | UserMinSep, lookup: Lookup) -> int:
    """A user who is likely to lose most: the audit's choice where none is named.

    Where neighbors are barred, of those with most examples the one with most neighbors outside.
    """
    found = exposure(scheme)
    if isinstance(scheme, UserCyclic) or scheme.graph.is_disjoint or scheme.min_sep == 1:
        return int(np.argmax(found))
    largest = np.flatnonzero(found == found.max())[:_LOOKED_AT]
    return int(largest[np.argmax(lookup.outside(largest))])


def apart(scheme: UserCyclic | UserMinSep, lookup: Lookup, most: int) -> list[int]:
    """Users no two of whom share an example, the most exposed first, and at most so many.

    All of them may be drawn, and nobody else's batches depend on their coins: where neighbors are
    barred, they have none outside.
    """
    exposed = exposure(scheme)
    candidates = np.argsort(-exposed, kind="stable")[: np.count_nonzero(exposed)]
    if isinstance(scheme, UserMinSep) and scheme.min_sep > 1 and not scheme.graph.is_disjoint:
        candidates = candidates[:_LOOKED_AT]
        candidates = candidates[lookup.outside(candidates) == 0]
    used = np.zeros(scheme.graph.examples, dtype=bool)
    found: list[int] = []
    for candidate in candidates.tolist():
        if len(found) == most:
            break
        rows = lookup.examples(candidate)
        if not used[rows].any():
            used[rows] = True
            found.append(candidate)
    return found


def twins(scheme: UserCyclic | UserMinSep, lookup: Lookup, user: int) -> list[Rows]:
    """Examples of ``user``, and sets of others whose numbers in batches are as many further draws.

    For users whose coins nobody else's batches depend on. Where nobody is barred every example has
    a coin of its own: any others, as many in the same slots, have the same law, and those of users
    like this one come first. Where neighbors are barred they are users of as many examples without
    neighbors outside.
    """
    graph, mine = scheme.graph, lookup.examples(user)
    candidates = np.flatnonzero(graph.examples_per_user() == len(mine))[:_LOOKED_AT]
    slots = np.zeros(graph.examples, dtype=np.int64)
    if isinstance(scheme, UserCyclic):
        slots = np.asarray(scheme.partition.slots, dtype=np.int64)
    barring = isinstance(scheme, UserMinSep) and scheme.min_sep > 1
    if barring:
        candidates = candidates[lookup.outside(candidates) == 0]
    used = np.zeros(graph.examples, dtype=bool)
    used[mine] = True
    found = [mine]
    for candidate in candidates.tolist():
        rows = lookup.examples(candidate)
        if used[rows].any() or len(found) == _MOST_TWINS:
            continue
        if not np.array_equal(np.sort(slots[rows]), np.sort(slots[mine])):
            continue
        used[rows] = True
        found.append(rows)
    if barring:
        return found
    wanted, counts = np.unique(slots[mine], return_counts=True)
    parts = []
    for slot, k in zip(wanted, counts, strict=True):
        free = np.flatnonzero(~used & (slots == slot))
        parts.append(free[: len(free) // k * k].reshape(-1, k))
    more = min(_MOST_TWINS - len(found), *(len(part) for part in parts))
    return found + [np.concatenate([part[row] for part in parts]) for row in range(more)]


def crowd(lookup: Lookup, members: Members) -> list[Members]:
    """The user, and one of every other connected component who has as many neighbors, as near.

    Batches in different components are independent. The users need not have one law: each of them
    is to have what is stated, and both worlds look at the same ones.
    """
    graph = lookup.graph
    _, component = connected_components(_bipartite(graph), directed=False)
    shape = _shape(members)
    found, seen = [members], {int(component[members.examples[0]])}
    alike = np.flatnonzero(graph.examples_per_user() == len(members.examples))[:_LOOKED_AT]
    alike = alike[lookup.outside(alike) == members.neighbors]
    for candidate in alike.tolist():
        place = int(component[lookup.examples(candidate)[0]])
        if place in seen or len(found) == _MOST_TWINS:
            continue
        other = lookup.members(candidate)
        if _shape(other) == shape:
            seen.add(place)
            found.append(other)
    return found


def _shape(members: Members) -> list[tuple[tuple[int, ...], int]]:
    return [(places, len(rows)) for places, rows in members.groups]


def _bipartite(graph: AttributionGraph) -> csr_array:
    """The graph as a matrix whose vertices are the examples first, then the users."""
    vertices = graph.examples + graph.users
    offsets = np.concatenate([graph.offsets, np.full(graph.users, graph.edges)])
    ends = graph.members.astype(np.int64) + graph.examples
    return csr_array((np.ones(graph.edges, dtype=bool), ends, offsets), shape=(vertices, vertices))
