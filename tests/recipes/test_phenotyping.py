"""The reader of phenotyping tables, on small files of the real form."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from recipes.data.multilabel import ConditionGroups
from recipes.data.phenotypes import INFARCTION, PHENOTYPES, PNEUMONIA
from recipes.data.phenotyping import PAPER_GROUPS, phenotyping
from tests.helpers.phenotyping_files import (
    FEATURES,
    random_table,
    write_csv,
    write_parquet,
    write_parts,
)

SMALL = ConditionGroups(conditions=(PNEUMONIA, INFARCTION), size=8, test_size=4)


def _read(root, **changes):
    return phenotyping(root, **{"groups": SMALL, **changes})


@pytest.fixture
def tables(tmp_path):
    return write_parts(tmp_path)


def test_the_labels_are_the_benchmarks():
    """In alphabetical order, as its listfiles are written from sorted names."""
    assert len(PHENOTYPES) == 25
    assert list(PHENOTYPES) == sorted(PHENOTYPES)
    assert PNEUMONIA.startswith("Pneumonia")
    assert INFARCTION == "Acute myocardial infarction"
    assert (PAPER_GROUPS.size, PAPER_GROUPS.test_size) == (1000, 400)


@pytest.mark.parametrize("parquet", [False, True], ids=["csv", "parquet"])
def test_the_values_are_those_written(tmp_path, parquet):
    tables = write_parts(tmp_path, parquet=parquet)
    data = _read(tmp_path)
    assert data.features == FEATURES
    assert data.labels == PHENOTYPES
    for part, rows in (("train", data.train), ("test", data.test)):
        features, labels = rows.tensors
        written = np.array([tables[part][name] for name in FEATURES], np.float32).T
        assert np.array_equal(features.numpy(), written)
        assert labels.T.tolist() == [tables[part][name] for name in PHENOTYPES]
        assert features.dtype == labels.dtype == torch.float32


def test_both_formats_give_the_same_data_set(tmp_path_factory):
    one, two = tmp_path_factory.mktemp("csv"), tmp_path_factory.mktemp("parquet")
    write_parts(one)
    tables = write_parts(two, parquet=True)
    (two / "train.parquet").unlink()
    for shard, rows in enumerate((slice(0, 70), slice(70, None))):
        part = {name: column[rows] for name, column in tables["train"].items()}
        write_parquet(two / f"train-0000{shard}-of-00002.parquet", part)
    first, second = _read(one), _read(two)
    assert first.train.fingerprint == second.train.fingerprint
    assert first.test.fingerprint == second.test.fingerprint
    assert first.train.fingerprint != first.test.fingerprint


def test_the_fingerprint_notices_any_cell(tmp_path, tables):
    before = _read(tmp_path).train.fingerprint
    tables["train"][FEATURES[0]][117] += 1
    write_csv(tmp_path / "train.csv", tables["train"])
    assert _read(tmp_path).train.fingerprint != before


def test_the_order_of_columns_does_not_matter(tmp_path, tables):
    before = _read(tmp_path).test.fingerprint
    write_csv(tmp_path / "test.csv", dict(reversed(tables["test"].items())))
    assert _read(tmp_path).test.fingerprint == before


def test_the_validation_part_is_appended_if_asked_for(tmp_path, tables):
    more = random_table(30, part="val", seed=3)
    write_csv(tmp_path / "val.csv", more)
    assert len(_read(tmp_path).train) == 200
    both = _read(tmp_path, train_on_val=True).train.tensors[0]
    assert both[200:, 0].tolist() == pytest.approx(more[FEATURES[0]])


def test_other_labels_by_name(tmp_path):
    for part in ("train", "test"):
        table = {"ill": [0, 1, 1], "heart rate": [60, 70, 80], "tired": [0, 1, 0]}
        write_csv(tmp_path / f"{part}.csv", table)
    groups = ConditionGroups(conditions=("tired",), size=1, test_size=1)
    data = phenotyping(tmp_path, labels=["tired", "ill"], groups=groups, id_column=None)
    assert data.features == ("heart rate",)
    assert data.train.tensors[1].tolist() == [[0, 0], [1, 1], [0, 1]]


def test_missing_values_are_a_public_constant(tmp_path, tables):
    column = tables["train"][FEATURES[1]]
    column[3], column[5], column[7] = None, "NA", "NaN"
    write_csv(tmp_path / "train.csv", tables["train"])
    plain = _read(tmp_path).train.tensors[0]
    assert plain[[3, 5, 7], 1].tolist() == [0, 0, 0]
    marked = _read(tmp_path, missing=-2.0, indicators=True)
    features = marked.train.tensors[0]
    assert features.shape == (200, 6)
    assert features[[3, 5, 7], 1].tolist() == [-2, -2, -2]
    # One indicator for every feature, in the test set too: which ones depends on no data.
    assert marked.features[3:] == tuple(f"{name} is missing" for name in FEATURES)
    assert features[:, 4].nonzero().flatten().tolist() == [3, 5, 7]
    assert not features[:, [3, 5]].any()
    assert marked.test.tensors[0].shape == (100, 6)


def test_null_is_missing_in_parquet(tmp_path):
    tables = write_parts(tmp_path, parquet=True)
    tables["train"][FEATURES[0]][2] = None
    write_parquet(tmp_path / "train.parquet", tables["train"])
    assert _read(tmp_path, missing=9.0).train.tensors[0][2, 0] == 9


def test_public_bounds_are_mapped_to_one_and_clipped(tmp_path, tables):
    tables["train"][FEATURES[0]][:5] = [0, 175, 350, 700, None]
    write_csv(tmp_path / "train.csv", tables["train"])
    bounds = {FEATURES[0]: [0, 350], FEATURES[1]: None, FEATURES[2]: None}
    (tmp_path / "scaling.json").write_text(json.dumps(bounds))
    features = _read(tmp_path, scaling="scaling.json").train.tensors[0]
    assert features[:5, 0].tolist() == [-1, 0, 1, 3, 0]
    assert features[:, 1].tolist() == pytest.approx(tables["train"][FEATURES[1]])
    clipped = _read(tmp_path, scaling="scaling.json", clip=1.5).train.tensors[0]
    assert clipped[:5, 0].tolist() == [-1, 0, 1, 1.5, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds no object"),
        ('{"Weight": [0, 1]}', "lacks the feature 'Heart Rate mean' .2 missing"),
        ('{"a": null, "Heart Rate mean": null, "pH last, first day": null, "Weight": null}', "'a'"),
        ('{"Heart Rate mean": [5, 5], "pH last, first day": null, "Weight": null}', r"\[5, 5\]"),
        ('{"Heart Rate mean": [0, NaN], "pH last, first day": null, "Weight": null}', "NaN"),
        ('{"Heart Rate mean": 3, "pH last, first day": null, "Weight": null}', "has 3"),
    ],
)
def test_bounds_that_cannot_be_used(tmp_path, tables, text, message):
    (tmp_path / "scaling.json").write_text(text)
    with pytest.raises(ValueError, match=rf"scaling\.json.*{message}"):
        _read(tmp_path, scaling="scaling.json")


def test_bounds_that_are_not_there(tmp_path, tables):
    with pytest.raises(FileNotFoundError, match=r"scaling: there is no file .*bounds\.json"):
        _read(tmp_path, scaling="bounds.json")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (FEATURES[1], "high", "'high' is no number"),
        (FEATURES[1], "inf", "inf is not finite"),
        (FEATURES[1], "1e300", "too large for float32"),
        (FEATURES[1], "true", "'true' is no number"),
        ("Shock", 2, "the label is 2"),
        ("Shock", 0.5, "the label is 0.5"),
        ("Shock", None, "the label is missing"),
        ("Shock", "yes", "'yes' is no number"),
        ("stay", None, "is empty"),
        ("stay", "train0_episode1_timeseries.csv", r"is in .*train\.csv: row 1 already"),
    ],
)
def test_cells_that_cannot_be_used_are_named(tmp_path, tables, name, value, message):
    tables["test"][name][6] = value
    write_csv(tmp_path / "test.csv", tables["test"])
    with pytest.raises(ValueError, match=rf"test\.csv: row 7, column '{name}'.*{message}"):
        _read(tmp_path)


def test_parquet_columns_of_other_types_are_named(tmp_path):
    tables = write_parts(tmp_path, parquet=True)
    write_parquet(tmp_path / "test.parquet", {**tables["test"], FEATURES[2]: [[1.0]] * 100})
    with pytest.raises(ValueError, match=r"test\.parquet: column 'Weight' holds list.* not num"):
        _read(tmp_path)


def test_missing_files_say_what_belongs_there(tmp_path, tables):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        _read(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"neither val\.csv nor val\*\.parquet"):
        _read(tmp_path, train_on_val=True)
    (tmp_path / "test.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither test\.csv nor test\*\.parquet"):
        _read(tmp_path)


def test_two_formats_in_one_folder_are_a_question(tmp_path, tables):
    write_parquet(tmp_path / "test.parquet", tables["test"])
    with pytest.raises(ValueError, match=r"both test\.csv and test\*\.parquet"):
        _read(tmp_path)


def _without(table, *names):
    return {name: column for name, column in table.items() if name not in names}


def test_columns_that_are_missing_or_too_many_are_named(tmp_path, tables):
    train, test = tables["train"], tables["test"]
    cases = [
        (_without(train, "Shock"), test, r"train\.csv lacks the label column 'Shock' \(1 of 25"),
        (_without(train, "stay"), test, r"train\.csv has no column 'stay'; set id_column"),
        (_without(train, *FEATURES), test, r"train\.csv has no features"),
        (train, _without(test, "Shock"), r"train\.csv has a column 'Shock' that .*test\.csv lacks"),
        (train, {**test, "age": [1] * 100}, r"test\.csv has a column 'age' that .*train\.csv la"),
        (train, {name: [] for name in test}, r"test\.csv holds no rows"),
    ]
    for train_table, test_table, message in cases:
        write_csv(tmp_path / "train.csv", train_table)
        write_csv(tmp_path / "test.csv", test_table)
        with pytest.raises(ValueError, match=message):
            _read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("stay,a,b,a\nx,1,2,3\n", "more than one column 'a'"),
        ("stay,a,b\nx,1,2\ny,3\n", "cannot be read as CSV: .*Row #3: Expected 3 columns, got 2"),
    ],
)
def test_damaged_csv_files_are_named(tmp_path, tables, text, message):
    (tmp_path / "train.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"train\.csv .*{message}"):
        _read(tmp_path)


def test_text_of_another_encoding_is_named(tmp_path, tables):
    (tmp_path / "train.csv").write_bytes(b"stay,a\nx,\xff\n")
    with pytest.raises(ValueError, match=r"train\.csv cannot be read as CSV: .*(UTF8|utf-8)"):
        _read(tmp_path)


def test_a_damaged_parquet_file_is_named(tmp_path):
    write_parts(tmp_path, parquet=True)
    whole = (tmp_path / "train.parquet").read_bytes()
    (tmp_path / "train.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"train\.parquet cannot be read as parquet: \S"):
        _read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": []}, r"labels=\[\]"),
        ({"labels": ["Shock", "Shock"]}, "each once"),
        ({"clip": 0.0}, r"clip=0\.0"),
        ({"missing": float("nan")}, "missing=nan"),
    ],
)
def test_impossible_arguments(tmp_path, tables, changes, message):
    with pytest.raises(ValueError, match=message):
        _read(tmp_path, **changes)
