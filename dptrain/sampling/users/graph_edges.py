"""Edges of an attribution graph in compressed rows, and what is done to rows in bulk.

Edges are (offsets int64, members int32) in canonical form: users numbered 0..m-1, an example's
users ascending and distinct. Work is cut into chunks, so that what is held beside the result does
not grow with the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Users = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]
Edges = tuple[Offsets, Users]

# Edges sorted or copied at a time.
CHUNK = 1 << 20
MOST_USERS = int(np.iinfo(np.int32).max)


def edges_from_csr(offsets: npt.ArrayLike, members: npt.ArrayLike) -> Edges:
    """Checked copies of compressed rows, the users of each example in ascending order."""
    starts, users = np.asarray(offsets), np.asarray(members)
    for name, row in (("offsets", starts), ("members", users)):
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise ValueError(
                f"{name} has type {row.dtype} and shape {row.shape}: must be a one-dimensional "
                "array of integers"
            )
    if len(starts) < 2:
        raise ValueError("offsets has fewer than two entries, so the graph has no example")
    starts = starts.astype(np.int64)
    sizes = np.diff(starts)
    if starts[0] != 0 or starts[-1] != len(users) or (sizes < 0).any():
        raise ValueError(
            f"offsets from {starts[0]} to {starts[-1]} must ascend from 0 to the number of "
            f"members, {len(users)}"
        )
    _refuse_empty(sizes)
    low, high = int(users.min()), int(users.max())
    if low < 0 or high > len(users):
        raise ValueError(
            f"members hold a user number that is {'negative' if low < 0 else 'too large'}: number "
            f"the users 0, 1, … without gaps ({len(users)} members are given)"
        )
    used = count_users(users, high + 1)
    if not used.all():
        raise ValueError(
            f"user {int(np.argmin(used))} has no example ({int((used == 0).sum())} of {len(used)} "
            "users have none): number only the users with examples 0, 1, … without gaps"
        )
    sorted_users = users.astype(np.int32)
    repeated = _sort_rows(starts, sorted_users)
    if repeated is not None:
        example = int(np.searchsorted(starts, int(np.flatnonzero(repeated)[0]), side="right")) - 1
        raise ValueError(f"example {example} lists a user twice: list each of its users once")
    return starts, sorted_users


def _refuse_empty(sizes: Offsets) -> None:
    if len(sizes) == 0:
        raise ValueError("there is no example: an attribution graph needs one")
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        raise ValueError(
            f"example {int(empty[0])} has no user ({len(empty)} of {len(sizes)} examples have "
            "none): remove them, or give each a user of its own"
        )


def assembled(lengths: Sequence[Offsets], parts: Sequence[npt.NDArray[Any]], users: int) -> Edges:
    """Canonical edges of parts in order: rows sorted, repeated users of an example collapsed."""
    sizes = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
    _refuse_empty(sizes)
    if users > MOST_USERS:
        raise ValueError(f"{users} users: at most {MOST_USERS} are supported")
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    members = np.concatenate(parts, dtype=np.int32)
    repeated = _sort_rows(offsets, members)
    if repeated is None:
        return offsets, members
    sizes -= np.add.reduceat(repeated, offsets[:-1], dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets, members[~repeated]


def _sort_rows(offsets: Offsets, members: Users) -> npt.NDArray[np.bool_] | None:
    """Sort the users of every example in place; a mask of those that repeat the one before."""
    repeated = None
    users = int(members.max()) + 1
    for begin, end in spans(offsets, CHUNK):
        low, high = offsets[begin], offsets[end]
        sizes = np.diff(offsets[begin : end + 1])
        keys = np.repeat(np.arange(end - begin) * users, sizes) + members[low:high]
        keys.sort()
        members[low:high] = keys % users
        same = keys[1:] == keys[:-1]
        if same.any():
            if repeated is None:
                repeated = np.zeros(len(members), dtype=bool)
            repeated[low + 1 : high] = same
    return repeated


def spans(offsets: Offsets, most: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of rows that hold at most ``most`` entries, or a single row."""
    begin, rows = 0, len(offsets) - 1
    while begin < rows:
        end = int(np.searchsorted(offsets, offsets[begin] + most, side="right")) - 1
        end = min(max(end, begin + 1), rows)
        yield begin, end
        begin = end


def gather(offsets: Offsets, members: Users, rows: npt.NDArray[np.int64]) -> Edges:
    """The edges of ``rows`` in their order, which may repeat; users keep their numbers."""
    starts = offsets[rows]
    taken = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(offsets[rows + 1] - starts, out=taken[1:])
    users = np.empty(int(taken[-1]), dtype=np.int32)
    for begin, end in spans(taken, CHUNK):
        low, high = taken[begin], taken[end]
        shift = np.repeat(starts[begin:end] - taken[begin:end], np.diff(taken[begin : end + 1]))
        users[low:high] = members[shift + np.arange(low, high)]
    return taken, users


def count_users(members: npt.NDArray[Any], users: int) -> npt.NDArray[np.int64]:
    """Number of examples of each user, shape (users,)."""
    counts = np.zeros(users, dtype=np.int64)
    # bincount makes an int64 copy of what it is given.
    for begin in range(0, len(members), CHUNK):
        part = members[begin : begin + CHUNK].astype(np.int64, copy=False)
        counts += np.bincount(part, minlength=users)
    return counts


def any_in_row(flags: npt.NDArray[np.bool_], offsets: Offsets) -> npt.NDArray[np.bool_]:
    """For each row, True if any of its entries is set; rows are not empty."""
    return np.logical_or.reduceat(flags, offsets[:-1])
