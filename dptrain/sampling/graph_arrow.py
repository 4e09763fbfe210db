"""Edges of an attribution graph from a column of a ``datasets.Dataset`` or of named columns."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from dptrain.sampling.graph_build import EXAMPLES, edges_from_lists
from dptrain.sampling.graph_edges import Edges, assembled


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
    batches = dataset.select_columns([column]).with_format("arrow").iter(batch_size=EXAMPLES)
    for table in batches:
        # Behind an indices mapping every row is a chunk of its own.
        yield from table.combine_chunks().column(column).chunks


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
    return assembled(lengths, parts, n_users)
