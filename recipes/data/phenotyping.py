"""Tables of features and labels as the MIMIC-III phenotyping benchmark gives them, from disk."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from recipes.data.bounds import read_bounds
from recipes.data.columns import Columns, read_part
from recipes.data.multilabel import ConditionGroups, LabelledRows, MultiLabel, grouped
from recipes.data.parts import existing_folder
from recipes.data.phenotypes import INFARCTION, PHENOTYPES, PNEUMONIA

PAPER_GROUPS = ConditionGroups(conditions=(PNEUMONIA, INFARCTION))
Array = npt.NDArray[np.float32]


def phenotyping(
    root: str | pathlib.Path,
    *,
    labels: Sequence[str] = PHENOTYPES,
    groups: ConditionGroups = PAPER_GROUPS,
    id_column: str | None = "stay",
    scaling: str | None = None,
    clip: float | None = None,
    missing: float = 0.0,
    indicators: bool = False,
    train_on_val: bool = False,
    foreseen: Callable[[int], None] = lambda rows: None,
) -> MultiLabel:
    """A training and a test table; what is protected is a row (an ICU stay, not a patient).

    ``root`` holds ``train.csv`` and ``test.csv``, or ``train*.parquet`` and ``test*.parquet``. Each
    has one row an example: an identifier, the labels (0 or 1), and any number of features, which
    are all other columns. The order of the columns does not matter. Nothing is downloaded; the
    benchmark (Harutyunyan et al. 2019) makes features and labels from MIMIC-III, to which PhysioNet
    grants access.

    Features have to be on a common scale by **public** constants: those of ``scaling``, or ones
    used before. Means and deviations of the training data, as scikit-learn's StandardScaler takes,
    would leak past the guarantee. For the same reason indicators are made for every feature and not
    for those only that happen to have missing values.

    Args:
        root: the folder.
        labels: names of the label columns.
        groups: of which rows to report; the default is the paper's.
        id_column: names the rows and is no feature; ``None`` if there is no such column.
        scaling: JSON file in ``root`` with public bounds, see ``read_bounds``;
            they are mapped to -1 and 1.
        clip: scaled values beyond ±clip become ±clip.
        missing: stands for missing values after scaling.
        indicators: add a feature to each, 1 where it is missing and 0 elsewhere.
        train_on_val: append the rows of ``val.csv`` or ``val*.parquet`` to the training set.
        foreseen: is told the number of training rows before their cells are made numbers.

    Raises:
        FileNotFoundError: if a folder or file is missing; the message says what belongs where.
        ValueError: naming the argument, or the file, row and column, with the value and what it
            should be.
    """
    if not labels or len(set(labels)) != len(labels):
        raise ValueError(f"labels={list(labels)}: name at least one column, and each once")
    if clip is not None and not 0 < clip < np.inf:
        raise ValueError(f"clip={clip}: must be positive and finite, or null")
    if not np.isfinite(missing):
        raise ValueError(f"missing={missing}: must be finite, e.g. 0")
    folder = existing_folder(root)
    train = read_part(folder, "train")
    if train_on_val:
        train += read_part(folder, "val")
    foreseen(sum(file.rows for file in train))
    test = read_part(folder, "test")
    features = _features(train[0], labels, id_column)
    for other in [*train[1:], *test]:
        _check_alike(train[0], other)
    if id_column is not None:
        _check_identifiers([*train, *test], id_column)
    bounds = None if scaling is None else read_bounds(folder / scaling, features)

    def rows(files: list[Columns]) -> LabelledRows:
        values = np.concatenate([_read_features(file, features, bounds) for file in files])
        absent = np.isnan(values)
        if clip is not None:
            np.clip(values, -clip, clip, out=values)
        values[absent] = missing
        if indicators:
            values = np.concatenate([values, absent.astype(np.float32)], axis=1)
        targets = np.concatenate([_read_labels(file, labels) for file in files])
        return LabelledRows(torch.from_numpy(values), torch.from_numpy(targets))

    names = [*features, *(f"{name} is missing" for name in features if indicators)]
    return grouped(rows(train), rows(test), features=names, labels=labels, groups=groups)


def _features(file: Columns, labels: Sequence[str], id_column: str | None) -> list[str]:
    """All columns that are neither a label nor the identifier."""
    if id_column is not None and id_column not in file.names:
        raise ValueError(
            f"{file.path} has no column {id_column!r}; set id_column to the column that names the "
            "rows, or to null if there is none"
        )
    if lacking := [name for name in labels if name not in file.names]:
        raise ValueError(
            f"{file.path} lacks the label column {lacking[0]!r} ({len(lacking)} of {len(labels)} "
            "labels are missing); name the label columns in labels"
        )
    features = [name for name in file.names if name not in labels and name != id_column]
    if not features:
        raise ValueError(f"{file.path} has no features: all its columns are labels or identifiers")
    return features


def _check_alike(first: Columns, other: Columns) -> None:
    for have, lack in ((first, other), (other, first)):
        if extra := [name for name in have.names if name not in lack.names]:
            raise ValueError(
                f"{have.path} has a column {extra[0]!r} that {lack.path} lacks ({len(extra)} such "
                "columns); all files need the same ones"
            )


def _check_identifiers(files: list[Columns], column: str) -> None:
    """One row a name: a second row would double what the guarantee says about the first."""
    seen: dict[str, str] = {}
    for file in files:
        for index, name in enumerate(file.texts(column)):
            if name in seen:
                raise ValueError(
                    f"{file.where(index)}, column {column!r}: {name!r} is in {seen[name]} already; "
                    "every row of training and test set needs a name of its own"
                )
            seen[name] = file.where(index)


def _read_features(
    file: Columns,
    names: Sequence[str],
    bounds: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None,
) -> Array:
    """Scaled values, (rows, features); NaN where missing."""
    values = np.empty((file.rows, len(names)), np.float32)
    for index, name in enumerate(names):
        column = file.numbers(name)
        if np.isinf(column).any():
            row = int(np.isinf(column).argmax())
            raise ValueError(f"{file.where(row)}, column {name!r}: {column[row]} is not finite")
        if bounds is not None:
            lower, upper = bounds[0][index], bounds[1][index]
            column = 2 * (column - lower) / (upper - lower) - 1
        if (np.abs(column) > np.finfo(np.float32).max).any():
            row = int((np.abs(column) > np.finfo(np.float32).max).argmax())
            raise ValueError(
                f"{file.where(row)}, column {name!r}: {column[row]:g} is too large for float32"
            )
        values[:, index] = column
    return values


def _read_labels(file: Columns, names: Sequence[str]) -> Array:
    """Zeros and ones, (rows, labels)."""
    values = np.empty((file.rows, len(names)), np.float32)
    for index, name in enumerate(names):
        column = file.numbers(name)
        if not (good := (column == 0) | (column == 1)).all():
            row = int(good.argmin())
            what = "is missing" if np.isnan(column[row]) else f"is {column[row]:g}"
            raise ValueError(
                f"{file.where(row)}, column {name!r}: the label {what}; every label has to be 0 "
                "or 1"
            )
        values[:, index] = column
    return values
