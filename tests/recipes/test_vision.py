"""The vision recipe end to end, on a tiny model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_model

from dptrain.core.guarantee import Guarantee, Kind
from dptrain.core.randomness import split_seed
from dptrain.mechanism import MatrixMechanism
from recipes.models import vgg
from recipes.runfolder import load_checkpoint, read_metrics
from tests.helpers.tiny_vision import PLAIN, SEED, TINY, run


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """A run with everything on: MinSep, BandMF, certified calibration, plots."""
    output = tmp_path_factory.mktemp("finished") / "run"
    assert run(config, output, *TINY, "scheme.min_sep=2", "strategy.bands=2", f"seed={SEED}") == 0
    return output


@pytest.mark.slow
def test_every_file_is_written(finished):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "config.yaml",
        "metrics.jsonl",
        "checkpoint.pt",
        "model.safetensors",
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
    assert [r["step"] for r in metrics if r["split"] == "test"] == [0, 2, 4, 6]
    assert all(r["not_for_release"] for r in metrics if r["split"] == "train")


def test_the_saved_model_is_the_trained_one(finished):
    model = vgg(in_channels=1, classes=10, image_size=8, channels=[4], groups=2, hidden=4)
    assert load_model(model, finished / "model.safetensors") == (set(), [])
    trained = load_checkpoint(finished)["run"]["module"].values()
    for ours, theirs in zip(model.state_dict().values(), trained, strict=True):
        assert torch.equal(ours, theirs)


def test_a_seed_in_the_configuration_is_said_to_be_no_part_of_the_release(finished):
    assert yaml.safe_load((finished / "config.yaml").read_text())["seed"] == SEED
    assert "not for release: config.yaml holds the seed" in (finished / "summary.txt").read_text()


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


@pytest.mark.slow
def test_a_secure_run_says_so_and_stays_secure(config, tmp_path, capsys):
    plain = [part for part in PLAIN if not part.startswith("seed=")]
    safe = [*plain, "privacy.secure=true"]
    assert run(config, tmp_path / "run", *safe) == 0
    report = json.loads((tmp_path / "run" / "privacy_report.json").read_text())
    assert report["guarantee"]["noise_generator"].startswith("AES-256-CTR")
    assert any("AES-256-CTR" in line for line in report["conditions"])
    assert "| noise generator | AES-256-CTR" in (tmp_path / "run/privacy_report.md").read_text()
    capsys.readouterr()
    assert run(config, tmp_path / "run", "--resume", *plain) == 2
    assert "privacy.secure: the run has True, now False" in capsys.readouterr().err
    assert run(config, tmp_path / "run", "--resume", *safe) == 0


def test_rounded_buffers_leave_an_estimate_in_the_report(config, tmp_path):
    rough = [
        "scheme.type=MinSep",
        "scheme.min_sep=2",
        "strategy.type=BSR",
        "strategy.bands=2",
        "privacy.noise_dtype=bfloat16",
    ]
    assert run(config, tmp_path / "run", *PLAIN, *rough) == 0
    report = json.loads((tmp_path / "run" / "privacy_report.json").read_text())
    assert report["guarantee"]["kind"] == "estimate"
    assert "bfloat16" in report["sentence"]
