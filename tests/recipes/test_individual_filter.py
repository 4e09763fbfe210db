"""Recipes with an individual filter: the run, its folder, going on, and mistakes."""

from __future__ import annotations

import csv
import json
import stat

import numpy as np
import pytest
import torch

from dptrain.accounting.losses import gaussian
from dptrain.contrib.individual.report import IndividualReport
from dptrain.core.guarantee import Guarantee
from dptrain.individual import GDPFilter
from dptrain.mechanism import MatrixMechanism
from recipes import vision
from recipes.command import INTERRUPTED
from recipes.individual_outputs import (
    GROUPS,
    GROUPS_BEFORE,
    OVER_STEPS,
    REPORT,
    REPORT_BEFORE,
)
from recipes.runfolder import INDIVIDUAL, load_checkpoint
from tests.helpers.individual_recipe import run_individual
from tests.helpers.stopping import ctrl_c, stop_at

START, STEPS, EPSILON, DELTA = 3, 8, 2.75, 1e-5
B = gaussian.largest_mu(EPSILON, DELTA)
FILTER = [
    "individual.type=GDPFilter",
    f"individual.epsilon={EPSILON}",
    f"individual.delta={DELTA}",
    "privacy.epsilon=null",
]
# Norms lie on both sides of the clipping norm.
RUN = [
    *FILTER,
    f"individual.start={START}",
    f"steps={STEPS}",
    "privacy.max_grad_norm=1.3",
    "optimizer.lr=0.1",
    "evaluate_every=2",
    "checkpoint_every=2",
    "seed=1",
]
PLAIN = [*RUN, "plots=false"]
REPORTED = [*PLAIN, "individual.report=true"]


@pytest.fixture(scope="module")
def quiet(config, tmp_path_factory):
    """A run without individual outputs."""
    output = tmp_path_factory.mktemp("quiet") / "run"
    assert run_individual(config, output, *PLAIN) == 0
    return output


@pytest.fixture(scope="module")
def reported(config, tmp_path_factory):
    """The same run with them, and with plots."""
    output = tmp_path_factory.mktemp("reported") / "run"
    assert run_individual(config, output, *RUN, "individual.report=true") == 0
    return output


def _guarantee(output):
    value = json.loads((output / "privacy_report.json").read_text())
    return Guarantee.from_json(json.dumps(value["guarantee"]))


def _ledger(output):
    return load_checkpoint(output)["run"]["private"]["individual"]


@pytest.mark.slow
def test_the_noise_follows_from_the_start(quiet):
    mechanism = MatrixMechanism.from_dict(load_checkpoint(quiet)["run"]["mechanism"])
    assert mechanism.noise_multiplier == pytest.approx(START**0.5 / B, rel=1e-9)
    assert mechanism.scheme.probability == 1
    counts = _ledger(quiet)["active_counts"]
    assert counts[:START] == [1437] * START
    assert 0 < counts[START] < 1437
    spent = _ledger(quiet)["spending"]["squares"]
    assert float(spent.max()) <= B**2


@pytest.mark.slow
def test_the_statement_is_that_of_the_budget(reported):
    guarantee = _guarantee(reported)
    assert guarantee.accountant == GDPFilter.name
    assert guarantee.delta == DELTA
    assert guarantee.epsilon == pytest.approx(EPSILON, rel=1e-6)
    assert guarantee.steps_executed == STEPS
    # The curve is the budget's, not that of eight steps of the planned noise.
    found = json.loads((reported / "privacy_report.json").read_text())["profile"]
    epsilon = np.array(found["epsilon"])
    assert epsilon[0] == 0
    assert epsilon[-1] >= 2 * EPSILON
    for direction in ("delta_remove", "delta_add"):
        delta = np.array(found[direction])
        exact = gaussian.delta(epsilon, B)
        assert np.all(delta >= exact * (1 - 1e-6))
        assert delta == pytest.approx(exact, rel=1e-4)


