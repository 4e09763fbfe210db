"""The arXiv archive of tables: a folder of TSV files, one for each category or year.

The archive (https://github.com/staeiou/arxiv_archive; Geiger 2020, doi:10.5281/zenodo.1463242)
holds the papers of 1993 to 2019, each in the file of its year and in those of all its categories.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import io
import lzma
import pathlib
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from tqdm import tqdm

from recipes.data.arxiv_cached import SHOWN, Snapshot, cached, check_on_error
from recipes.data.arxiv_record import ROW_FIELDS, BadRecord, Paper, parse_row

FORMAT = 1  # of the cached files; raise it with any change of what a row is read as
SUFFIXES = (".tsv", ".tsv.xz", ".tsv.zip")
_CHUNK = 2**20
_FIELD = 2**22  # characters of the longest field: some papers have thousands of authors
# What git leaves in the place of a large file that it was not asked to bring.
_POINTERS = (b"version https://git-lfs.github.com/", b"/annex/objects/")
_DUMP = re.compile(r"\d{8}")  # the folder of a dump: its date
_YEAR = re.compile(r"\d{4}")
_FIRST = 1993  # year that has a file


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArchiveReport:
    """Counts of a reading of the files.

    Attributes:
        sha256: of the names and bytes of all files (hex).
        files: how many were read.
        papers: distinct ones.
        repeated: rows with a paper that an earlier file had.
        differing: papers that another row gives other authors, abstract or archive.
        skipped: rows, and rests of files, left out because of an error.
        first_skipped: the first of these, as (file and line, reason).
        pointers: files left out because they are Git's pointers to the data.
        missing: categories, or years, that have no file, as far as the others tell.
    """

    sha256: str
    files: int
    papers: int
    repeated: int
    differing: int
    skipped: int
    first_skipped: tuple[tuple[str, str], ...]
    pointers: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings for the user, in sentences; empty if there are none."""
        found = []
        if self.skipped:
            named = "; ".join(f"{where}: {reason}" for where, reason in self.first_skipped)
            more = "; …" if self.skipped > len(self.first_skipped) else ""
            found.append(f"{self.skipped} lines of the archive were skipped ({named}{more})")
        if self.pointers:
            found.append(
                f"{len(self.pointers)} files of the archive were left out, as they hold Git's "
                f"pointers and not the data: {', '.join(self.pointers)}"
            )
        if self.missing:
            found.append(
                f"the archive has no file of {', '.join(self.missing)}: papers that are in no "
                "other file are not there"
            )
        if self.differing:
            found.append(
                f"{self.differing} papers differ between files; the first file's, of the latest "
                "dump, were taken"
            )
        return tuple(found)


def is_archive(path: str | pathlib.Path) -> bool:
    """True if ``read_archive`` reads ``path``: a folder, or a file with its suffixes."""
    path = pathlib.Path(path)
    return path.is_dir() or path.name.endswith((*SUFFIXES, ".zip"))


def read_archive(
    path: str | pathlib.Path, *, cache_dir: str | pathlib.Path, on_error: str = "stop"
) -> Snapshot:
    """Read the tables, or what an earlier call made of the same bytes.

    A paper is known by its arXiv id and counts once, however many files hold it. Files come in
    order of their names, those of a later dump (a folder named by its date, ``20200101``) first.

    Args:
        path: a folder with tables in it or below; or one of them (TSV, plain, .xz or .zip).
        cache_dir: where the arrow file is kept, about as large as the abstracts; made if missing.
        on_error: ``"stop"`` raises at the first bad row, damaged file, or pointer of Git's that is
            no file; ``"skip"`` leaves them out and reports them.

    Raises:
        FileNotFoundError: if there is nothing, or no table.
        ValueError: for what ``on_error`` stops at, files without any paper, or files that change
            while they are read.
    """
    check_on_error(on_error)
    path = pathlib.Path(path)
    skip = on_error == "skip"
    tables = _tables(path)
    pointers = {name for name, file in tables.items() if _is_pointer(file)}
    if pointers and (not skip or len(pointers) == len(tables)):
        raise ValueError(
            f"{path}: {len(pointers)} of {len(tables)} files hold Git's pointers and not the data "
            f"({', '.join(sorted(pointers))}); bring them with git lfs pull"
            + ("" if skip else ", or leave them out with on_error=skip")
        )
    whole = {name: file for name, file in tables.items() if name not in pointers}
    sha256 = _hash(tables)

    def read(write: Callable[[Iterable[Paper]], None]) -> ArchiveReport:
        rows = _Rows(whole, skip=skip)
        write(rows)
        if _hash(tables) != sha256:
            raise ValueError(f"{path} changed while it was read; start again when it is complete")
        if not rows.seen:
            raise ValueError(
                f"{path} holds no usable paper: {rows.skipped} lines were skipped, the first ones "
                f"{rows.first_skipped}"
            )
        return ArchiveReport(
            sha256=sha256,
            files=len(whole),
            papers=len(rows.seen),
            repeated=rows.repeated,
            differing=len(rows.differing),
            skipped=rows.skipped,
            first_skipped=tuple(rows.first_skipped),
            pointers=tuple(sorted(pointers)),
            missing=_missing(whole, rows.categories, rows.years),
        )

    name = f"archive-v{FORMAT}-{on_error}-{sha256[:32]}"
    papers, fields = cached(name, cache_dir=cache_dir, read=read)
    fields["first_skipped"] = tuple((where, why) for where, why in fields["first_skipped"])
    for field in ("pointers", "missing"):
        fields[field] = tuple(fields[field])
    return Snapshot(papers=papers, report=ArchiveReport(**fields))


