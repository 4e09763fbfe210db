"""Pieces of a conflict graph that are small enough to lie in one part, with few conflicts between.

Two examples are in conflict if they share a user. Connected components have no conflicts between
them; those that are larger than a part are cut.
"""

from __future__ import annotations

import importlib.util
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components

from dptrain.sampling.users.graph_edges import Offsets

Rows = npt.NDArray[np.int64]
Method = Literal["metis", "greedy"]

METHODS: tuple[str, ...] = get_args(Method)

# Conflicting pairs that are held at a time: 2 GiB of them.
_MOST_PAIRS = 1 << 27
_METIS_SEED_BITS = 31


def default_method() -> Method:
    """METIS where ``pymetis`` is installed."""
    return "metis" if importlib.util.find_spec("pymetis") else "greedy"


def components(examples: int, offsets: Offsets, of_user: Rows) -> Rows:
    """The connected component of every example, numbered from 0, shape (examples,).

    Args:
        examples: N.
        offsets: where each user's examples begin in ``of_user``, shape (users + 1,).
        of_user: the examples of user after user.
    """
    # A path through each user's examples connects what the user connects.
    follows = np.ones(len(of_user), dtype=bool)
    follows[offsets[:-1]] = False
    at = np.flatnonzero(follows)
    links = (np.ones(len(at), dtype=np.int8), (of_user[at - 1], of_user[at]))
    graph = csr_array(coo_array(links, shape=(examples, examples)))
    _, label = connected_components(graph, directed=False)
    return label.astype(np.int64)


def conflicts(offsets: Offsets, of_user: Rows, users: Rows | None = None) -> tuple[Rows, Rows]:
    """The pairs of examples that share a user, once for every user they share.

    Args:
        offsets, of_user: as for ``components``.
        users: whose pairs; all of them unless given.
    """
    chosen = np.arange(len(offsets) - 1) if users is None else users
    counts = np.diff(offsets)[chosen]
    total = int((counts * (counts - 1) // 2).sum())
    if total > _MOST_PAIRS:
        raise ValueError(
            f"the examples of this graph share users in {total:.3g} pairs, more than "
            f"{_MOST_PAIRS:.3g} (one user has {int(counts.max())} examples): bound() the graph "
            "first"
        )
    left, right = [], []
    for count in np.unique(counts[counts > 1]).tolist():
        first = offsets[:-1][chosen[counts == count]]
        i, j = np.triu_indices(count, k=1)
        left.append(of_user[(first[:, None] + i).ravel()])
        right.append(of_user[(first[:, None] + j).ravel()])
    if not left:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    return np.concatenate(left), np.concatenate(right)


def cut_up(
    label: Rows, offsets: Offsets, of_user: Rows, *, largest: int, method: Method, seed: int
) -> Rows:
    """Pieces of at most about ``largest`` examples: components, cut where they are larger.

    Args:
        label: the component of every example, from ``components``.
        offsets, of_user: as there.
        largest: most examples of a piece, ≥ 1; METIS may go a few percent beyond.
        method: ``"metis"`` cuts few conflicts (Karypis & Kumar 1998); ``"greedy"`` cuts a
            breadth-first order into stretches.
        seed: of METIS.

    Returns:
        The piece of every example, numbered from 0 without gaps.
    """
    sizes = np.bincount(label)
    large = np.flatnonzero(sizes > largest)
    if not len(large):
        return label
    piece, following = label.copy(), len(sizes)
    owner = label[of_user[offsets[:-1]]]  # of each user
    order = np.argsort(label, kind="stable")
    begins = np.concatenate(([0], np.cumsum(sizes)))
    for each in large.tolist():
        members = order[begins[each] : begins[each + 1]]
        left, right = conflicts(offsets, of_user, np.flatnonzero(owner == each))
        left, right = np.searchsorted(members, left), np.searchsorted(members, right)
        ends = (np.concatenate((left, right)), np.concatenate((right, left)))
        ones = np.ones(len(ends[0]), dtype=np.int32)
        graph = csr_array(coo_array((ones, ends), shape=(len(members), len(members))))
        number = -(-len(members) // largest)
        cut = _metis(graph, number, seed) if method == "metis" else _stretches(graph, number)
        piece[members] = following + cut
        following += number
    return np.unique(piece, return_inverse=True)[1].astype(np.int64)


def _metis(graph: csr_array, number: int, seed: int) -> Rows:
    try:
        import pymetis
    except ModuleNotFoundError as error:
        raise ValueError(
            "method='metis' needs pymetis: install dptrain[users], or use method='greedy', which "
            "cuts more conflicts"
        ) from error
    options = pymetis.Options(seed=seed % (1 << _METIS_SEED_BITS), ufactor=10)
    weights = np.minimum(graph.data, np.iinfo(np.int32).max)  # users that a pair shares
    _, membership = pymetis.part_graph(
        number,
        adjacency=pymetis.CSRAdjacency(graph.indptr, graph.indices),
        eweights=weights,
        options=options,
        recursive=number <= 8,
    )
    return np.asarray(membership, dtype=np.int64)


def _stretches(graph: csr_array, number: int) -> Rows:
    order = breadth_first_order(graph, 0, directed=False, return_predecessors=False)
    cut = np.empty(graph.shape[0], dtype=np.int64)
    cut[order] = np.arange(len(order)) * number // len(order)
    return cut
