"""The arXiv metadata snapshot: read once as a stream, then a memory-mapped arrow file.

The snapshot (https://www.kaggle.com/datasets/Cornell-University/arxiv; Clement et al. 2019,
arXiv:1905.00075) holds one JSON object a line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from recipes.data.arxiv_record import BadRecord, Paper, parse_line
from recipes.data.cache import cache_folder
from recipes.data.packages import package

FORMAT = 1  # of the cached files; raise it with any change of what a line is read as
ON_ERROR = ("stop", "skip")
SHOWN = 10  # skipped lines that are named
_BATCH = 4096  # papers in memory at once
_CHUNK = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotReport:
    """What was found in the file.

    Attributes:
        sha256: of the file's bytes (hex).
        papers: usable lines.
        blank: lines of nothing but white space; they hold no paper and are passed over.
        skipped: lines left out because of an error.
        first_skipped: the first of these, as (line number from 1, reason).
    """

    sha256: str
    papers: int
    blank: int
    skipped: int
    first_skipped: tuple[tuple[int, str], ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user must hear, in sentences; empty if there is nothing."""
        if not self.skipped:
            return ()
        named = "; ".join(f"line {number}: {reason}" for number, reason in self.first_skipped)
        more = ", …" if self.skipped > len(self.first_skipped) else ""
        return (f"{self.skipped} lines of the snapshot were skipped ({named}{more})",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The papers of a file, in its order, as a ``datasets.Dataset`` that is memory-mapped.

    Columns: those of ``recipes.data.arxiv_record.Paper``.
    """

    papers: Any
    report: SnapshotReport


def read_snapshot(
    path: str | pathlib.Path, *, cache_dir: str | pathlib.Path, on_error: str = "stop"
) -> Snapshot:
    """Read the file, or what an earlier call made of the same bytes.

    The cached file is found by the SHA-256 of the content: size and time of change stay the same in
    too many copies and edits, and an attribution graph of other papers would make the guarantee
    false. Hashing takes seconds where parsing takes minutes.

    Args:
        path: the JSON lines, UTF-8.
        cache_dir: where the arrow file is kept, about as large as the abstracts; made if missing.
        on_error: ``"stop"`` raises at the first line that holds no paper; ``"skip"`` leaves such
            lines out and reports them.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a bad line (its number and the reason), a file that is empty or one JSON
            array, or one that changes while it is read.
    """
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r}: choose one of {', '.join(ON_ERROR)}")
    path = pathlib.Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file of JSON lines in it")
    if not path.is_file():
        raise FileNotFoundError(
            f"no arXiv snapshot {path}; download arxiv-metadata-oai-snapshot.json and give its path"
        )
    _check_start(path)
    datasets = package("datasets")
    cache = cache_folder(cache_dir)
    sha256 = _hash(path)
    arrow = cache / f"snapshot-v{FORMAT}-{on_error}-{sha256[:32]}.arrow"
    beside = arrow.with_suffix(".json")
    if not (arrow.is_file() and beside.is_file()):
        report = _convert(path, arrow, skip=on_error == "skip", sha256=sha256)
        _write(beside, json.dumps(dataclasses.asdict(report)))
    fields = json.loads(beside.read_text(encoding="utf-8"))
    fields["first_skipped"] = tuple((number, why) for number, why in fields["first_skipped"])
    return Snapshot(papers=datasets.Dataset.from_file(str(arrow)), report=SnapshotReport(**fields))


def _check_start(path: pathlib.Path) -> None:
    with path.open("rb") as file:
        start = file.read(_CHUNK).lstrip()
    if not start:
        raise ValueError(f"{path} is empty; expected one JSON object a line")
    if start.startswith(b"["):
        raise ValueError(
            f"{path} is one JSON array; expected one JSON object a line, which "
            f"jq -c '.[]' {path.name} writes"
        )


def _hash(path: pathlib.Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file, _bytes_bar(path, "check snapshot") as bar:
        while chunk := file.read(_CHUNK):
            sha.update(chunk)
            bar.update(len(chunk))
    return sha.hexdigest()


def _bytes_bar(path: pathlib.Path, what: str) -> tqdm:
    return tqdm(total=path.stat().st_size, desc=what, unit="B", unit_scale=True, delay=2)


class _Lines:
    """The papers of a file, counted; a stream."""

    def __init__(self, path: pathlib.Path, *, skip: bool) -> None:
        self.path, self.skip = path, skip
        self.sha = hashlib.sha256()
        self.papers = self.blank = self.skipped = 0
        self.first_skipped: list[tuple[int, str]] = []

    def __iter__(self) -> Iterator[Paper]:
        with self.path.open("rb") as file, _bytes_bar(self.path, "read snapshot") as bar:
            for number, line in enumerate(file, 1):
                self.sha.update(line)
                bar.update(len(line))
                if not line.strip():
                    self.blank += 1
                    continue
                try:
                    paper = parse_line(line)
                except BadRecord as error:
                    self._refuse(number, str(error))
                    continue
                self.papers += 1
                yield paper

    def _refuse(self, number: int, reason: str) -> None:
        if not self.skip:
            raise ValueError(
                f"{self.path}, line {number}: {reason}. Repair the line, or leave such lines out "
                "with on_error=skip"
            )
        self.skipped += 1
        if len(self.first_skipped) < SHOWN:
            self.first_skipped.append((number, reason))


def _convert(path: pathlib.Path, arrow: pathlib.Path, *, skip: bool, sha256: str) -> SnapshotReport:
    """Write the papers to ``arrow``, which appears whole or not at all."""
    lines = _Lines(path, skip=skip)
    with tempfile.TemporaryDirectory(dir=arrow.parent, prefix="snapshot-") as folder:
        temporary = pathlib.Path(folder) / arrow.name
        _write_arrow(temporary, lines)
        if lines.sha.hexdigest() != sha256:
            raise ValueError(f"{path} changed while it was read; start again when it is complete")
        if not lines.papers:
            raise ValueError(
                f"{path} holds no usable paper: {lines.skipped} lines were skipped, the first "
                f"ones {lines.first_skipped}"
            )
        temporary.replace(arrow)
    return SnapshotReport(
        sha256=sha256,
        papers=lines.papers,
        blank=lines.blank,
        skipped=lines.skipped,
        first_skipped=tuple(lines.first_skipped),
    )


def _write_arrow(target: pathlib.Path, papers: _Lines) -> None:
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
