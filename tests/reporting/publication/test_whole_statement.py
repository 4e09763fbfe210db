"""The published schema: statements fulfil it (tests/conftest.py asks all), others do not."""

from __future__ import annotations

import copy
import importlib.resources
import json
import pathlib

import pytest

from dptrain.accounting import account, calibrate, profile
from dptrain.core import Guarantee
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import privacy_report, schema
from dptrain.sampling import MinSep, Poisson
from dptrain.strategies import BandMF, Identity
from scripts.docs import statement as page
from tests.helpers.json_schema import errors


@pytest.fixture(scope="module")
def value(tmp_path_factory):
    scheme = Poisson.for_batch_size(batch_size=20, dataset_size=1000, steps=5)
    run = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.5)
    guarantee = account(run, delta=1e-4).drawn_by("Philox").after(3)
    folder = tmp_path_factory.mktemp("run")
    as_json, _ = privacy_report(guarantee, folder, profile=profile(run))
    return json.loads(as_json.read_text(encoding="utf-8"))


def test_statements_fulfil_it(tmp_path, value):
    assert list(errors(value, schema())) == []
    scheme = MinSep.for_batch_size(batch_size=20, dataset_size=1000, min_sep=4, steps=12)
    found = calibrate(scheme=scheme, strategy=BandMF(bands=4), epsilon=2.0, delta=1e-4)
    as_json, _ = privacy_report(found.guarantee, tmp_path)
    assert list(errors(json.loads(as_json.read_text(encoding="utf-8")), schema())) == []


def test_every_field_that_can_be_written_is_in_it(value):
    described = schema()["properties"]
    assert set(described) >= set(value)
    guarantee = Guarantee.from_json(json.dumps(value["guarantee"]))
    assert set(described["guarantee"]["properties"]) == set(json.loads(guarantee.to_json()))


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (["format"], 1),
        (["format"], 2.0),
        (["date"], "2 March 2026"),
        (["date"], None),
        (["attacks", "curve_refused"], 3),
        (["software"], {}),
        (["format"], True),
        (["more"], 1),
        (["guarantee", "more"], 1),
        (["guarantee", "epsilon"], -1),
        (["guarantee", "epsilon"], "8"),
        (["guarantee", "delta"], 1.5),
        (["guarantee", "kind"], "proven"),
        (["guarantee", "unit", "kind"], "household"),
        (["guarantee", "unit", "max_examples"], 0),
        (["guarantee", "scheme"], {"probability": 0.5}),
        (["guarantee", "mechanism_hash"], "abc"),
        (["guarantee", "steps_planned"], 0),
        (["guarantee", "steps_executed"], 1.5),
        (["guarantee", "notes"], "none"),
        (["conditions"], []),
        (["attacks", "floor"], 0.5),
        (["attacks", "true_positive_rate_at", "0.1"], 2),
        (["profile", "delta_add", 0], -0.1),
        (["profile", "epsilon"], []),
    ],
    ids=str,
)
def test_what_is_no_statement_does_not_fulfil_it(value, path, new):
    changed = copy.deepcopy(value)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    assert list(errors(changed, schema()))


@pytest.mark.parametrize(
    "field", ["format", "date", "sentence", "guarantee", "conditions", "attacks"]
)
def test_fields_that_every_statement_has_are_required(value, field):
    without = {name: each for name, each in value.items() if name != field}
    assert list(errors(without, schema())) == [f"$.{field}: missing"]


def test_every_field_says_what_it_is_and_is_in_the_reference():
    text = page.page()

    def walk(each, prefix):
        for name, inner in each.get("properties", {}).items():
            assert inner["description"].endswith("."), f"{prefix}{name}"
            assert f"| `{prefix}{name}` |" in text
            walk(inner, f"{prefix}{name}.")

    walk(schema(), "")
    assert json.loads(page.text()) == schema()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {4}


def test_the_schema_is_in_the_package():
    import tomllib

    root = pathlib.Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["dptrain"]
    files = {each for pattern in patterns for each in (root / "dptrain").glob(pattern)}
    name = "privacy_report.schema.json"
    assert root / "dptrain" / "reporting" / name in files
    assert importlib.resources.files("dptrain.reporting").joinpath(name).is_file()


def test_the_checker_of_these_tests_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="oneOf"):
        list(errors(1, {"oneOf": []}))
    assert list(errors(True, {"type": "integer"}))
    assert list(errors(1, {"anyOf": [{"type": "null"}, {"const": 2}]}))
