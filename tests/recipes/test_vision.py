"""The vision recipe end to end, on a tiny model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import yaml

from dptrain.guarantee import Guarantee, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.randomness import split_seed
from recipes.command import INTERRUPTED
from recipes.models import vgg
from recipes.runfolder import load_checkpoint, read_metrics
from recipes.vision import main
from tests.recipes.stopping import ctrl_c, stop_at

SEED = 987654321
TINY = [
    "data.image_size=8",
    "model.channels=[4]",
    "model.groups=2",
    "model.hidden=4",
    "scheme.batch_size=40",
    "steps=6",
    "evaluate_every=2",
    "checkpoint_every=2",
    "optimizer.schedule=linear",
]
# No calibration and no plots: for the tests that look at something else.
PLAIN = [
    *TINY,
    "scheme.type=Poisson",
    "strategy.type=Identity",
    "privacy.epsilon=null",
    "privacy.noise_multiplier=1",
    "plots=false",
    f"seed={SEED}",
]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "empty.yaml"
    path.write_text("")
    return path


def _main(config, output, *arguments: str) -> int:
    return main(["--config", str(config), "--output", str(output), *arguments])


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """A run with everything on: MinSep, BandMF, certified calibration, plots."""
    output = tmp_path_factory.mktemp("finished") / "run"
    assert _main(config, output, *TINY, "scheme.min_sep=2", "strategy.bands=2", f"seed={SEED}") == 0
    return output


def test_every_file_is_written(finished):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "config.yaml",
        "metrics.jsonl",
        "checkpoint.pt",
        "model.pt",
        "ledger.jsonl",
        "tensorboard",
        "privacy_report.json",
        "privacy_report.md",
        "curves.png",
        "privacy.png",
        "summary.txt",
    }
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config["privacy"]["delta"] == 1 / (2 * 1437)
    assert config["steps"] == 6
    metrics = read_metrics(finished / "metrics.jsonl")
    assert [r["step"] for r in metrics if r["split"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in metrics if r["split"] == "test"] == [2, 4, 6]
    assert all(r["not_for_release"] for r in metrics if r["split"] == "train")


def test_the_saved_model_is_the_trained_one(finished):
    model = vgg(in_channels=1, classes=10, image_size=8, channels=[4], groups=2, hidden=4)
    model.load_state_dict(torch.load(finished / "model.pt", weights_only=True))
    trained = load_checkpoint(finished)["run"]["module"].values()
    for ours, theirs in zip(model.state_dict().values(), trained, strict=True):
        assert torch.equal(ours, theirs)


def test_the_guarantee_is_certified_and_that_of_the_checkpoint(finished):
    report = json.loads((finished / "privacy_report.json").read_text())
    guarantee = Guarantee.from_json(json.dumps(report["guarantee"]))
    assert guarantee.kind is Kind.VERIFIED
    assert guarantee.certificate
    assert guarantee.epsilon <= 8.0
    assert guarantee.delta == 1 / (2 * 1437)
    assert guarantee.steps_executed == guarantee.steps_planned == 6
    mechanism = MatrixMechanism.from_dict(load_checkpoint(finished)["run"]["mechanism"])
    assert mechanism.hash == guarantee.mechanism_hash
    assert mechanism.scheme.min_sep == 2
    assert mechanism.strategy.bands == 2


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(_keys, value.values()))
    if isinstance(value, list):
        return set().union(*map(_keys, value)) if value else set()
    return set()


def test_the_report_holds_nothing_private(finished):
    report = json.loads((finished / "privacy_report.json").read_text())
    certificate = report["guarantee"].pop("certificate")  # its seeds are the accountant's own
    forbidden = ("loss", "accura", "nonfinite", "seed", "rng", "indices", "batch_sizes", "digest")
    for key in _keys(report):
        assert not any(word in key.lower() for word in forbidden), key
    texts = [
        (finished / "privacy_report.md").read_text(),
        json.dumps(report) + json.dumps(certificate),
    ]
    for secret in (SEED, *split_seed(SEED)):
        assert not any(str(secret) in text for text in texts)
    train = [r for r in read_metrics(finished / "metrics.jsonl") if r["split"] == "train"]
    assert not any(str(record["loss"]) in text for record in train for text in texts)


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
    assert _main(config, output, *PLAIN) == 0
    return output


def _assert_like(output, uninterrupted) -> None:
    ours, theirs = _final(output), _final(uninterrupted)
    for part in ("module", "optimizer", "schedulers", "ledger"):
        assert _same(ours[part], theirs[part]), part
    for part in ("noise", "loader"):  # the process's generators are of no use to this model
        assert _same(ours["private"][part], theirs["private"][part]), part
    names = ("metrics.jsonl", "privacy_report.json", "privacy_report.md", "ledger.jsonl")
    for name in names:
        assert (output / name).read_text() == (uninterrupted / name).read_text(), name


def test_ctrl_c_then_resume_ends_in_the_same_model(
    config, uninterrupted, tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        stop_at(patch, 3, ctrl_c)
        assert _main(config, tmp_path / "run", *PLAIN) == INTERRUPTED
    assert "--resume" in capsys.readouterr().err
    assert load_checkpoint(tmp_path / "run")["run"]["steps_executed"] == 3
    assert _main(config, tmp_path / "run", "--resume", *PLAIN) == 0
    _assert_like(tmp_path / "run", uninterrupted)


def test_a_crash_then_resume_ends_in_the_same_model(config, uninterrupted, tmp_path, monkeypatch):
    class Crash(Exception):
        pass

    def crash():
        raise Crash

    with monkeypatch.context() as patch:
        stop_at(patch, 5, crash)
        with pytest.raises(Crash):
            _main(config, tmp_path / "run", *PLAIN)
    assert load_checkpoint(tmp_path / "run")["run"]["steps_executed"] == 4
    assert _main(config, tmp_path / "run", "--resume", *PLAIN) == 0
    _assert_like(tmp_path / "run", uninterrupted)


def test_resuming_a_finished_run_only_writes_the_report_again(config, uninterrupted):
    before = (uninterrupted / "privacy_report.json").read_text()
    (uninterrupted / "privacy_report.json").unlink()
    assert _main(config, uninterrupted, "--resume", *PLAIN) == 0
    assert (uninterrupted / "privacy_report.json").read_text() == before


@pytest.mark.parametrize("mode", ["functorch", "ghost"])
def test_the_other_modes_learn_the_same(config, uninterrupted, tmp_path, mode):
    parts = ["max_physical_batch_size=16", f"grad_sample_mode={mode}"]
    assert _main(config, tmp_path / "run", *PLAIN, *parts) == 0
    ours, theirs = _final(tmp_path / "run")["module"], _final(uninterrupted)["module"]
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


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
    assert _main(config, uninterrupted, "--resume", *PLAIN, *changes) == 2
    assert message in capsys.readouterr().err
    assert (uninterrupted / "metrics.jsonl").read_text() == before


def test_free_settings_may_change_on_resume(config, uninterrupted):
    changes = ["checkpoint_every=5", "evaluate_every=3", "overwrite=true"]
    assert _main(config, uninterrupted, "--resume", *PLAIN, *changes) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "overwrite=true"),
        (["scheme.type=MinSep", "scheme.minsep=3"], "did you mean 'scheme.min_sep'"),
        (["privacy.epsilon=1"], "give exactly one"),
        (["overwrite=true", "privacy.certificates=some"], "only simulated accounting"),
        (["overwrite=true", "privacy.accountant=moments"], "accountant='moments' is unknown"),
        (["overwrite=true", "strategy.type=BSR", "strategy.bands=9"], "strategy: "),
    ],
)
def test_mistakes_end_in_one_line(config, uninterrupted, capsys, arguments, message):
    assert _main(config, uninterrupted, *PLAIN, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_impossible_settings_spare_the_old_run(config, uninterrupted, capsys):
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.iterdir()}
    changes = ["overwrite=true", "scheme.type=MinSep", "scheme.min_sep=1000"]
    assert _main(config, uninterrupted, *PLAIN, *changes) == 2
    assert "min_sep" in capsys.readouterr().err
    # Found out by the engine, when the folder is the new run's already.
    changes = ["overwrite=true", "privacy.max_grad_norm=-1"]
    assert _main(config, uninterrupted, *PLAIN, *changes) == 2
    assert "max_grad_norm=-1" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.iterdir()} == before


def test_a_secure_run_says_so_and_stays_secure(config, tmp_path, capsys):
    plain = [part for part in PLAIN if not part.startswith("seed=")]
    safe = [*plain, "privacy.secure=true"]
    assert _main(config, tmp_path / "run", *safe) == 0
    report = json.loads((tmp_path / "run" / "privacy_report.json").read_text())
    assert report["guarantee"]["noise_generator"].startswith("AES-256-CTR")
    assert any("AES-256-CTR" in line for line in report["conditions"])
    assert "| noise generator | AES-256-CTR" in (tmp_path / "run/privacy_report.md").read_text()
    capsys.readouterr()
    assert _main(config, tmp_path / "run", "--resume", *plain) == 2
    assert "privacy.secure: the run has True, now False" in capsys.readouterr().err
    assert _main(config, tmp_path / "run", "--resume", *safe) == 0


def test_rounded_buffers_leave_an_estimate_in_the_report(config, tmp_path):
    rough = [
        "scheme.type=MinSep",
        "scheme.min_sep=2",
        "strategy.type=BSR",
        "strategy.bands=2",
        "privacy.noise_dtype=bfloat16",
    ]
    assert _main(config, tmp_path / "run", *PLAIN, *rough) == 0
    report = json.loads((tmp_path / "run" / "privacy_report.json").read_text())
    assert report["guarantee"]["kind"] == "estimate"
    assert "bfloat16" in report["sentence"]


def test_nothing_to_resume(config, tmp_path, capsys):
    assert _main(config, tmp_path / "none", "--resume", *PLAIN) == 2
    assert "start without --resume" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
