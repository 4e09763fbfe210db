"""What a trainer declares, and the first page of the statement."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re

import numpy as np
import pytest
from scipy.stats import norm

from dptrain.accounting import TradeOff, account, compose_runs, profile
from dptrain.core import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import RunFacts, privacy_report, schema, verify_statement
from dptrain.sampling import Poisson
from dptrain.strategies import Identity
from tests.helpers.json_schema import errors

RUN = MatrixMechanism(
    scheme=Poisson(probability=1.0, dataset_size=1000, steps=4),
    strategy=Identity(),
    noise_multiplier=4.0,
)
STATED = account(RUN, delta=1e-5)
ALL = RunFacts(
    trusted="the hospital | its staff",
    released=("the weights",),
    withheld=("the logs",),
    max_grad_norm=1.5,
    clipping="Flat",
    optimizer="sgd, lr=0.5",
    augmentation="none",
    runs=2,
    choice=compose_runs([TradeOff.of(STATED)] * 2, delta=1e-4),
    public_data="ImageNet-1k",
    public_weights="a ResNet",
    commit="3e9c812a",
    configuration="0" * 64,
    data="CIFAR-10, as of 2009",
    data_commitment="f" * 64,
    model="ResNet-9 | 1.0",
    organization="a hospital",
)


def written(folder, facts, **changes):
    guarantee = dataclasses.replace(STATED, **changes)
    curve = None if changes else profile(RUN, np.linspace(0, 5, 201))
    as_json, as_text = privacy_report(guarantee, folder, profile=curve, facts=facts)
    return json.loads(as_json.read_text(encoding="utf-8")), as_text.read_text(encoding="utf-8")


def test_every_fact_is_in_both_files_and_none_is_called_verified(tmp_path):
    value, text = written(tmp_path, ALL)
    assert list(errors(value, schema())) == []
    found = verify_statement(value)
    assert found.reproduced
    for field in dataclasses.fields(RunFacts):
        assert any(line.startswith(f"run.{field.name}: ") for line in found.declared), field.name
        assert not any(line.startswith(f"run.{field.name}") for line in found.verified)
    assert set(value["run"]) == {field.name for field in dataclasses.fields(RunFacts)}
    declared = text.partition("## What was declared")[2].partition("\n## ")[0]
    for told in ("1.5", "Flat", "sgd, lr=0.5", "ImageNet-1k", "a ResNet", "3e9c812a", "f" * 64):
        assert f"| {told} |" in declared
    first = text.partition("## The guarantee")[0]
    assert "The hospital | its staff." in first
    assert "that it is about the model “ResNet-9 | 1.0” of “a hospital”.\n" in first
    assert str(ALL.choice) in first
    assert "|---|" not in first  # no tables on the first page


def test_what_was_not_said_is_called_not_stated(tmp_path):
    value, text = written(tmp_path, RunFacts())
    assert list(errors(value, schema())) == []
    declared = text.partition("## What was declared")[2].partition("\n## ")[0]
    assert declared.count("| not stated |") == 13
    assert "It was not stated how many runs" in text
    assert value["run"]["withheld"]
    assert "Which model it is about" not in text
    bare, plain = written(tmp_path, None)
    assert "run" not in bare
    assert "What was declared" not in plain


def test_the_first_page_says_what_a_gaussian_test_reaches(tmp_path):
    """The run is 1/2-GDP: of 1 % false positives Φ(Φ⁻¹(.01) + .5) true ones."""
    _, text = written(tmp_path, None)
    truth = 100 * norm.cdf(norm.ppf(0.01) + 0.5)
    (told,) = re.findall(r"it detects at most ([\d.]+) % of those", text)
    assert truth <= float(told) <= truth + 0.05
    assert "a false alarm for 1 % of the contributions" in text


@pytest.mark.parametrize(
    ("changes", "words", "absent"),
    [
        ({"kind": Kind.ESTIMATE}, "must not be published as a guarantee", "noise limits"),
        ({"epsilon": math.inf}, "**What is promised.** Nothing.", "noise limits"),
    ],
)
def test_the_first_page_promises_nothing_that_is_not_shown(tmp_path, changes, words, absent):
    first = written(tmp_path, None, **changes)[1].partition("## The guarantee")[0]
    assert words in first
    assert absent not in first


def test_a_statement_has_its_date(tmp_path):
    """That of the day in UTC, or one that is given; whatever it is, the rest stays the same."""
    day = datetime.date(2026, 3, 2)
    dated = [
        privacy_report(STATED, tmp_path / f"{number}", date=date)
        for number, date in enumerate((day, datetime.datetime(2026, 3, 2, 23, 59), None))
    ]
    texts = [[path.read_text(encoding="utf-8") for path in paths] for paths in dated]
    assert texts[0] == texts[1]
    assert json.loads(texts[0][0])["date"] == "2026-03-02"
    assert "On 2026-03-02 (year, month and day, in UTC)." in texts[0][1]
    today = json.loads(texts[2][0])["date"]
    now = datetime.datetime.now(datetime.UTC).date()
    assert now - datetime.date.fromisoformat(today) in (
        datetime.timedelta(0),
        datetime.timedelta(1),
    )
    assert [each.replace(today, "2026-03-02") for each in texts[2]] == texts[0]
    for as_json, as_text in texts:
        found = verify_statement(json.loads(as_json), as_text)
        assert found.reproduced
        assert any(line.startswith('date: "') for line in found.declared)
    with pytest.raises(TypeError, match=r"date='today' must be a datetime\.date"):
        privacy_report(STATED, tmp_path, date="today")


@pytest.mark.parametrize(
    ("runs", "words"), [(1, "no other run"), (7, "7 runs on these data were examined")]
)
def test_the_first_page_says_how_many_runs_were_looked_at(tmp_path, runs, words):
    assert words in written(tmp_path, RunFacts(runs=runs))[1]


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("runs", 0, ValueError),
        ("runs", 1.5, TypeError),
        ("max_grad_norm", 0.0, ValueError),
        ("clipping", "", ValueError),
        ("clipping", 3, TypeError),
        ("released", ["model"], TypeError),
        ("configuration", "abc", ValueError),
        ("data_commitment", "F" * 64, ValueError),
        ("choice", {"epsilon": 1}, TypeError),
        ("trusted", None, TypeError),
    ],
)
def test_other_facts_are_refused(field, value, error):
    with pytest.raises(error, match=field):
        RunFacts(**{field: value})