def _tables(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """The files by their names below ``path``, in the order in which they are read."""
    if not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(f"no arXiv archive {path}; give the path of its folder")
        return {path.name: path}
    found = [file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and not file.is_dir()]
    if not found:
        raise FileNotFoundError(
            f"the folder {path} holds no table ({', '.join(SUFFIXES)}); name the folder of the "
            "arXiv archive, or the file of JSON lines of the arXiv snapshot"
        )

    def order(file: pathlib.Path) -> tuple[int, str]:
        parts = file.parent.relative_to(path).parts or (path.name,)
        dates = [int(part) for part in parts if _DUMP.fullmatch(part)]
        return -max(dates, default=0), file.relative_to(path).as_posix()

    return {file.relative_to(path).as_posix(): file for file in sorted(found, key=order)}


def _is_pointer(file: pathlib.Path) -> bool:
    if not file.is_file():  # a link of git-annex to what is not there
        return True
    with file.open("rb") as content:
        return content.read(64).startswith(_POINTERS)


def _bar(files: Iterable[pathlib.Path], what: str) -> tqdm:
    total = sum(file.stat().st_size for file in files if file.is_file())
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=2)


def _hash(tables: dict[str, pathlib.Path]) -> str:
    whole = hashlib.sha256()
    with _bar(tables.values(), "check archive") as bar:
        for name, file in tables.items():
            sha = hashlib.sha256()
            if file.is_file():
                with file.open("rb") as content:
                    while chunk := content.read(_CHUNK):
                        sha.update(chunk)
                        bar.update(len(chunk))
            whole.update(f"{name}\0{sha.hexdigest()}\n".encode())
    return whole.hexdigest()


def _missing(names: Iterable[str], categories: set[str], years: set[str]) -> tuple[str, ...]:
    """What has no file of its own. A paper is there if its year's is, or one of its categories'."""
    stems = {name.rpartition("/")[2].partition(".tsv")[0] for name in names}
    of_years = {stem for stem in stems if _YEAR.fullmatch(stem)}
    absent_categories = sorted(categories - stems)
    if not of_years:
        # Without a file by category, these are tables of the user's own.
        return tuple(absent_categories) if categories & stems else ()
    latest = max(int(year) for year in years | of_years)
    absent_years = _runs([n for n in range(_FIRST, latest + 1) if str(n) not in of_years])
    if not categories & stems:
        return absent_years
    return (*absent_years, *absent_categories) if absent_years and absent_categories else ()


