"""The arXiv metadata snapshot of JSON lines, read as a stream.

The snapshot (https://www.kaggle.com/datasets/Cornell-University/arxiv; Clement et al. 2019,
arXiv:1905.00075) holds one JSON object a line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Iterable, Iterator

from tqdm import tqdm

from recipes.data.arxiv_cached import SHOWN, Snapshot, cached, check_on_error
from recipes.data.arxiv_record import BadRecord, Paper, parse_line

FORMAT = 1  # of the cached files; raise it with any change of what a line is read as
_CHUNK = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotReport:
    """Counts of a reading of the file.

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
        """Warnings for the user, in sentences; empty if there are none."""
        if not self.skipped:
            return ()
        named = "; ".join(f"line {number}: {reason}" for number, reason in self.first_skipped)
        more = ", …" if self.skipped > len(self.first_skipped) else ""
        return (f"{self.skipped} lines of the snapshot were skipped ({named}{more})",)


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
    check_on_error(on_error)
    path = pathlib.Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file of JSON lines in it")
    if not path.is_file():
        raise FileNotFoundError(
            f"no arXiv snapshot {path}; download arxiv-metadata-oai-snapshot.json and give its "
            "path, or that of a folder with the tables of the arXiv archive"
        )
    _check_start(path)
    sha256 = _hash(path)

    def read(write: Callable[[Iterable[Paper]], None]) -> SnapshotReport:
        return _read(path, write, skip=on_error == "skip", sha256=sha256)

    name = f"snapshot-v{FORMAT}-{on_error}-{sha256[:32]}"
    papers, fields = cached(name, cache_dir=cache_dir, read=read)
    fields["first_skipped"] = tuple((number, why) for number, why in fields["first_skipped"])
    return Snapshot(papers=papers, report=SnapshotReport(**fields))


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


def _read(
    path: pathlib.Path, write: Callable[[Iterable[Paper]], None], *, skip: bool, sha256: str
) -> SnapshotReport:
    lines = _Lines(path, skip=skip)
    write(lines)
    if lines.sha.hexdigest() != sha256:
        raise ValueError(f"{path} changed while it was read; start again when it is complete")
    if not lines.papers:
        raise ValueError(
            f"{path} holds no usable paper: {lines.skipped} lines were skipped, the first "
            f"ones {lines.first_skipped}"
        )
    return SnapshotReport(
        sha256=sha256,
        papers=lines.papers,
        blank=lines.blank,
        skipped=lines.skipped,
        first_skipped=tuple(lines.first_skipped),
    )
