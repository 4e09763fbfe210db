"""Neighborhoods of examples: who else is barred when an example is sampled."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from tqdm.auto import tqdm

from dptrain.core import checks
from dptrain.sampling.users.graph_edges import Offsets, Users, spans

# (example, neighbor) pairs looked at in one go, each pair counted once per shared user.
_PAIRS = 1 << 22


def reverse(offsets: Offsets, members: Users, users: int) -> tuple[Offsets, npt.NDArray[np.int64]]:
    """Users to examples: where each user's examples begin, and the examples, ascending for each."""
    # csr to csc is one counting sort, linear in the edges; sorting them is three times slower.
    columns = _incidence(offsets, members, users).tocsc()
    return columns.indptr.astype(np.int64), columns.indices.astype(np.int64)


def neighborhood_sizes(
    offsets: Offsets, members: Users, users: int, *, progress: bool = True
) -> npt.NDArray[np.int64]:
    """|N(e)| of every example: distinct examples that share a user with e, itself included.

    Time grows with the sum over edges (e, u) of the number of u's examples; memory does not.

    Args:
        offsets: where each example's users begin, shape (examples + 1,).
        members: the users, shape (edges,).
        users: their number.
        progress: whether a bar is shown when it takes over two seconds.

    Returns:
        Shape (examples,).
    """
    rows = _incidence(offsets, members, users)
    columns = rows.T.tocsr()
    work = np.concatenate(([0], np.cumsum(np.diff(columns.indptr)[members], dtype=np.int64)))
    sizes = np.empty(len(offsets) - 1, dtype=np.int64)
    with tqdm(
        desc="Neighborhoods", total=len(sizes), unit="example", delay=2, disable=not progress
    ) as bar:
        for begin, end in spans(work[offsets], _PAIRS):
            # Boolean sums are "or": no count can wrap round to a zero.
            sizes[begin:end] = np.diff((rows[begin:end] @ columns).indptr)
            bar.update(end - begin)
    return sizes


def expected_batch_size(
    sizes: npt.NDArray[np.int64],
    *,
    probability: float,
    min_sep: int,
    counts: npt.NDArray[np.int64] | None = None,
) -> float:
    """Exact expected batch size of exclusion by sampled examples, from step b on.

    It is p·Σ_e (1-p)^((b-1)·|N(e)|): e is used if its own coin comes up and none of N(e) came up in
    the b-1 steps before (docs/theory/sampling.md#thm-user-burn-in). In the first b-1 steps there
    are fewer draws and larger batches.

    Args:
        sizes: |N(e)| of every example, or the different sizes with their ``counts``.
        probability: p in (0, 1].
        min_sep: b ≥ 1.
        counts: how many examples have each size; one each unless given.

    Raises:
        ValueError: if p or b is out of range.
    """
    p = checks.probability("probability", probability, owner="expected_batch_size")
    b = checks.integer("min_sep", min_sep, owner="expected_batch_size")
    if b == 1:
        kept = np.ones(len(sizes))
    else:
        log_miss = math.log1p(-p) if p < 1 else -math.inf
        kept = np.exp((b - 1) * log_miss * sizes)  # every size is at least 1
    return float(p * (kept.sum() if counts is None else np.dot(kept, counts)))


def _incidence(offsets: Offsets, members: Users, users: int) -> csr_array:
    return csr_array(
        (np.ones(len(members), dtype=bool), members, offsets), shape=(len(offsets) - 1, users)
    )
