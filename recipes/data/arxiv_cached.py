"""Papers that were read once, in a memory-mapped arrow file."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from recipes.data.arxiv_record import Paper
from recipes.data.cache import cache_folder
from recipes.data.packages import package

ON_ERROR = ("stop", "skip")
SHOWN = 10  # skipped lines that are named
_BATCH = 4096  # papers in memory at once


class Report(Protocol):
    """Counts of a reading of the papers' source."""

    @property
    def sha256(self) -> str:
        """Of the content (hex)."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings for the user, in sentences; empty if there are none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Papers in the order in which they were read, as a memory-mapped ``datasets.Dataset``.

    Columns: those of ``recipes.data.arxiv_record.Paper``.
    """

    papers: Any
    report: Report


def check_on_error(on_error: str) -> None:
    """Refuse what says neither to stop nor to skip.

    Raises:
        ValueError: naming the choices.
    """
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r}: choose one of {', '.join(ON_ERROR)}")


def cached(
    name: str,
    *,
    cache_dir: str | pathlib.Path,
    read: Callable[[Callable[[Iterable[Paper]], None]], Any],
) -> tuple[Any, dict[str, Any]]:
    """The papers called ``name``, and the facts about them; read unless they are there already.

    Args:
        name: of the files; has to name the content exactly.
        cache_dir: where they are kept; made if missing.
        read: is given a function that writes papers, and returns a dataclass of facts that are JSON
            values. The files appear whole or, if it raises, not at all.

    Returns:
        The ``datasets.Dataset``, and the facts as JSON gives them back.
    """
    datasets = package("datasets")
    cache = cache_folder(cache_dir)
    arrow = cache / f"{name}.arrow"
    beside = arrow.with_suffix(".json")
    if not (arrow.is_file() and beside.is_file()):
        with tempfile.TemporaryDirectory(dir=cache, prefix="snapshot-") as folder:
            temporary = pathlib.Path(folder) / arrow.name
            facts = read(lambda papers: _write_arrow(temporary, papers))
            temporary.replace(arrow)
        _write(beside, json.dumps(dataclasses.asdict(facts)))
    return datasets.Dataset.from_file(str(arrow)), json.loads(beside.read_text(encoding="utf-8"))


def _write_arrow(target: pathlib.Path, papers: Iterable[Paper]) -> None:
    pa, ipc = package("pyarrow"), package("pyarrow.ipc")
    schema = pa.schema(
        {
            "id": pa.string(),
            "authors": pa.list_(pa.string()),
            "abstract": pa.string(),
            "label": pa.int16(),
        }
    )
    batch: list[Paper] = []
    with ipc.new_stream(str(target), schema) as writer:

        def write() -> None:
            columns = zip(*batch, strict=True)
            arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
            batch.clear()

        for paper in papers:
            batch.append(paper)
            if len(batch) == _BATCH:
                write()
        if batch:
            write()


def _write(path: pathlib.Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)
