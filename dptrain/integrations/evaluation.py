"""Detection of evaluation on the examples that are trained on, which no noise protects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from dptrain.core import seeded_globals

LOOKED_AT = 2000  # rows of a data set, spread evenly
_SEED = 0


class TrainingRows:
    """The examples that are trained on, to compare those of other data sets with.

    Data are theirs if they are the same or a part of them (``Subset``; ``select``, ``shuffle``,
    ``train_test_split`` and the like of ``datasets``), have the same fingerprint, or have one of
    their rows. Rows are compared by what they hold, in the columns of the one that has fewer, on up
    to ``LOOKED_AT`` of either: data sets of no more are compared completely. Rows of which one was
    made of the other (cut into tokens, say) are not known to be one.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._compared: list[tuple[Any, bool | None]] = []  # held, so that no other is taken for it

    def hold(self, data: Any) -> bool | None:
        """True if some of the data are theirs; ``None`` if that cannot be told.

        Args:
            data: a data set, several by name or in a list, or ``None``.
        """
        for known, found in self._compared:
            if known is data:
                return found
        found = self._hold(data)
        self._compared.append((data, found))
        return found

    def _hold(self, data: Any) -> bool | None:
        if data is None:
            return False
        if isinstance(data, Mapping):
            each = [self.hold(part) for part in data.values()]
            return True if True in each else None if None in each else False
        if is_same(data, self.dataset) or _overlap(data, self.dataset):
            return True
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            return None
        return _have_rows_in_common(data, self.dataset)


def is_same(one: Any, other: Any) -> bool:
    """True if two data sets are one, or a part of one, or have one fingerprint."""
    if isinstance(one, Mapping):
        return any(is_same(part, other) for part in one.values())
    if isinstance(one, torch.utils.data.Subset):
        return is_same(one.dataset, other)
    marks = [getattr(data, "_fingerprint", None) for data in (one, other)]
    return one is other or (marks[0] is not None and marks[0] == marks[1])


def _overlap(one: Any, other: Any) -> bool:
    """True if two of ``datasets`` have a row at the same place in memory, in whatever order."""
    if not all(hasattr(data, "_data") and hasattr(data, "_indices") for data in (one, other)):
        return False
    mine, theirs = _places(one), _places(other)
    return any(
        np.intersect1d(rows, theirs[address]).size
        for address, rows in mine.items()
        if address in theirs
    )


def _places(dataset: Any) -> dict[int, np.ndarray[Any, np.dtype[np.int64]]]:
    """The rows of an arrow table, by address in memory: slices share that of the whole."""
    chunks = dataset._data.column(0).chunks if dataset.column_names else []
    wanted = None if dataset._indices is None else dataset._indices.column(0).to_numpy()
    found: dict[int, list[Any]] = {}
    first = 0
    for chunk in chunks:
        address = next((b.address for b in chunk.buffers() if b is not None), None)
        rows = np.arange(len(chunk), dtype=np.int64)
        if wanted is not None:
            here = (wanted >= first) & (wanted < first + len(chunk))
            rows = wanted[here].astype(np.int64) - first
        first += len(chunk)
        if address is not None:
            found.setdefault(address, []).append(rows + chunk.offset)
    return {address: np.concatenate(rows) for address, rows in found.items()}


def _have_rows_in_common(one: Any, other: Any) -> bool:
    mine, theirs = _columns(one), _columns(other)
    fewer = None
    if mine is not None and theirs is not None:
        fewer = mine & theirs
        if fewer not in (mine, theirs):
            return False
    elif mine is not theirs:
        return False
    return not set(_digests(one, fewer)).isdisjoint(_digests(other, fewer))


def _columns(dataset: Any) -> frozenset[str] | None:
    """The names of a row's fields, if it has names."""
    if not len(dataset):
        return frozenset()
    row = _plain(dataset)[0]
    return frozenset(map(str, row)) if isinstance(row, Mapping) else None


def _plain(dataset: Any) -> Any:
    """The data set without a format or transform, if it can be had without."""
    own = getattr(dataset, "with_format", None)
    return dataset if own is None else own(None)


def _digests(dataset: Any, columns: frozenset[str] | None) -> Iterator[bytes]:
    """A digest of each row that is looked at; equal values have equal digests."""
    rows = _plain(dataset)
    size = len(rows)
    looked = sorted(set(np.linspace(0, size - 1, min(size, LOOKED_AT)).astype(int).tolist()))
    for number in tqdm(looked, desc="comparing the data", unit="row", delay=2, leave=False):
        with seeded_globals(_SEED):  # an augmentation is then the same for the same row
            row = rows[number]
        if columns is not None:
            row = {name: row[name] for name in sorted(columns)}
        sha = hashlib.sha256()
        _feed(sha, row)
        yield sha.digest()


def _feed(sha: Any, value: Any) -> None:
    """Add a value to a digest; a tensor, an array and a list of the same numbers count alike."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            sha.update(f"{name}=".encode())
            _feed(sha, value[name])
        return
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    numbers = _numbers(value)
    if numbers is not None:
        sha.update(f"{numbers.shape}".encode())
        sha.update(np.ascontiguousarray(numbers).tobytes())
    elif isinstance(value, list | tuple | np.ndarray):
        sha.update(f"[{len(value)}".encode())
        for each in value:
            _feed(sha, each)
    elif callable(pixels := getattr(value, "tobytes", None)):  # a PIL image
        sha.update(f"{getattr(value, 'mode', '')}{getattr(value, 'size', '')}".encode())
        sha.update(pixels())
    else:
        sha.update(f"{value!r};".encode())


def _numbers(value: Any) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """The numbers of a value of any container, as float64; ``None`` for anything else."""
    if not isinstance(value, bool | int | float | list | tuple | np.ndarray | np.generic):
        return None
    try:
        array = np.asarray(value)
    except ValueError:  # rows of several lengths
        return None
    return array.astype(np.float64) if array.dtype.kind in "biuf" else None
