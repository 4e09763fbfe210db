"""Edges of an attribution graph, from a column of a ``datasets.Dataset`` or named columns.

Also from lists of users and from (example, user) pairs.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tqdm.auto import tqdm

from dptrain.core import named_error
from dptrain.sampling.users.graph_edges import MOST_USERS, Edges, Offsets, Users, assembled

# Examples read at a time.
EXAMPLES = 1 << 14


def loading_bar(examples: int | None) -> tqdm:
    """A progress bar over the examples, shown after two seconds."""
    return tqdm(desc="Attribution graph", total=examples, unit="example", delay=2)


class _Numbers(dict[Hashable, int]):
    """Numbers of user ids in order of first appearance: indexing with a new id gives it the next.

    An id that is not equal to itself, or equal to nothing but itself, would make one user many,
    and the guarantee of that user false; such ids are refused.
    """

    def __missing__(self, user: Any) -> int:
        _check_id(user, user)
        number = self[user] = len(self)
        return number


def _check_id(part: Any, user: Any) -> None:
    """Refuse ``part`` of a user id; tuples and the like are looked into, as they compare by parts.

    A tuple is equal to itself even where a part of it is not, so that the id as a whole tells
    nothing.
    """
    if part is None:
        raise ValueError(
            "a user id is None, or contains None: leave unknown users out, or give each an id"
        )
    if isinstance(part, str | bytes):
        return
    if isinstance(part, tuple | frozenset):
        for item in part:
            _check_id(item, user)
        return
    if dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            _check_id(getattr(part, field.name), user)
    if isinstance(part, torch.Tensor) or type(part).__hash__ is object.__hash__:
        raise ValueError(
            f"a user id of type {type(part).__name__} is equal to no other object, so no two "
            "examples could share it: use text or integers"
        )
    if part != part:
        raise ValueError("a user id is NaN, or contains NaN: leave unknown users out")


def edges_from_lists(column: Iterable[Iterable[Hashable]]) -> Edges:
    """Edges of a column of user lists, which is read once, in chunks."""
    if isinstance(column, str | bytes | Mapping):
        raise ValueError(
            f"column={type(column).__name__}: must be an iterable with one list of users per "
            "example"
        )
    numbers = _Numbers()
    lengths, parts, first = [], [], 0
    rows = iter(column)
    with loading_bar(len(column) if isinstance(column, Sized) else None) as bar:
        while chunk := [
            _row(i, row) for i, row in enumerate(itertools.islice(rows, EXAMPLES), first)
        ]:
            size = np.fromiter(map(len, chunk), dtype=np.int64, count=len(chunk))
            lengths.append(size)
            parts.append(_numbers_of_chunk(numbers, chunk, size, first))
            first += len(chunk)
            bar.update(len(chunk))
    users = len(numbers)
    del numbers  # its ids take more memory than the edges
    return assembled(lengths, parts, users)


def _row(example: int, row: Any) -> Sequence[Any]:
    """The users of one example as a sequence."""
    if isinstance(row, str | bytes):
        raise ValueError(
            f"example {example} has a {type(row).__name__} instead of a list of users: put a "
            "single user into a list"
        )
    if hasattr(row, "tolist"):  # the elements of arrays and tensors, as Python values
        row = row.tolist()
    if isinstance(row, list | tuple):
        return row
    if isinstance(row, set | frozenset):
        # Its order is another one in every process, and the users' numbers would be: a run that
        # goes on in a new process has to find the graph that it began with.
        if {type(user) for user in row} not in (set(), {str}, {bytes}, {int}):
            raise ValueError(
                f"example {example} has a {type(row).__name__} of users, which has no fixed order: "
                "use a list"
            )
        return sorted(row)
    try:
        return tuple(row)
    except TypeError:
        raise ValueError(
            f"example {example} has a {type(row).__name__} instead of a list of users"
        ) from None


def _numbers_of_chunk(
    numbers: _Numbers, chunk: list[Sequence[Any]], sizes: npt.NDArray[np.int64], first: int
) -> Users:
    ends = np.cumsum(sizes)

    def where(position: int) -> str:
        return f"example {first + int(np.searchsorted(ends, position, side='right'))}"

    users = list(itertools.chain.from_iterable(chunk))
    return _numbered(numbers, users, where)


def _numbered(numbers: _Numbers, users: Sequence[Any], where: Callable[[int], str]) -> Users:
    """The numbers of a sequence of ids; ``where`` names the place of one that is refused."""
    try:
        return np.fromiter(map(numbers.__getitem__, users), dtype=np.int32, count=len(users))
    except (TypeError, ValueError):
        for position, user in enumerate(users):
            try:
                numbers[user]
            except TypeError as error:
                raise ValueError(
                    f"{where(position)}: user ids must be hashable, and one is a "
                    f"{type(user).__name__}; use text, integers or tuples"
                ) from error
            except ValueError as error:
                raise ValueError(f"{where(position)}: {error}") from error
        raise


def edges_from_pairs(
    examples: Sequence[int] | npt.NDArray[Any],
    users: Sequence[Hashable] | npt.NDArray[Any],
    dataset_size: int | None,
) -> Edges:
    """Edges of (example number, user id) pairs in any order."""
    at = np.asarray(examples)
    if at.ndim != 1 or (at.size and at.dtype.kind not in "iu"):
        raise ValueError(
            f"examples has type {at.dtype} and shape {at.shape}: must be a one-dimensional array "
            "of example indices"
        )
    ids = np.asarray(users) if hasattr(users, "tolist") else users
    if isinstance(ids, np.ndarray) and ids.ndim != 1:
        raise ValueError(
            f"users has shape {ids.shape}: must be a one-dimensional array of user ids"
        )
    if len(at) != len(ids):
        raise ValueError(
            f"{len(at)} examples and {len(ids)} users are given: give both of every pair, in the "
            "same order"
        )
    if not len(at):
        raise ValueError("there are no pairs: an attribution graph needs at least one example")
    low, high = int(at.min()), int(at.max())
    size = high + 1 if dataset_size is None else dataset_size
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise ValueError(
            f"example index {wrong} is out of range for dataset_size={size}, which is numbered "
            "from 0"
        )
    lengths = np.bincount(at.astype(np.int64, copy=False), minlength=size)
    order = None if (at[1:] >= at[:-1]).all() else np.argsort(at, kind="stable")
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        members, n_users = _ranked(ids if order is None else ids[order])
    else:
        listed = ids.tolist() if isinstance(ids, np.ndarray) else ids
        pairs = range(len(at)) if order is None else order
        numbers = _Numbers()
        members = _numbered(
            numbers,
            listed if order is None else [listed[i] for i in order],
            lambda position: f"pair {int(pairs[position])}",
        )
        n_users = len(numbers)
    return assembled([lengths], [members], n_users)


def _ranked(ids: npt.NDArray[Any]) -> tuple[Users, int]:
    """Integer ids as numbers in order of first appearance, and how many there are."""
    distinct, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    if len(distinct) > MOST_USERS:
        raise ValueError(f"{len(distinct)} users: at most {MOST_USERS} are supported")
    rank = np.empty(len(distinct), dtype=np.int32)
    rank[np.argsort(first)] = np.arange(len(distinct), dtype=np.int32)
    return rank[inverse], len(distinct)


# Examples read at a time (an indices mapping makes an object of each), and ids numbered at a time.
READ = 1 << 14
IDS = 1 << 20


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
        return _edges_from_arrow(_arrow_columns(dataset, column), column, len(dataset))
    try:
        lists = dataset[column]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"column={column!r}: a {type(dataset).__name__} has no such column "
            f"({named_error(error)}): pass a datasets.Dataset (one split), a mapping of columns, "
            "or use from_lists"
        ) from error
    return edges_from_lists(lists)


def _arrow_columns(dataset: Any, column: str) -> Iterator[Any]:
    """The column as arrow arrays, batch after batch."""
    columns = dataset.select_columns([column]).with_format("arrow")
    for table in columns.iter(batch_size=READ):
        # Through an indices mapping every row is a chunk of its own.
        yield from table.select([column]).combine_chunks().column(column).chunks


def _edges_from_arrow(arrays: Iterable[Any], column: str, examples: int) -> Edges:
    numbers = _ArrowNumbers()
    lengths, parts, waiting = [], [], []
    first = ids = 0
    with loading_bar(examples) as bar:
        for lists in arrays:
            size, flat = _sizes_and_ids(lists, column, first)
            lengths.append(size)
            waiting.append(flat)
            first += len(lists)
            ids += len(flat)
            if ids >= IDS:
                parts.append(numbers.of(waiting))
                waiting, ids = [], 0
            bar.update(len(lists))
    if waiting:
        parts.append(numbers.of(waiting))
    users = len(numbers)
    del numbers  # its ids take more memory than the edges
    return assembled(lengths, parts, users)


def _sizes_and_ids(lists: Any, column: str, first: int) -> tuple[Offsets, Any]:
    """Lengths of the lists, and all their ids in order; ``first`` is the first list's example."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = lists.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (is_list or pa.types.is_fixed_size_list(kind)):
        raise ValueError(f"column={column!r} holds {kind}, not lists of users")
    sizes = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    flat = lists.flatten()  # without the lists that are null
    if flat.null_count:
        hole = int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False)))
        row = int(np.searchsorted(np.cumsum(sizes), hole, side="right"))
        raise ValueError(f"example {first + row} has a null user id: leave unknown users out")
    if pa.types.is_dictionary(flat.type):
        flat = flat.dictionary_decode()
    if pa.types.is_string(flat.type):
        flat = flat.cast(pa.large_string())  # beyond 2 GiB of text the offsets must be 64-bit
    elif not (pa.types.is_integer(flat.type) or pa.types.is_large_string(flat.type)):
        raise ValueError(
            f"column={column!r} holds user ids of type {flat.type}; map them to text or integers "
            "first"
        )
    return sizes.astype(np.int64), flat


class _ArrowNumbers:
    """Numbers of ids in order of first appearance, batch after batch.

    Only the distinct ids are kept. Their hash table is built anew for every batch, so batches are
    large; one table over all the values at once would keep every value until the end.
    """

    def __init__(self) -> None:
        self._known: Any = None

    def __len__(self) -> int:
        return 0 if self._known is None else len(self._known)

    def of(self, ids: list[Any]) -> Users:
        """The numbers of all ``ids``, of which those not seen before get the next ones."""
        import pyarrow as pa
        import pyarrow.compute as pc

        encoded = pa.concat_arrays(ids).dictionary_encode()
        indices = encoded.indices.to_numpy(zero_copy_only=False)
        distinct = encoded.dictionary
        if self._known is None:
            self._known = distinct
            return indices
        found = pc.index_in(distinct, value_set=self._known)
        new = found.is_null()
        is_new = new.to_numpy(zero_copy_only=False)
        number = found.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int32)
        number[is_new] = len(self) + np.arange(np.count_nonzero(is_new), dtype=np.int32)
        self._known = pa.concat_arrays([self._known, distinct.filter(new)])
        # Arrow keeps what the tables took, up to twice the memory that is in use.
        pa.default_memory_pool().release_unused()
        return number[indices]
