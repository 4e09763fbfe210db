"""Results of scripts: what a cell says of a row, and what a file keeps."""

from __future__ import annotations

import json
import math
import pathlib

import pytest

from scripts.results import Table, cell, pivoted, publish, read, rows_of, shown, words

ROW = {
    "name": "MLP", "seconds": 0.25, "bytes": 3 << 20, "few": None, "kinds": ["Linear", "GRU"],
    "ratio": {"median": 1.5, "not ahead": 12345.6}, "proven": True, "share": 0.123,
}  # fmt: skip


@pytest.mark.parametrize(
    ("templates", "text"),
    [
        (("{name}",), "MLP"),
        (("`{name}`, {seconds:.2f}",), "`MLP`, 0.25"),
        (("{ratio.median:.1f} and {ratio.not ahead:,.0f}",), "1.5 and 12,346"),
        (("{bytes:MiB .1f} MiB",), "3.0 MiB"),
        (("{share:% .1f}",), "12.3"),
        (("{seconds:ms figures3} ms",), "250 ms"),
        (("{kinds}",), "`Linear`, `GRU`"),
        (("{proven}",), "yes"),
        (("{few}",), "–"),
        (("{few}", "{ratio.most}", "{name.first}", "{name}"), "MLP"),
        (("{few}", ""), ""),
    ],
)
def test_a_cell_is_the_first_template_whose_fields_are_there(templates, text):
    assert cell(ROW, *templates) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.2, "200 ms"), (2.0, "2 s"), (64.63, "64.6 s"), (528.08, "528 s"), (3.9e-6, "< 1 ms")],
)
def test_times(value, text):
    assert shown(value, "time") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (8, "8 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (120_000_000, "120 MB"),
        (2.52e9, "2.52 GB"),
        (4e12, "4,000 GB"),
    ],
)
def test_bytes(value, text):
    assert shown(value, "bytes") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1.23456, "1.235"), (12345.6, "12,346"), (1e-6, "1e-06"), (math.inf, "∞")],
)
def test_significant_digits(value, text):
    assert shown(value, "figures4") == text


def test_numbers_stand_to_the_right():
    table = Table((("what", "{name}"), ("s", "{seconds}", "")), [ROW, {"name": "none"}])
    assert table.markdown().splitlines() == [
        "| what | s |", "| --- | ---: |", "| MLP | 0.25 |", "| none |  |"
    ]  # fmt: skip


def test_a_pivot_has_a_column_for_every_value():
    rows = [
        {"sigma": sigma, "by": by, "epsilon": sigma * (1 + len(by))}
        for sigma, by in ((2.0, "a"), (1.0, "a"), (1.0, "bb"))
    ]
    assert pivoted(rows, {"sigma": "σ"}, "by", "{@.epsilon:.1f}").markdown().splitlines()[::2] == [
        "| σ | a | bb |", "| 1 | 2.0 | 3.0 |"
    ]  # fmt: skip
    assert "| 2 | 4.0 |  |" in pivoted(rows, {"sigma": "σ"}, "by", "{@.epsilon:.1f}").markdown()


def test_a_file_has_a_row_a_line_and_is_read_as_it_was_written(tmp_path, capsys):
    path, rows = tmp_path / "x.json", [{"a": 1, "b": {"c": [2, 3]}}, {"a": math.inf, "b": {}}]
    tables = {"x": Table([("A", "{a}")], rows), "y": Table([("B", "{b.c}", "none")], rows)}
    publish(path, tables, script=__file__, machine={"cores": 2, "load": 1.25}, raw=[[1, 2], [3]])
    assert "| none |" in capsys.readouterr().out
    lines = path.read_text(encoding="utf-8").splitlines()
    assert '    {"a": 1, "b": {"c": [2, 3]}},' in lines
    assert sum('"a": 1' in line for line in lines) == 1  # both tables show the same rows
    tree = read(path)
    assert tree["script"] == "tests/scripts/test_results.py"
    assert tree["raw"] == [[1, 2], [3]]
    assert rows_of(path, "y") == rows_of(path, "x") == rows
    assert [table.markdown() for table in tree["tables"].values()] == [
        table.markdown() for table in tables.values()
    ]
    assert words(tree["machine"]) == "2 cores, load before the run 1.2"
    assert json.loads(path.read_text(encoding="utf-8"))["tables"]["y"]["rows"] == "x"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_not_there_has_no_rows(tmp_path: pathlib.Path) -> None:
    assert rows_of(tmp_path / "x.json", "x") == rows_of(None, "x") == []
    publish(None, {"x": Table([("A", "{a}")], [])}, script=__file__)
