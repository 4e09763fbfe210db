"""What a recipe's statement says beside the guarantee: its settings, and none of its secrets."""

import json

from dptrain.commands import main
from tests.helpers.tiny_vision import PLAIN, SEED, run


def facts(config, output, *words):
    assert run(config, output, *PLAIN, *words) == 0
    text = (output / "privacy_report.json").read_text(encoding="utf-8")
    assert str(SEED) not in text
    assert str(output.parent) not in text
    return json.loads(text)["run"]


def test_settings_are_stated_and_the_hash_knows_no_seed(config, tmp_path, capsys):
    found = facts(config, tmp_path / "one", "privacy.max_grad_norm=0.7", "optimizer.lr=0.25")
    assert found["max_grad_norm"] == 0.7
    assert found["clipping"] == "type=Flat"
    assert "name=sgd, lr=0.25" in found["optimizer"]
    assert found["augmentation"] == "none"
    assert found["runs"] is None
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "one")]) == 0
    said = capsys.readouterr().out
    assert "declared, not verified: run.max_grad_norm: 0.7" in said
    same = ("privacy.max_grad_norm=0.7", "optimizer.lr=0.25", "seed=5", "checkpoint_every=3")
    again = facts(config, tmp_path / "two", *same)
    assert again == found
    other = facts(config, tmp_path / "three", "privacy.max_grad_norm=0.8", "optimizer.lr=0.25")
    assert other["configuration"] != found["configuration"]
