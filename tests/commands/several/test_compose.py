"""``dptrain compose``: what it adds up, and what it refuses to."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from dptrain.accounting import account, calibrate, trade_off
from dptrain.accounting.losses import gaussian
from dptrain.commands.cli import main
from dptrain.contrib.selection import plots as plots_composed
from dptrain.core import Adjacency, Kind, Unit
from dptrain.reporting import privacy_report
from dptrain.sampling import Poisson
from dptrain.strategies import Identity
from tests.helpers.gaussian_runs import full_batches

DELTA = 1e-5


def composed(tmp_path, *words):
    out = tmp_path / "together.json"
    assert main(["compose", *words, "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_gaussians_compose_to_a_gaussian_from_every_kind_of_file(tmp_path, written, capsys):
    mus = [0.3, 0.4, 0.5, 0.6]
    mechanisms = [full_batches(mu) for mu in mus]
    stated = [account(each, delta=DELTA) for each in mechanisms]
    folder = tmp_path / "run"
    folder.mkdir()
    privacy_report(stated[3], folder)
    words = [
        written("mechanism.json", mechanisms[0].to_json()),
        written("guarantee.json", stated[1].to_json()),
        written("summary.json", {"guarantee": json.loads(stated[2].to_json()), "notes": []}),
        str(folder),
    ]
    truth = gaussian.epsilon(DELTA, math.hypot(*mus))
    found = composed(tmp_path, *words, "--delta", str(DELTA))
    assert truth <= found["epsilon"] <= 1.002 * truth
    for row, mu in zip(found["runs"], mus, strict=True):
        alone = gaussian.epsilon(DELTA, mu)
        assert alone * (1 - 1e-9) <= row["epsilon_at_delta"] <= 1.001 * alone
        assert row["known"] == "curve"
    basic = sum(gaussian.epsilon(DELTA / 4, mu) for mu in mus)
    assert basic * (1 - 1e-9) <= found["basic"]["epsilon_at_delta"] <= 1.001 * basic
    text = capsys.readouterr().out
    assert "fixed before the first result" in text
    assert "Basic composition" in text
    # δ at that ε is the δ asked for.
    back = composed(tmp_path, *words, "--epsilon", str(found["epsilon"]))
    assert 0.98 * DELTA <= back["delta"] <= DELTA * (1 + 1e-5)
    apart = composed(tmp_path, *words, "--delta", str(DELTA), "--disjoint")
    assert apart["epsilon"] == pytest.approx(gaussian.epsilon(DELTA, max(mus)), rel=1e-3)


def test_runs_that_were_planned_count_whether_or_not_they_were_made(tmp_path, written, capsys):
    first = written("first.json", full_batches(0.3).to_json())
    other = written("other.json", full_batches(0.5).to_json())
    found = composed(tmp_path, first, other, "--planned", "6", "--delta", str(DELTA))
    truth = gaussian.epsilon(DELTA, math.hypot(0.3, *[0.5] * 5))
    assert truth <= found["epsilon"] <= 1.002 * truth
    assert (found["planned"], len(found["runs"])) == (6, 6)
    assert "fixed before the first result" in found["condition"]
    text = " ".join(capsys.readouterr().out.split())
    assert "All 6 planned runs together, whichever of them were made" in text
    assert text.index("fixed before the first result") < text.index("Basic composition")
    assert main(["compose", first, other, "--planned", "1", "--delta", "1e-5"]) == 2
    assert "2 runs are named" in capsys.readouterr().err


def test_of_a_bare_guarantee_only_the_point_is_known(tmp_path, written, capsys):
    one = dataclasses.replace(
        account(full_batches(0.5), delta=DELTA), mechanism_hash="of something else"
    )
    path = written("one.json", one.to_json())
    found = composed(tmp_path, path, path)
    assert found["runs"][0]["known"] == "one (ε, δ)"
    assert found["delta"] == pytest.approx(2 * DELTA, rel=1e-5)  # below, nothing is shown
    assert found["epsilon"] <= 2 * one.epsilon
    assert found["basic"]["sum_of_epsilon"] == 2 * one.epsilon
    capsys.readouterr()
    assert main(["compose", path, path, "--delta", str(DELTA)]) == 0
    assert "There is no bound" in capsys.readouterr().out


def test_the_weakest_run_says_how_it_was_shown(tmp_path, written, capsys):
    stated = account(full_batches(0.5), delta=DELTA)
    doubtful = dataclasses.replace(
        stated,
        kind=Kind.CONFIDENCE,
        certificate={"failure_probability": 3e-7},
        mechanism_hash="of something else",
    )
    guess = dataclasses.replace(doubtful, kind=Kind.ESTIMATE)
    sure = written("sure.json", stated.to_json())
    found = composed(tmp_path, sure, written("simulated.json", doubtful.to_json()))
    assert found["kind"] == "confidence bound"
    assert "at most 3e-07" in capsys.readouterr().out
    assert composed(tmp_path, sure, written("guess.json", guess.to_json()))["kind"] == "estimate"
    assert "WITHOUT PROOF" in capsys.readouterr().out


def test_a_curve_at_verified_noise_adds_its_chance_of_failure(tmp_path, written, capsys):
    """Of δ it is a part at the ε that was asked for, and not elsewhere on the curve."""
    stated = account(full_batches(0.5), delta=DELTA)
    evidence = {"failure_probability": 3e-7}
    curve = dataclasses.replace(stated, kind=Kind.VERIFIED, certificate=evidence)
    point = dataclasses.replace(curve, mechanism_hash="of something else")
    path = written("curve.json", curve.to_json())
    assert composed(tmp_path, path, path)["kind"] == "verified"
    assert "at most 6e-07" in capsys.readouterr().out
    path = written("point.json", point.to_json())
    composed(tmp_path, path, path)
    assert "false with probability" not in capsys.readouterr().out


def test_a_plot_shows_all_curves(tmp_path, written):
    path = written("mechanism.json", full_batches(0.5).to_json())
    assert main(["compose", path, path, "--delta", "1e-5", "--plot", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_runs_whose_files_have_one_name_are_drawn_each(tmp_path, written, monkeypatch):
    figures = []
    monkeypatch.setattr(plots_composed, "save", lambda figure, path: figures.append(figure))
    words = []
    for folder, mu in (("first", 0.3), ("second", 0.6)):
        (tmp_path / folder).mkdir()
        words.append(written(f"{folder}/mechanism.json", full_batches(mu).to_json()))
    assert main(["compose", *words, words[0], "--delta", "1e-5", "--plot", "p.png"]) == 0
    told = {text.get_text() for text in figures[0].axes[0].get_legend().get_texts()}
    assert {f"{words[0]} (each of 2)", words[1]} <= told


def test_what_has_no_one_statement_is_refused(written, capsys):
    stated = account(full_batches(0.5), delta=DELTA)
    first = written("first.json", stated.to_json())

    def refused(*words):
        assert main(["compose", first, *words]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        return line

    user = dataclasses.replace(stated, unit=Unit(kind="user", max_examples=4))
    assert "no single statement covers both" in refused(written("user.json", user.to_json()))
    other = dataclasses.replace(stated, adjacency=Adjacency.REPLACE_ONE)
    assert "replace_one" in refused(written("replaced.json", other.to_json()))
    small = written("small.json", account(full_batches(0.5, size=900), delta=DELTA).to_json())
    assert "--overlapping" in refused(small)
    assert main(["compose", first, small, "--overlapping"]) == 0
    assert "may share people" in capsys.readouterr().out
    assert main(["compose", first, small, "--disjoint"]) == 0
    assert "no unit is in two" in capsys.readouterr().out
    assert "--delta is missing" in refused(written("m.json", full_batches(0.5).to_json()))
    bare = full_batches(0.5).with_noise(0.0).to_json()
    assert "without noise" in refused(written("zero.json", bare), "--delta", "1e-5")
    endless = dataclasses.replace(stated, epsilon=math.inf)
    assert "has no guarantee" in refused(written("inf.json", endless.to_json()))
    assert "certificate" in refused(written("c.json", {"request": {}, "noise_multiplier": 1.0}))
    assert "not describe the privacy of a run" in refused(written("x.json", {"a": 1}))
    assert "not valid JSON" in refused(written("y.json", "{"))
    assert "not valid JSON" in refused(written("deep.json", "[" * 100_000))
    assert "no file" in refused("nowhere.json")
    assert "one of --delta and --epsilon" in refused("--delta", "1e-5", "--epsilon", "1")


@pytest.mark.slow
def test_a_calibrated_pair_is_read_back_as_its_curve(tmp_path, written):
    found = calibrate(
        scheme=Poisson.for_batch_size(batch_size=20, dataset_size=1000, steps=50),
        strategy=Identity(), epsilon=2.0, delta=DELTA,
    )  # fmt: skip
    rows = composed(tmp_path, written("g.json", found.guarantee.to_json()))["runs"]
    limits = trade_off(found.mechanism, found.guarantee, floor=1e-11, points=801)
    assert rows[0]["known"] == "curve"
    assert rows[0]["epsilon_at_delta"] <= found.guarantee.epsilon
    assert len(limits.epsilon) > 1
