"""A file of JSON lines that several processes add to."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any


class Lines:
    """Records, one for each key, in the order of their keys: a diff of the file adds lines.

    Args:
        path: the file; it need not be there yet.
        key: names of the fields that tell records apart. A record may lack some.
    """

    def __init__(self, path: pathlib.Path, key: Sequence[str]) -> None:
        self.path, self.key = path, key

    def read(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """Records by key."""
        if not self.path.exists():
            return {}
        records = map(json.loads, self.path.read_text(encoding="utf-8").splitlines())
        return {self._of(record): record for record in records}

    def get(self, **key: Any) -> dict[str, Any] | None:
        """The record of a key, if it is there."""
        return self.read().get(self._of(key))

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record, or put it in the place of the one with its key.

        The folder is locked meanwhile, and the file replaced in one step: whoever is killed leaves
        the old file or the new one, and what others add is kept.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            records = {**self.read(), self._of(record): record}
            temporary = self.path.with_suffix(".tmp")
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(records[key]) + "\n" for key in sorted(records))
            temporary.replace(self.path)
        finally:
            os.close(folder)

    def _of(self, record: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(record.get(name, 0) for name in self.key)
