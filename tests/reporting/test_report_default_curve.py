"""What an attack can reach is stated by the proven curve, whether anybody passed it or not."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
from scipy.stats import norm

from dptrain.accounting import (
    Cost,
    Profile,
    TradeOff,
    account,
    profile,
    profile_of,
    registered_accountants,
)
from dptrain.core import Adjacency, Kind, Unit
from dptrain.individual import GDPFilter, filter_profile
from dptrain.integrations.transformers.publishing import publish
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import html_page, privacy_report, verify_statement
from dptrain.sampling import AttributionGraph, MinSep, PerUser, Poisson
from dptrain.strategies import BandMF, Identity

GAUSSIAN = MatrixMechanism(
    scheme=Poisson(probability=1.0, dataset_size=1000, steps=4),
    strategy=Identity(),
    noise_multiplier=4.0,
)
SAMPLED = MatrixMechanism(
    scheme=Poisson.for_batch_size(batch_size=800, dataset_size=16000, steps=400),
    strategy=Identity(),
    noise_multiplier=1.62081,
)
SIMULATED = MatrixMechanism(
    scheme=MinSep.for_batch_size(batch_size=200, dataset_size=4000, min_sep=4, steps=60),
    strategy=BandMF(bands=4),
    noise_multiplier=1.0,
)


def written(folder, guarantee, **options):
    as_json, as_text = privacy_report(guarantee, folder, **options)
    text = as_text.read_text(encoding="utf-8")
    value = json.loads(as_json.read_text(encoding="utf-8"))
    assert verify_statement(value, text).refuted == () or guarantee.kind is Kind.ESTIMATE
    return value, text


def found_at_one_percent(value, text):
    """The rate of the JSON, which the text tells rounded up to two digits."""
    rate = value["attacks"]["true_positive_rate_at"]["0.01"]
    (told,) = re.findall(r"it detects at most ([\d.]+) % of those that were", text)
    assert 100 * rate <= float(told) <= 100 * rate + 0.01 + 1e-9
    return rate


def test_a_gaussian_is_stated_as_one(tmp_path):
    """1/2-GDP: of 1 % false positives Φ(Φ⁻¹(.01) + .5) true ones, where (ε, δ) allows 8 %."""
    guarantee = account(GAUSSIAN, delta=1e-5)
    truth = norm.cdf(norm.ppf(0.01) + 0.5)
    rate = found_at_one_percent(*written(tmp_path, guarantee))
    assert truth <= rate <= 1.005 * truth
    assert float(TradeOff.of(guarantee).true_positive_rate(0.01)) > 2 * rate


def test_the_default_is_the_curve_on_a_fine_grid(tmp_path):
    """No more than 2 % of a rate is lost to the 161 points."""
    guarantee = account(SAMPLED, delta=1e-5)
    value, text = written(tmp_path, guarantee)
    fine = TradeOff.of(guarantee, profile(SAMPLED, guarantee.epsilon * np.linspace(0, 2, 4001)))
    for rate, most in fine.rates():
        told = value["attacks"]["true_positive_rate_at"][f"{rate:g}"]
        assert most * (1 - 1e-9) <= told <= 1.02 * most
    assert found_at_one_percent(value, text) < 0.0512  # (ε, δ) alone allow 0.2009
    assert value["attacks"]["curve_refused"] is None
    assert f"| {guarantee.epsilon:.6g} | " in text.partition("## δ at other ε")[2]


def test_published_folders_have_it_too(tmp_path):
    publish(str(tmp_path), account(SAMPLED, delta=1e-5), about={})
    value = json.loads((tmp_path / "privacy_report.json").read_text(encoding="utf-8"))
    assert value["attacks"]["true_positive_rate_at"]["0.01"] < 0.0512


def test_a_name_on_the_hub_is_stated(tmp_path):
    for name, model, organization in (
        ("clinic/ecg-2", "ecg-2", "clinic"),
        ("ecg-2", "ecg-2", None),
    ):
        publish(str(tmp_path), account(GAUSSIAN, delta=1e-5), about={}, hub_model_id=name)
        value = json.loads((tmp_path / "privacy_report.json").read_text(encoding="utf-8"))
        assert (value["run"]["model"], value["run"]["organization"]) == (model, organization)


def test_a_curve_by_simulation_does_not_take_the_proven_one_away(tmp_path):
    guarantee = account(SAMPLED, delta=1e-5)
    alone, _ = written(tmp_path / "alone", guarantee)
    drawn = Profile(np.array([0.0, 3.0]), np.ones(2), np.ones(2), Kind.CONFIDENCE, "x", 1e-3)
    both, text = written(tmp_path / "both", guarantee, profile=drawn)
    assert both["profile"]["kind"] == "confidence bound"
    assert both["proven_profile"]["kind"] == "exact"
    assert both["attacks"] == alone["attacks"]
    assert "Upper confidence bounds" in text


@pytest.mark.slow
def test_beside_a_simulation_stands_whoever_proves_a_curve(tmp_path):
    """Its guarantee is the smaller one, and the Rényi accountant's curve bounds attacks more."""
    guarantee = account(SIMULATED, delta=1e-5)
    value, text = written(tmp_path, guarantee)
    assert guarantee.kind is Kind.CONFIDENCE
    proven = account(SIMULATED, delta=1e-5, accountant="min-sep-renyi")
    assert guarantee.epsilon < proven.epsilon
    assert value["proven_profile"]["accountant"] == "min-sep-renyi"
    rate = found_at_one_percent(value, text)
    assert rate < 0.8 * float(TradeOff.of(guarantee).true_positive_rate(0.01))
    lower = json.loads(json.dumps(value))
    lower["proven_profile"]["delta_add"][7] /= 2
    refuted = verify_statement(lower).refuted
    assert any(line.startswith("the proven curve states δ = ") for line in refuted)
    without = {name: each for name, each in value.items() if name != "proven_profile"}
    assert any("does not follow" in line for line in verify_statement(without).refuted)


