"""A statement as HTML, in a model card, and as a draft for the registry of DP deployments."""

from __future__ import annotations

import base64
import html.parser
import json
import re

import numpy as np
import pytest
import yaml

from dptrain.accounting import account, profile
from dptrain.commands import main
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import (
    KEY,
    RunFacts,
    html_page,
    key_facts,
    model_card,
    privacy_report,
    registry_record,
)
from dptrain.sampling import Poisson
from dptrain.strategies import Identity

RUN = MatrixMechanism(
    scheme=Poisson(probability=1.0, dataset_size=1000, steps=4),
    strategy=Identity(),
    noise_multiplier=4.0,
)
EVIL = "<script>alert('1')</script> --- & \"quoted\" | cell\n---\nkey: value"
# Of schemas/deployments-schema.yaml, opendp/deployments-registry-data at 3e9c812a.
FIELDS = {
    "basic": {
        *("name", "data_curators", "intended_use", "data_product_type", "data_product_region"),
        *("description", "publication_date", "data_product_sector"),
    },
    "dp_variant": {"variant_name", "data_domain", "unprotected_quantities"},
    "privacy_loss": {
        *("privacy_unit", "privacy_unit_details"),
        *("privacy_parameters", "privacy_parameters_details"),
    },
    "deployment_model": {
        *("model_name", "model_name_details", "actors", "release_type", "release_type_details"),
        *("data_source_type", "data_source_type_details", "access_type", "access_type_details"),
    },
    "accounting": {"post_processing", "composition"},
    "implementation": {"preprocessing_and_hyperparameter_tuning", "mechanisms", "justification"},
    "administrative": {"sources", "notes", "registry_authors"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    there = tmp_path_factory.mktemp("run")
    facts = RunFacts(trusted=EVIL, clipping=EVIL, public_data=EVIL, runs=3)
    stated = account(RUN, delta=1e-5).with_notes(EVIL)
    privacy_report(stated, there, profile=profile(RUN, np.linspace(0, 5, 51)), facts=facts)
    return there


@pytest.fixture(scope="module")
def value(folder):
    return json.loads((folder / "privacy_report.json").read_text(encoding="utf-8"))


class _Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.open, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_well_formed_loads_nothing_and_escapes_all(value):
    pytest.importorskip("matplotlib")
    page = _Page()
    page.feed(html_page(value))
    page.close()
    assert page.open == []
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object", "a"})
    sources = [found["src"] for tag, found in page.tags if tag == "img"]
    assert len(sources) == 2
    for each in sources:
        start, _, data = each.partition(",")
        assert start == "data:image/png;base64"
        assert base64.b64decode(data, validate=True).startswith(b"\x89PNG")
    assert not any("src" in found for tag, found in page.tags if tag != "img")
    assert not any(name.startswith("on") for _, found in page.tags for name in found)
    text = "".join(page.text)
    assert text.count(EVIL) >= 4
    assert value["sentence"] in text
    assert all(each in text for each in value["conditions"])


def test_what_is_between_backticks_is_code(value):
    pytest.importorskip("matplotlib")
    facts = {**value["run"], "clipping": "by `Flat(<1>)`, with a lone ` in it", "model": "`x`"}
    text = html_page({**value, "run": facts})
    assert "`" not in text
    assert "<code>dptrain verify</code> with the JSON file" in text
    assert "<code>dptrain compose</code> states" in text
    assert "<td>by <code>Flat(&lt;1&gt;)</code>, with a lone &#96; in it</td>" in text
    assert "<code>x</code>" in text


def test_pages_have_date_and_names(value):
    pytest.importorskip("matplotlib")
    facts = {**value["run"], "model": "ecg-2", "organization": "a clinic"}
    named = {**value, "run": facts, "date": "2026-03-02"}
    for page in (html_page(named), model_card(named)):
        assert "2026-03-02" in page
        assert "ecg-2" in page
        assert "a clinic" in page
    basic = yaml.safe_load(registry_record(named))["deployment"]["basic"]
    assert (basic["name"], basic["data_curators"]) == ("ecg-2", ["a clinic"])


def test_the_model_card_has_metadata_that_are_the_facts(value):
    text = model_card(value)
    start, head, body = text.split("---\n", 2)
    assert start == ""
    found = yaml.safe_load(head)
    assert set(found) == {"tags", KEY}
    assert found[KEY] == key_facts(account(RUN, delta=1e-5))
    assert "## Privacy" in body
    assert value["sentence"] in body


def test_the_registry_gets_its_own_fields_and_no_inventions(value):
    found = yaml.safe_load(registry_record(value))
    assert set(found) == {"url_slug", "status", "tier", "deployment"}
    assert found["status"] == "Draft"
    assert found["tier"] in (1, 2, 3)
    for group, fields in found["deployment"].items():
        assert set(fields) <= FIELDS[group], group
    basic = found["deployment"]["basic"]
    required = FIELDS["basic"] - {"data_product_sector"}
    assert required <= set(basic)
    assert basic.pop("data_product_type") == "Machine learning model"
    (curator,) = basic.pop("data_curators")
    assert all(each.startswith("FILL IN: ") for each in (curator, *basic.values()))
    stated = account(RUN, delta=1e-5)
    loss = found["deployment"]["privacy_loss"]
    assert loss["privacy_parameters"] == {"epsilon": stated.epsilon, "delta": 1e-5}
    assert found["deployment"]["deployment_model"]["actors"].strip() == EVIL
    tuning = found["deployment"]["implementation"]["preprocessing_and_hyperparameter_tuning"]
    assert "3 runs" in tuning


def test_the_command_writes_them(folder, tmp_path, capsys, value):
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("a.html", "README.md", "b.yaml")]
    flags = ("--html", "--model-card", "--registry")
    words = [word for pair in zip(flags, map(str, files), strict=True) for word in pair]
    assert main(["report", str(folder), *words]) == 0
    said = capsys.readouterr().out
    assert all(f"written: {file}" in said for file in files)
    assert files[1].read_text(encoding="utf-8") == model_card(value)
    assert files[2].read_text(encoding="utf-8") == registry_record(value)
    assert re.match("<!DOCTYPE html>", files[0].read_text(encoding="utf-8"))


@pytest.mark.parametrize("flag", ["--html", "--model-card", "--registry"])
def test_without_a_statement_there_is_nothing_to_write(tmp_path, capsys, flag):
    out = tmp_path / "out"
    assert main(["report", str(tmp_path), flag, str(out)]) == 2
    assert "which does not exist" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"kind": "estimate"}, "an estimate"), ({"epsilon": "inf"}, "no protection")],
)
def test_what_promises_nothing_is_not_published(value, changes, words):
    changed = {**value, "guarantee": {**value["guarantee"], **changes}}
    for make in (model_card, registry_record):
        with pytest.raises(ValueError, match=words):
            make(changed)


@pytest.mark.parametrize(
    "changed", [{}, {"guarantee": 3}, {"run": {"trusted": "me"}}, {"run": 1}, {"run": None}]
)
def test_other_values_are_refused(value, changed):
    broken = {**value, **changed} if changed else {}
    for make in (html_page, model_card, registry_record):
        with pytest.raises(ValueError, match=r"guarantee|facts"):
            make(broken)