@pytest.mark.slow
def test_where_the_plan_is_the_smaller_bound_its_curve_is_drawn(config, tmp_path):
    """With noise for many more steps than run, no example can spend its budget."""
    options = [*RUN, "individual.start=null", "privacy.noise_multiplier=50"]
    assert run_individual(config, tmp_path / "run", *options) == 0
    guarantee = _guarantee(tmp_path / "run")
    exact = gaussian.epsilon(DELTA, STEPS**0.5 / 50)
    assert guarantee.epsilon == pytest.approx(exact, rel=1e-6)
    profile = json.loads((tmp_path / "run" / "privacy_report.json").read_text())["profile"]
    expected = gaussian.delta(np.array(profile["epsilon"]), STEPS**0.5 / 50)
    assert np.array(profile["delta_remove"]) == pytest.approx(expected, rel=1e-3, abs=1e-300)


@pytest.mark.slow
def test_nothing_individual_unless_asked(quiet, reported, config, tmp_path, capsys):
    assert not (quiet / INDIVIDUAL).exists()
    for name in ("privacy_report.json", "privacy_report.md", "metrics.jsonl"):
        if name == "metrics.jsonl":
            assert (quiet / name).read_text() == (reported / name).read_text()
        text = (reported / name).read_text()
        assert "active_counts" not in text
        assert "group" not in text
    # On the screen: where it is, and no number of it.
    assert run_individual(config, tmp_path / "run", *REPORTED) == 0
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert not any(
            line
            for line in text.splitlines()
            if "active" in line and any(str(n) in line for n in _ledger(reported)["active_counts"])
        )
    assert f"not for release: {INDIVIDUAL}" in shown.out
    tags = b"".join(path.read_bytes() for path in (reported / "tensorboard").iterdir())
    assert b"macro_auc/test" in tags
    assert b"epsilon" not in tags.replace(b"run/epsilon_planned", b"")
    assert b"active" not in tags


def test_what_is_asked_for_is_marked_and_for_the_owner_only(reported):
    folder = reported / INDIVIDUAL
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = {path.name: path for path in folder.iterdir()}
    plots = [f"{name}_NOT_FOR_RELEASE.png" for name in ("histogram", "active", "groups")]
    tables = [REPORT, REPORT_BEFORE, GROUPS, GROUPS_BEFORE, OVER_STEPS]
    assert set(files) == {*plots, "groups_over_steps_NOT_FOR_RELEASE.png", *tables}
    for path in files.values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert "NOT_FOR_RELEASE" in path.name
        if path.suffix == ".csv":
            assert path.read_text().startswith("# NOT FOR RELEASE")


@pytest.mark.slow
def test_the_files_hold_what_the_ledger_says(reported):
    folder, ledger = reported / INDIVIDUAL, _ledger(reported)
    end = IndividualReport.load(folder / REPORT)
    spent = ledger["spending"]["squares"].sqrt().numpy()
    assert end.epsilon == pytest.approx(
        [gaussian.epsilon(DELTA, float(mu)) for mu in spent], rel=1e-6
    )
    assert list(end.active_counts) == ledger["active_counts"]
    before = IndividualReport.load(folder / REPORT_BEFORE)
    assert len(before.active_counts) == START
    assert np.all(before.epsilon <= end.epsilon)
    assert np.any(before.epsilon < end.epsilon)
    # Digits are ordered at random: the means of a group follow from its rows.
    rows = _rows(folder / OVER_STEPS)
    assert sorted({int(row["steps"]) for row in rows}) == [2, START, 4, 6, STEPS]
    assert all(row["note"] == "not for release" for row in rows)
    at_end = {row["group"]: row for row in rows if int(row["steps"]) == STEPS}
    assert list(at_end) == [
        "no condition", "with 8", "without 8", "with prime", "without prime",
    ]  # fmt: skip
    for row in _rows(folder / GROUPS):
        assert float(row["mean_epsilon"]) == float(at_end[row["group"]]["mean_epsilon"])
        assert float(row["mean_loss"]) == float(at_end[row["group"]]["train_loss"])