def _runs(numbers: list[int]) -> tuple[str, ...]:
    """Ascending numbers in words, ``1995 to 2019`` for those without a gap."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return tuple(str(a) if a == b else f"{a} to {b}" for a, b in runs)


class _Counted(io.RawIOBase):
    """A file that moves a progress bar as it is read."""

    def __init__(self, file: IO[bytes], bar: tqdm) -> None:
        self._file, self._bar = file, bar

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        found = self._file.read(len(buffer))
        buffer[: len(found)] = found
        self._bar.update(len(found))
        return len(found)


def _texts(file: pathlib.Path, raw: _Counted) -> Iterator[tuple[str, IO[str]]]:
    """The tables of a file: what to call each, and its lines."""

    def text(stream: Any) -> IO[str]:
        return io.TextIOWrapper(stream, encoding="utf-8", newline="")

    if file.name.endswith(".xz"):
        with lzma.LZMAFile(raw) as stream:  # type: ignore[arg-type]
            yield "", text(stream)
    elif file.name.endswith(".zip"):
        with zipfile.ZipFile(raw) as packed:
            members = [name for name in packed.namelist() if name.endswith(".tsv")]
            if not members:
                raise zipfile.BadZipFile("it holds no .tsv; unpack it and name the folder")
            for member in members:
                where = "" if len(members) == 1 else f" ({member})"
                yield where, text(packed.open(member))
    else:
        yield "", text(io.BufferedReader(raw, _CHUNK))


@contextlib.contextmanager
def _long_fields() -> Iterator[None]:
    """``csv`` with room for thousands of authors."""
    before = csv.field_size_limit(_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


class _Rows:
    """The distinct papers of the files, counted; a stream.

    Attributes:
        seen: of each paper's id, what tells whether another row says the same.
        categories, years: all that occur.
    """

    def __init__(self, tables: dict[str, pathlib.Path], *, skip: bool) -> None:
        self.tables, self.skip = tables, skip
        self.seen: dict[str, int] = {}
        self.differing: set[str] = set()
        self.repeated = self.skipped = 0
        self.first_skipped: list[tuple[str, str]] = []
        self.categories: set[str] = set()
        self.years: set[str] = set()

    def __iter__(self) -> Iterator[Paper]:
        with _long_fields(), _bar(self.tables.values(), "read archive") as bar:
            for name, file in self.tables.items():
                yield from self._file(name, file, bar)

    def _file(self, name: str, file: pathlib.Path, bar: tqdm) -> Iterator[Paper]:
        where, line = name, 0
        try:
            with file.open("rb") as content:
                for member, text in _texts(file, _Counted(content, bar)):
                    where, line = name + member, 0
                    rows = _Table(text)
                    for line, fields in rows:
                        if isinstance(fields, BadRecord):
                            self._refuse(f"{where}, line {line}", str(fields))
                            continue
                        paper = self._paper(f"{where}, line {line}", fields)
                        if paper is not None:
                            yield paper
        except BadRecord as error:  # of a table that is of another kind
            self._refuse(where, str(error))
        except (EOFError, lzma.LZMAError, zipfile.BadZipFile, zlib.error) as error:
            self._refuse(f"{where}, after line {line}", f"the file is damaged ({error})")
        except UnicodeDecodeError as error:
            self._refuse(f"{where}, after line {line}", f"it is not UTF-8 ({error})")

    def _paper(self, where: str, fields: dict[str, str]) -> Paper | None:
        """The paper of a row, unless it has none or one that is known."""
        try:
            paper = parse_row(fields)
        except BadRecord as error:
            self._refuse(where, str(error))
            return None
        self.categories.update(fields["categories"].split(","))
        if _YEAR.fullmatch(year := fields.get("created", "")[:4]):
            self.years.add(year)
        content = hash((tuple(paper.authors), paper.abstract, paper.label))
        known = self.seen.get(paper.id)
        if known is None:
            self.seen[paper.id] = content
            return paper
        self.repeated += 1
        if known != content:
            self.differing.add(paper.id)
        return None

    def _refuse(self, where: str, reason: str) -> None:
        if not self.skip:
            raise ValueError(
                f"{where}: {reason}. Repair it, or leave such lines out with on_error=skip"
            )
        self.skipped += 1
        if len(self.first_skipped) < SHOWN:
            self.first_skipped.append((where, reason))


class _Table:
    """The rows of a table with the number of their first line, as fields by column."""

    def __init__(self, text: IO[str]) -> None:
        self._rows = csv.reader(text, delimiter="\t", strict=True)
        self._columns = next(self._rows, [])
        if absent := [name for name in ROW_FIELDS if name not in self._columns]:
            raise BadRecord(f"its first line names no column {', '.join(absent)}")

    def __iter__(self) -> Iterator[tuple[int, dict[str, str] | BadRecord]]:
        while True:
            line = self._rows.line_num + 1
            try:
                fields = next(self._rows, None)
            except csv.Error as error:
                # A quotation mark that is not closed takes the next lines with it.
                last = self._rows.line_num
                lines = "it is" if last <= line else f"up to line {last} there is"
                yield line, BadRecord(f"{lines} no row of a table ({error})")
                continue
            if fields is None:
                return
            if not fields:  # nothing stands in the line
                continue
            if len(fields) != len(self._columns):
                yield line, BadRecord(f"it has {len(fields)} fields, not {len(self._columns)}")
                continue
            yield line, dict(zip(self._columns, fields, strict=True))
