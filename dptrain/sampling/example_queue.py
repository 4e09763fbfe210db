"""A queue of examples in a ring, open at both ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Queue:
    """Examples in order, in memory that does not move.

    Args:
        entries: the first contents, from the front; copied.
        capacity: most entries that it will ever hold; their number now unless given.
    """

    def __init__(self, entries: npt.NDArray[Any], capacity: int | None = None) -> None:
        self._size = len(entries)
        capacity = max(1, self._size if capacity is None else capacity)
        self._ring = np.empty(capacity, dtype=entries.dtype)
        self._ring[: self._size] = entries
        self._front = 0

    def __len__(self) -> int:
        return self._size

    def _places(self, begin: int, count: int) -> npt.NDArray[np.int64]:
        return (begin + np.arange(count)) % len(self._ring)

    def entries(self) -> npt.NDArray[Any]:
        """A copy of the contents, from the front."""
        return self._ring[self._places(self._front, self._size)]

    def pop_front(self, count: int) -> npt.NDArray[Any]:
        """Remove and return the first ``count`` entries, at most as many as there are."""
        taken = self._ring[self._places(self._front, count)]
        self._front = (self._front + count) % len(self._ring)
        self._size -= count
        return taken

    def push_front(self, entries: npt.NDArray[Any]) -> None:
        """Put entries before all others, within the capacity."""
        self._front = (self._front - len(entries)) % len(self._ring)
        self._ring[self._places(self._front, len(entries))] = entries
        self._size += len(entries)

    def push_back(self, entries: npt.NDArray[Any]) -> None:
        """Put entries after all others, within the capacity."""
        self._ring[self._places(self._front + self._size, len(entries))] = entries
        self._size += len(entries)
