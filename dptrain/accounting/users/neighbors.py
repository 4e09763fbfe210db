"""Facts that the simulating user-level accountants read from an attribution graph."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from tqdm import tqdm

from dptrain.sampling import AttributionGraph
from dptrain.sampling.users import spans

# Entries of a sparse product made in one go, each counted once for every path that leads to it.
_PATHS = 1 << 22


@dataclasses.dataclass(frozen=True)
class NeighborFacts:
    """Facts of a public graph.

    Attributes:
        examples: the different numbers of examples that users have, ascending.
        neighbors: the largest d of any user, see ``outside_neighbors``.
    """

    examples: tuple[int, ...]
    neighbors: int


@functools.lru_cache(maxsize=16)
def neighbor_facts(graph: AttributionGraph) -> NeighborFacts:
    """The facts of an attached graph; graphs of equal fingerprint and facts are read once.

    Raises:
        ValueError: if the graph holds no edges.
    """
    counts = np.unique(graph.examples_per_user())
    most = 0 if graph.is_disjoint else int(outside_neighbors(graph).max())
    return NeighborFacts(tuple(int(k) for k in counts), most)


def paths_to_neighbors(graph: AttributionGraph) -> int:
    """Steps that ``outside_neighbors`` takes: user, example, user, example; 0 if disjoint."""
    if graph.is_disjoint:
        return 0
    own = graph.examples_per_user().astype(np.float64)
    near = np.add.reduceat(own[graph.members], graph.offsets[:-1])
    return int(np.repeat(near, np.diff(graph.offsets)).sum())


def outside_neighbors(graph: AttributionGraph) -> npt.NDArray[np.int64]:
    """d of every user u: examples not u's that share a user with an example of u; shape (users,).

    Boolean products of the incidence matrix A (examples by users), users in chunks: row u of
    AᵀA holds the users who share an example with u, times Aᵀ all their examples, which are
    those of u and the ones asked for.
    """
    rows = csr_array(
        (np.ones(len(graph.members), dtype=bool), graph.members, graph.offsets),
        shape=(graph.examples, graph.users),
    )
    columns = csr_array(rows.T)
    own = np.diff(columns.indptr).astype(np.int64)
    near = rows @ own  # paths from an example to examples
    work = np.concatenate(([0], np.cumsum(columns @ near + 1, dtype=np.int64)))
    found = np.empty(graph.users, dtype=np.int64)
    with tqdm(
        desc="Outside neighbors", total=graph.users, unit="user", delay=2, leave=False
    ) as bar:
        for begin, end in spans(work, _PATHS):
            # Boolean sums are "or": no count can wrap round to a zero.
            reached = (columns[begin:end] @ rows) @ columns
            found[begin:end] = np.diff(reached.indptr) - own[begin:end]
            bar.update(end - begin)
    return found
