"""Columns of numbers in CSV and parquet files, read strictly through pyarrow."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt

from recipes.data.packages import package
from recipes.data.parquet import parquet_files

_PURPOSE = "reading tables"


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
    """The columns of one file.

    Attributes:
        path: the file.
        names: of the columns, in the file's order; no two are alike.
        rows: their number, without a header.
    """

    path: pathlib.Path
    names: tuple[str, ...]
    rows: int
    _table: Any

    def numbers(self, name: str) -> npt.NDArray[np.float64]:
        """A column, shape (rows,); NaN where a cell is empty or says NA, null or NaN.

        Raises:
            ValueError: naming the file, the column, and the first row that holds no number.
        """
        pa, compute = package("pyarrow", purpose=_PURPOSE), _compute()
        column = self._table[name]
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column = compute.utf8_trim_whitespace(column)
        try:
            numbers = compute.cast(column, pa.float64(), safe=False)
        except pa.ArrowInvalid as error:
            raise ValueError(self._not_a_number(name, str(error))) from error
        except pa.ArrowNotImplementedError as error:
            raise ValueError(
                f"{self.path}: column {name!r} holds {column.type} values, not numbers"
            ) from error
        # A null becomes NaN; copied, as arrow's own memory cannot be written to.
        return np.array(numbers.to_numpy(zero_copy_only=False), np.float64)

    def texts(self, name: str) -> list[str]:
        """A column as text, e.g. identifiers.

        Raises:
            ValueError: naming the file, the column, and the first row that is empty.
        """
        values = self._table[name].to_pylist()
        if None in values:
            raise ValueError(f"{self.where(values.index(None))}, column {name!r} is empty")
        return [str(value) for value in values]

    def where(self, index: int) -> str:
        """The name of row ``index`` (from 0) in messages: file and row, counted from 1."""
        return f"{self.path}: row {index + 1}"

    def _not_a_number(self, name: str, reason: str) -> str:
        for index, value in enumerate(self._table[name].to_pylist()):
            try:
                float(value or 0)
            except ValueError:
                return (
                    f"{self.where(index)}, column {name!r}: {value!r} is no number; leave the cell "
                    "empty where a value is missing"
                )
        return f"{self.path}: column {name!r}: {reason}"


def read_part(folder: pathlib.Path, part: str) -> list[Columns]:
    """The files of one part of the data: ``<part>.csv``, or ``<part>*.parquet`` in order.

    Raises:
        FileNotFoundError: if there is neither.
        ValueError: if there are both, or a file is damaged, empty, or has two columns of one name.
    """
    text = folder / f"{part}.csv"
    binary = any(folder.glob(f"{part}*.parquet"))
    if not text.is_file() and not binary:
        raise FileNotFoundError(
            f"{folder} holds neither {part}.csv nor {part}*.parquet; put one of them there, a "
            "table of one row an example with the names of its columns"
        )
    if text.is_file() and binary:
        raise ValueError(f"{folder} holds both {part}.csv and {part}*.parquet; remove one of them")
    if text.is_file():
        return [_read_csv(text)]
    return [_read_parquet(path) for path in parquet_files(folder, part)]


def _read_csv(path: pathlib.Path) -> Columns:
    pa, arrow = package("pyarrow", purpose=_PURPOSE), package("pyarrow.csv", purpose=_PURPOSE)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file), [])
        _check_names(path, names)
        table = arrow.read_csv(
            path,
            # One thread: only then do its messages name the row.
            read_options=arrow.ReadOptions(use_threads=False),
            # As text: a type that is guessed would make a date of one column, a number of another.
            convert_options=arrow.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True
            ),
        )
    except (UnicodeDecodeError, csv.Error, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}") from error
    return _checked(path, table)


def _read_parquet(path: pathlib.Path) -> Columns:
    parquet = package("pyarrow.parquet", purpose=_PURPOSE)
    try:
        table = parquet.ParquetFile(path).read()
    except Exception as error:  # pyarrow's own kinds, and the system's
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{path} cannot be read as parquet: {reason}") from error
    _check_names(path, table.column_names)
    return _checked(path, table)


def _check_names(path: pathlib.Path, names: list[str]) -> None:
    if not names:
        raise ValueError(f"{path} is empty; its first line has to name the columns")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path} has more than one column {twice[0]!r}; rename or remove one")


def _checked(path: pathlib.Path, table: Any) -> Columns:
    if not table.num_rows:
        raise ValueError(f"{path} holds no rows")
    return Columns(path, tuple(table.column_names), table.num_rows, table)


def _compute() -> Any:
    return package("pyarrow.compute", purpose=_PURPOSE)
