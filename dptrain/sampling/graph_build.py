"""Edges of an attribution graph, from lists of users, pairs, arrow columns or rows of numbers.

Every function returns (offsets int64, members int32) in canonical form: users numbered 0..m-1, an
example's users ascending and distinct.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Users = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]
Edges = tuple[Offsets, Users]

# Examples read at a time, and edges sorted at a time: they bound what is held beside the result.
_EXAMPLES = 1 << 16
_EDGES = 1 << 20
_MOST_USERS = int(np.iinfo(np.int32).max)


class _Numbers(dict[Hashable, int]):
    """Numbers of user ids in order of first appearance: indexing with a new id gives it the next.

    An id that is not equal to itself, or equal to nothing but itself, would make one user many,
    and the guarantee of that user false; such ids are refused.
    """

    def __missing__(self, user: Any) -> int:
        if user is None:
            raise ValueError("a user id is None: leave unknown users out, or give each a name")
        if isinstance(user, torch.Tensor) or type(user).__hash__ is object.__hash__:
            raise ValueError(
                f"user id {user!r} of type {type(user).__name__} is equal to no other object, so "
                "that two examples could never share it; use text or integers"
            )
        if user != user:
            raise ValueError(f"user id {user!r} is not a number: leave unknown users out")
        number = self[user] = len(self)
        return number


def edges_from_lists(column: Iterable[Iterable[Hashable]]) -> Edges:
    """Edges of a column of user lists, which is read once, in chunks.

    Raises:
        ValueError: if the column is empty, an example has no user, or an id cannot be one.
    """
    if isinstance(column, str | bytes | Mapping):
        raise ValueError(f"column={type(column).__name__}: give an iterable with a list an example")
    numbers = _Numbers()
    lengths, parts, first = [], [], 0
    rows = iter(column)
    while chunk := [_row(i, row) for i, row in enumerate(itertools.islice(rows, _EXAMPLES), first)]:
        size = np.fromiter(map(len, chunk), dtype=np.int64, count=len(chunk))
        lengths.append(size)
        parts.append(_numbered(numbers, itertools.chain.from_iterable(chunk), int(size.sum())))
        first += len(chunk)
    return _assembled(lengths, parts, len(numbers))


def _row(example: int, row: Any) -> Sequence[Any]:
    """The users of one example as a sequence."""
    if isinstance(row, str | bytes):
        raise ValueError(
            f"example {example} has {row!r} for a list of users; put a single user into a list"
        )
    if hasattr(row, "tolist"):  # the elements of arrays and tensors, as Python values
        row = row.tolist()
    if isinstance(row, list | tuple):
        return row
    try:
        return tuple(row)
    except TypeError:
        raise ValueError(f"example {example} has {row!r} for a list of users") from None


def _numbered(numbers: _Numbers, users: Iterable[Any], count: int) -> Users:
    try:
        return np.fromiter(map(numbers.__getitem__, users), dtype=np.int32, count=count)
    except TypeError as error:
        raise ValueError(
            f"user ids must be hashable ({error}); use text, integers or tuples"
        ) from error


def edges_from_pairs(
    examples: Sequence[int] | npt.NDArray[Any],
    users: Sequence[Hashable] | npt.NDArray[Any],
    dataset_size: int | None,
) -> Edges:
    """Edges of (example number, user id) pairs in any order.

    Raises:
        ValueError: if the sequences differ in length, an example number is no integer or out of
            range, an example has no user, or an id cannot be one.
    """
    at = np.asarray(examples)
    if at.ndim != 1 or (at.size and at.dtype.kind not in "iu"):
        raise ValueError(
            f"examples of type {at.dtype} and shape {at.shape}: give one row of example numbers"
        )
    ids = np.asarray(users) if hasattr(users, "tolist") else users
    if isinstance(ids, np.ndarray) and ids.ndim != 1:
        raise ValueError(f"users of shape {ids.shape}: give one row of user ids")
    if len(at) != len(ids):
        raise ValueError(
            f"{len(at)} examples and {len(ids)} users: give both of every pair, in the same order"
        )
    if not len(at):
        raise ValueError("there are no pairs: an attribution graph needs an example")
    low, high = int(at.min()), int(at.max())
    size = high + 1 if dataset_size is None else dataset_size
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise ValueError(
            f"example number {wrong} is out of range: dataset_size={size}, numbered from 0"
        )
    lengths = np.bincount(at.astype(np.int64, copy=False), minlength=size)
    order = None if (at[1:] >= at[:-1]).all() else np.argsort(at, kind="stable")
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        members, n_users = _ranked(ids if order is None else ids[order])
    else:
        listed = ids.tolist() if isinstance(ids, np.ndarray) else ids
        in_order = listed if order is None else (listed[i] for i in order)
        numbers = _Numbers()
        members = _numbered(numbers, in_order, len(at))
        n_users = len(numbers)
    return _assembled([lengths], [members], n_users)


def _ranked(ids: npt.NDArray[Any]) -> tuple[Users, int]:
    """Integer ids as numbers in order of first appearance, and how many there are."""
    distinct, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    if len(distinct) > _MOST_USERS:
        raise ValueError(f"{len(distinct)} users: at most {_MOST_USERS} are supported")
    rank = np.empty(len(distinct), dtype=np.int32)
    rank[np.argsort(first)] = np.arange(len(distinct), dtype=np.int32)
    return rank[inverse], len(distinct)


def edges_from_dataset(dataset: Any, column: str) -> Edges:
    """Edges of the list column of a ``datasets.Dataset``, or of ``dataset[column]`` otherwise.

    A data set of arrow columns is read in batches through its indices mapping (after ``select`` or
    ``shuffle``), and its ids never become Python objects.
    """
    # Whoever passes a datasets.Dataset has imported the optional package already.
    package = sys.modules.get("datasets")
    if package is not None and isinstance(dataset, package.Dataset):
        if column not in dataset.column_names:
            raise ValueError(f"column={column!r} is not in the data set: {dataset.column_names}")
        return _edges_from_arrow(_arrow_columns(dataset, column), column)
    try:
        lists = dataset[column]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"column={column!r}: a {type(dataset).__name__} gives no such column ({error}); pass "
            "a datasets.Dataset (one split), a mapping of columns, or use from_lists"
        ) from error
    return edges_from_lists(lists)


def _arrow_columns(dataset: Any, column: str) -> Iterator[Any]:
    """The column as arrow arrays, batch after batch."""
    batches = dataset.select_columns([column]).with_format("arrow").iter(batch_size=_EXAMPLES)
    for table in batches:
        yield from table.column(column).chunks


def _edges_from_arrow(arrays: Iterable[Any], column: str) -> Edges:
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths, values, first = [], [], 0
    for lists in arrays:
        kind = lists.type
        if not (
            pa.types.is_list(kind)
            or pa.types.is_large_list(kind)
            or pa.types.is_fixed_size_list(kind)
        ):
            raise ValueError(f"column={column!r} holds {kind}, not lists of users")
        size = pc.list_value_length(lists).fill_null(0)
        lengths.append(size.to_numpy(zero_copy_only=False).astype(np.int64))
        flat = lists.flatten()  # without the lists that are null
        if flat.null_count:
            row = np.searchsorted(
                np.cumsum(lengths[-1]),
                int(np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False))[0]),
                side="right",
            )
            raise ValueError(
                f"example {first + int(row)} has a null user id: leave unknown users out"
            )
        if pa.types.is_nested(flat.type) or pa.types.is_floating(flat.type):
            raise ValueError(
                f"column={column!r} holds user ids of type {flat.type}; map them to text or "
                "integers first"
            )
        if pa.types.is_dictionary(flat.type):
            flat = flat.dictionary_decode()
        values.append(flat)
        first += len(lists)
    if not values:
        raise ValueError("there is no example: an attribution graph needs one")
    # One table of ids over all batches, numbered by first appearance.
    encoded = pa.chunked_array(values).dictionary_encode()
    n_users = max((len(chunk.dictionary) for chunk in encoded.chunks), default=0)
    parts = [chunk.indices.to_numpy(zero_copy_only=False) for chunk in encoded.chunks]
    return _assembled(lengths, parts, n_users)


def edges_from_csr(offsets: npt.ArrayLike, members: npt.ArrayLike) -> Edges:
    """Checked copies of compressed rows, the users of each example in ascending order."""
    starts, users = np.asarray(offsets), np.asarray(members)
    for name, row in (("offsets", starts), ("members", users)):
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise ValueError(
                f"{name} of type {row.dtype} and shape {row.shape}: give one row of integers"
            )
    if len(starts) < 2:
        raise ValueError(f"offsets={starts.tolist()}: there is no example in the graph")
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
            f"members hold user number {low if low < 0 else high}: number the users 0, 1, … "
            f"without gaps ({len(users)} members are given)"
        )
    used = np.bincount(users.astype(np.int64, copy=False))
    if not used.all():
        raise ValueError(
            f"user {int(np.argmin(used))} has no example ({int((used == 0).sum())} users of "
            f"{len(used)} have none): number the users that have one 0, 1, … without gaps"
        )
    sorted_users = users.astype(np.int32)
    repeated = _sort_rows(starts, sorted_users)
    if repeated is not None:
        example = int(np.searchsorted(starts, int(np.flatnonzero(repeated)[0]), side="right")) - 1
        raise ValueError(f"example {example} has a user twice: give each of its users once")
    return starts, sorted_users


def _refuse_empty(sizes: Offsets) -> None:
    if len(sizes) == 0:
        raise ValueError("there is no example: an attribution graph needs one")
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        raise ValueError(
            f"example {int(empty[0])} has no user ({len(empty)} examples of {len(sizes)} have "
            "none): drop them, or give each a user of its own"
        )


def _assembled(lengths: list[Offsets], parts: list[Any], users: int) -> Edges:
    """Canonical edges of parts in order: rows sorted, repeated users of an example collapsed."""
    sizes = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
    _refuse_empty(sizes)
    if users > _MOST_USERS:
        raise ValueError(f"{users} users: at most {_MOST_USERS} are supported")
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    members = np.concatenate(parts, dtype=np.int32)
    repeated = _sort_rows(offsets, members)
    if repeated is None:
        return offsets, members
    kept = np.concatenate(([0], np.cumsum(~repeated)))
    return kept[offsets], members[~repeated]


def _sort_rows(offsets: Offsets, members: Users) -> npt.NDArray[np.bool_] | None:
    """Sort the users of every example in place; a mask of those that repeat the one before."""
    repeated = None
    users = int(members.max()) + 1
    for begin, end in spans(offsets, _EDGES):
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