def test_users_and_private_sizes_have_curves_of_their_own(tmp_path):
    size = {"batch_size": 20, "dataset_size": 1000}
    hidden = Poisson.for_batch_size(**size, steps=20, nominal_size=1100)
    graph = AttributionGraph.from_lists([[each % 300] for each in range(1000)])
    once = Poisson.for_batch_size(batch_size=20, dataset_size=300, steps=20)
    users = PerUser(graph=graph, users=once, group_size=4)
    for scheme, unit, adjacency in (
        (users, Unit(kind="user", max_examples=None), Adjacency.ZERO_OUT),
        (hidden, Unit(), Adjacency.ADD_REMOVE),
    ):
        run = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.5)
        guarantee = account(run, delta=1e-4)
        found = profile_of(guarantee)
        assert found.adjacency is guarantee.adjacency is adjacency
        assert found.unit == guarantee.unit == unit
        assert found.mechanism_hash == run.hash
        value, _ = written(tmp_path / adjacency.value, guarantee)
        assert value["attacks"]["curve_refused"] is None


def test_where_it_takes_minutes_the_statement_says_so_and_how(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    guarantee = account(SAMPLED, delta=1e-5)
    for each in registered_accountants():
        monkeypatch.setattr(type(each), "cost", lambda self, mechanism: Cost.MINUTES)
    value, text = written(tmp_path, guarantee)
    refused = value["attacks"]["curve_refused"]
    how = "profile=dptrain.profile(mechanism, accountant='poisson-pld')"
    assert "takes minutes" in refused
    assert how in refused
    assert "profile" not in value
    for page in (text, html_page(value).replace("&#x27;", "'")):
        assert f"{how}." in page
        assert "follows from ε and δ alone and may be far above the truth" in page
    given, text = written(tmp_path, guarantee, profile=profile(SAMPLED, accountant="poisson-pld"))
    assert given["attacks"]["curve_refused"] is None
    assert "far above the truth" not in text
    hidden = {**value, "attacks": {**value["attacks"], "curve_refused": None}}
    assert any("does not follow" in line for line in verify_statement(hidden).refuted)


def test_a_filter_s_budget_has_its_curve(tmp_path):
    individual = GDPFilter(target_epsilon=1.0, target_delta=1e-5, max_steps=4)
    planned = account(GAUSSIAN.with_noise(1.0), delta=1e-5)
    record = individual.record(GAUSSIAN.with_noise(1.0))
    guarantee = individual.state(planned, record)
    assert guarantee.accountant == individual.name
    with pytest.raises(ValueError, match=r"profile=filter_profile\(private.stated_individual"):
        profile_of(guarantee)
    _, as_text = privacy_report(guarantee, tmp_path)
    assert "filter_profile(private.stated_individual, guarantee)" in as_text.read_text(
        encoding="utf-8"
    )
    curve = filter_profile(record, guarantee)
    as_json, _ = privacy_report(guarantee, tmp_path, profile=curve)
    attacks = json.loads(as_json.read_text(encoding="utf-8"))["attacks"]
    assert attacks["curve_refused"] is None
    for other in (planned, dataclasses.replace(guarantee, epsilon=0.9)):
        with pytest.raises(ValueError, match="does not match the record's budget"):
            filter_profile(record, other)
    alone = float(TradeOff.of(guarantee).true_positive_rate(0.01))
    assert attacks["true_positive_rate_at"]["0.01"] < alone


def test_an_estimate_says_the_same_in_both_files(tmp_path):
    rough = account(SAMPLED, delta=1e-5).drawn_by("Philox", caveats=("buffers are rounded",))
    value, text = written(tmp_path, rough, profile=profile(SAMPLED))
    assert value["attacks"]["sentence"] in text
    assert "an estimate has no curve" in value["attacks"]["curve_refused"]


@pytest.mark.parametrize(
    "changes",
    [
        {"adjacency": Adjacency.REPLACE_ONE},
        {"unit": Unit(kind="user", max_examples=3)},
        {"mechanism_hash": "0" * 64},
    ],
    ids=lambda each: next(iter(each)),
)
def test_a_curve_of_something_else_is_refused(tmp_path, changes):
    guarantee = account(SAMPLED, delta=1e-5)
    (name,) = changes
    other = dataclasses.replace(guarantee, **changes)
    for act in (
        lambda: TradeOff.of(other, profile(SAMPLED)),
        lambda: privacy_report(other, tmp_path, profile=profile(SAMPLED)),
    ):
        with pytest.raises(ValueError, match=f"profile: it describes {name}="):
            act()
    untold = dataclasses.replace(profile(SAMPLED), adjacency=None, unit=None, mechanism_hash=None)
    assert TradeOff.of(other, untold).mu is not None