def _rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def _texts(output):
    folder = output / INDIVIDUAL
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix == ".csv"}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("stopped_after", [2, START, 5])
def test_a_run_that_goes_on_ends_in_the_same(
    config, reported, tmp_path, monkeypatch, stopped_after
):
    with monkeypatch.context() as patch:
        stop_at(patch, stopped_after, ctrl_c)
        assert run_individual(config, tmp_path / "run", *REPORTED) == INTERRUPTED
    assert not (tmp_path / "run" / INDIVIDUAL).exists()
    assert len(_ledger(tmp_path / "run")["active_counts"]) == stopped_after
    assert run_individual(config, tmp_path / "run", "--resume", *REPORTED) == 0
    ours, theirs = load_checkpoint(tmp_path / "run"), load_checkpoint(reported)
    for name, value in theirs["run"]["module"].items():
        assert torch.equal(ours["run"]["module"][name], value)
    mine, other = _ledger(tmp_path / "run"), _ledger(reported)
    assert mine["active_counts"] == other["active_counts"]
    assert torch.equal(mine["spending"]["squares"], other["spending"]["squares"])
    assert _texts(tmp_path / "run") == _texts(reported)


@pytest.mark.slow
def test_it_may_be_asked_for_after_the_run(config, quiet, reported, tmp_path):
    assert run_individual(config, tmp_path / "run", *PLAIN) == 0
    assert run_individual(config, tmp_path / "run", "--resume", *REPORTED) == 0
    found, expected = _texts(tmp_path / "run"), _texts(reported)
    assert set(found) == {REPORT, GROUPS, OVER_STEPS}  # nobody had looked before filtering began
    for name in (REPORT, GROUPS):
        assert found[name] == expected[name]


def test_resuming_with_another_filter_is_refused(config, quiet, capsys):
    assert run_individual(config, quiet, "--resume", *PLAIN, "individual.epsilon=3") == 2
    assert "individual.epsilon: the run has 2.75, now 3" in capsys.readouterr().err


TINY_IMAGES = [
    "data.image_size=8",
    "model.channels=[4]",
    "model.groups=2",
    "model.hidden=4",
    "scheme.type=Poisson",
    "strategy.type=Identity",
    "privacy.epsilon=null",
    "privacy.noise_multiplier=0.8",
    "individual.epsilon=3",
    "individual.report=true",
    "steps=5",
    "evaluate_every=2",
]


@pytest.mark.slow
def test_images_in_sampled_batches(config, tmp_path):
    output = tmp_path / "run"
    options = ["individual.type=RenyiFilter", "scheme.batch_size=140", *TINY_IMAGES]
    assert vision.main(["--config", str(config), "--output", str(output), *options]) == 0
    guarantee = _guarantee(output)
    assert guarantee.epsilon <= 3 + 1e-9
    assert guarantee.delta == pytest.approx(1 / (2 * 1437))
    report = IndividualReport.load(output / INDIVIDUAL / REPORT)
    assert report.size == 1437
    assert len(report.active_counts) == 5
    assert np.all(report.epsilon <= 3 + 1e-9)
    # There are no groups, so nothing is said of them.
    names = {path.name.partition("_NOT")[0] for path in (output / INDIVIDUAL).iterdir()}
    before = {"individual_privacy_before_filtering"}
    assert names - before == {"individual_privacy", "histogram", "active"}
    # The curve passes through the guarantee.
    profile = json.loads((output / "privacy_report.json").read_text())["profile"]
    assert np.all(np.diff(profile["epsilon"]) > 0)
    logs = np.log(profile["delta_remove"])
    there = np.interp(guarantee.epsilon, profile["epsilon"], logs)
    assert there == pytest.approx(np.log(guarantee.delta), rel=0.01)
