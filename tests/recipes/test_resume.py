"""Stopping a run and going on, changing one's mind, and mistakes: nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dptrain import PrivacyEngine
from dptrain.clipping.modes import MODES
from recipes import vision
from recipes.command import INTERRUPTED
from recipes.runfolder import RunFolder, load_checkpoint
from tests.helpers.double import doubled
from tests.helpers.stopping import ctrl_c, stop_at
from tests.helpers.tiny_vision import PLAIN, run


def _final(output) -> dict[str, Any]:
    run = load_checkpoint(output)["run"]
    assert run["steps_executed"] == 6
    return run


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_same(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(_same, one, two))
    return bool(one == two)


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    output = tmp_path_factory.mktemp("plain") / "run"
    assert run(config, output, *PLAIN) == 0
    return output


def _ledger(output) -> tuple[dict[str, Any], list[str]]:
    head, *releases = (output / "ledger.jsonl").read_text().splitlines()
    return json.loads(head), releases


def _assert_like(output, uninterrupted) -> None:
    ours, theirs = _final(output), _final(uninterrupted)
    for part in ("module", "optimizer", "schedulers", "ledger"):
        assert _same(ours[part], theirs[part]), part
    for part in ("noise", "loader"):  # the process's generators are of no use to this model
        assert _same(ours["private"][part], theirs["private"][part]), part
    for name in ("metrics.jsonl", "privacy_report.json", "privacy_report.md"):
        assert (output / name).read_text() == (uninterrupted / name).read_text(), name
    heads, releases = zip(*(_ledger(folder) for folder in (output, uninterrupted)), strict=True)
    assert releases[0] == releases[1]
    assert heads[0].pop("run") != heads[1].pop("run")  # drawn for every run
    assert heads[0] == heads[1]


@pytest.mark.followed
@pytest.mark.slow
def test_ctrl_c_then_resume_ends_in_the_same_model(
    config, uninterrupted, tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        stop_at(patch, 3, ctrl_c)
        assert run(config, tmp_path / "run", *PLAIN) == INTERRUPTED
    assert "--resume" in capsys.readouterr().err
    assert load_checkpoint(tmp_path / "run")["run"]["steps_executed"] == 3
    assert run(config, tmp_path / "run", "--resume", *PLAIN) == 0
    _assert_like(tmp_path / "run", uninterrupted)


@pytest.mark.followed
def test_a_crash_then_resume_ends_in_the_same_model(config, uninterrupted, tmp_path, monkeypatch):
    class Crash(Exception):
        pass

    def crash():
        raise Crash

    with monkeypatch.context() as patch:
        stop_at(patch, 5, crash)
        with pytest.raises(Crash):
            run(config, tmp_path / "run", *PLAIN)
    assert load_checkpoint(tmp_path / "run")["run"]["steps_executed"] == 4
    assert run(config, tmp_path / "run", "--resume", *PLAIN) == 0
    _assert_like(tmp_path / "run", uninterrupted)


def test_resuming_a_finished_run_only_writes_the_report_again(config, uninterrupted):
    before = (uninterrupted / "privacy_report.json").read_text()
    (uninterrupted / "privacy_report.json").unlink()
    assert run(config, uninterrupted, "--resume", *PLAIN) == 0
    assert (uninterrupted / "privacy_report.json").read_text() == before


@pytest.fixture(scope="module")
def in_double(config, tmp_path_factory):
    output = tmp_path_factory.mktemp("double") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision, "vgg", doubled(vision.vgg))
        assert run(config, output, *PLAIN) == 0
    return _final(output)["module"]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("mode", MODES)
def test_the_other_modes_learn_the_same(config, in_double, tmp_path, monkeypatch, mode):
    monkeypatch.setattr(vision, "vgg", doubled(vision.vgg))
    parts = ["max_physical_batch_size=16", f"grad_sample_mode={mode}"]
    assert run(config, tmp_path / "run", *PLAIN, *parts) == 0
    ours = _final(tmp_path / "run")["module"]
    for mine, other in zip(ours.values(), in_double.values(), strict=True):
        assert mine.dtype == torch.float64
        assert torch.allclose(mine, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["optimizer.lr=0.25"], "optimizer.lr: the run has 0.5, now 0.25"),
        (["steps=7"], "steps: the run has 6, now 7"),
        (["privacy.noise_multiplier=2"], "privacy.noise_multiplier"),
        (["seed=1"], "seed"),
        (["data.split_seed=1"], "data.split_seed"),
    ],
)
def test_resuming_with_other_settings_is_refused(config, uninterrupted, capsys, changes, message):
    before = (uninterrupted / "metrics.jsonl").read_text()
    assert run(config, uninterrupted, "--resume", *PLAIN, *changes) == 2
    assert message in capsys.readouterr().err
    assert (uninterrupted / "metrics.jsonl").read_text() == before


def test_free_settings_may_change_on_resume(config, uninterrupted):
    changes = ["checkpoint_every=5", "evaluate_every=3", "overwrite=true"]
    assert run(config, uninterrupted, "--resume", *PLAIN, *changes) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "overwrite=true"),
        (["scheme.type=MinSep", "scheme.minsep=3"], "did you mean scheme.min_sep"),
        (["privacy.epsilon=1"], "give exactly one"),
        (["overwrite=true", "privacy.delta=0.5"], "error: privacy.delta=0.5 is not below 1/N"),
        (["overwrite=true", "privacy.certificates=some"], "only simulated accounting"),
        (["overwrite=true", "privacy.accountant=moments"], "accountant='moments' is unknown"),
        (["overwrite=true", "strategy.type=BSR", "strategy.bands=9"], "strategy: "),
    ],
)
def test_mistakes_end_in_one_line(config, uninterrupted, capsys, arguments, message):
    assert run(config, uninterrupted, *PLAIN, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_impossible_settings_spare_the_old_run(config, uninterrupted, capsys):
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.iterdir()}
    changes = ["overwrite=true", "scheme.type=MinSep", "scheme.min_sep=1000"]
    assert run(config, uninterrupted, *PLAIN, *changes) == 2
    assert "min_sep" in capsys.readouterr().err
    # Found out by the engine, when the folder is the new run's already.
    changes = ["overwrite=true", "privacy.max_grad_norm=-1"]
    assert run(config, uninterrupted, *PLAIN, *changes) == 2
    assert "max_grad_norm=-1" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.iterdir()} == before


def test_ctrl_c_while_calibrating_spares_the_old_run(config, uninterrupted, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    before = {path: path.stat().st_mtime_ns for path in uninterrupted.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(PrivacyEngine, "make_private", stop)
        assert run(config, uninterrupted, *PLAIN, "overwrite=true") == INTERRUPTED
    assert "before the first step" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.iterdir()} == before


@pytest.mark.slow
def test_a_full_disk_ends_in_one_line(config, tmp_path, monkeypatch, capsys):
    def full(self, state):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        stop_at(patch, 2, lambda: patch.setattr(RunFolder, "save_checkpoint", full))
        assert run(config, tmp_path / "run", *PLAIN) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: no space")
    assert run(config, tmp_path / "run", "--resume", *PLAIN) == 0


def test_nothing_to_resume(config, tmp_path, capsys):
    assert run(config, tmp_path / "none", "--resume", *PLAIN) == 2
    assert "start without --resume" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
