"""Small tables in the form of the MIMIC-III phenotyping benchmark."""

from __future__ import annotations

import csv
import pathlib
from typing import Any

import numpy as np

from recipes.data.phenotypes import PHENOTYPES

FEATURES = ("Heart Rate mean", "pH last, first day", "Weight")
Table = dict[str, list[Any]]


def random_table(rows: int, *, part: str = "train", seed: int = 0) -> Table:
    """Columns by name: identifiers, three features, the 25 labels; every tenth row has none."""
    generator = np.random.default_rng(seed)
    labels = (generator.random((rows, len(PHENOTYPES))) < 0.3).astype(int)
    labels[::10] = 0
    table: Table = {"stay": [f"{part}{row}_episode1_timeseries.csv" for row in range(rows)]}
    for name in FEATURES:
        table[name] = generator.normal(size=rows).round(4).tolist()
    table |= dict(zip(PHENOTYPES, labels.T.tolist(), strict=True))
    return table


def write_csv(path: pathlib.Path, table: Table) -> None:
    """A header and one line a row; ``None`` is an empty cell."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))


def write_parquet(path: pathlib.Path, table: Table) -> None:
    """A parquet file with one column a name; ``None`` is null."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(table), path)


def write_parts(
    root: pathlib.Path, *, train: int = 200, test: int = 100, parquet: bool = False
) -> dict[str, Table]:
    """Training and test files; returns their columns."""
    tables = {
        "train": random_table(train, part="train", seed=1),
        "test": random_table(test, part="test", seed=2),
    }
    for part, table in tables.items():
        if parquet:
            write_parquet(root / f"{part}.parquet", table)
        else:
            write_csv(root / f"{part}.csv", table)
    return tables
