"""Edges of an attribution graph from a column of a ``datasets.Dataset`` or of named columns."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from dptrain.sampling.graph_build import edges_from_lists, loading_bar
from dptrain.sampling.graph_edges import Edges, Offsets, Users, assembled

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
            f"column={column!r}: a {type(dataset).__name__} gives no such column ({error}); pass "
            "a datasets.Dataset (one split), a mapping of columns, or use from_lists"
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
