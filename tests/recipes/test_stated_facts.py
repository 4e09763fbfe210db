"""What a recipe's statement says beside the guarantee: its settings, and none of its secrets."""

import json
import subprocess

import pytest

from dptrain.commands import main
from recipes.report import commit_of
from tests.helpers.tiny_vision import PLAIN, SEED, run


def facts(config, output, *words):
    assert run(config, output, *PLAIN, *words) == 0
    text = (output / "privacy_report.json").read_text(encoding="utf-8")
    assert str(SEED) not in text
    assert str(output.parent) not in text
    return json.loads(text)["run"]


@pytest.mark.slow
def test_settings_are_stated_and_the_hash_knows_no_seed(config, tmp_path, capsys):
    found = facts(config, tmp_path / "one", "privacy.max_grad_norm=0.7", "optimizer.lr=0.25")
    assert found["max_grad_norm"] == 0.7
    assert found["clipping"] == "type=Flat"
    assert "name=sgd, lr=0.25" in found["optimizer"]
    assert found["augmentation"] == "none"
    assert found["runs"] is None
    assert found["data"] == "digits"
    assert found["public_data"].endswith("; the test images were scored without noise")
    assert found["public_weights"] == "none, they began at random"
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "one")]) == 0
    said = capsys.readouterr().out
    assert "declared, not verified: run.max_grad_norm: 0.7" in said
    same = ("privacy.max_grad_norm=0.7", "optimizer.lr=0.25", "seed=5", "checkpoint_every=3")
    again = facts(config, tmp_path / "two", *same)
    assert again == found
    names = ("statement.model=digits-1", "statement.organization=a school")
    named = facts(
        config, tmp_path / "four", "privacy.max_grad_norm=0.7", "optimizer.lr=0.25", *names
    )
    assert named == {**found, "model": "digits-1", "organization": "a school"}
    other = facts(config, tmp_path / "three", "privacy.max_grad_norm=0.8", "optimizer.lr=0.25")
    assert other["configuration"] != found["configuration"]


def git(folder, *words):
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_commit_is_that_of_a_clean_checkout(tmp_path):
    root = tmp_path / "checkout"
    (root / "part").mkdir(parents=True)
    assert commit_of(root) is None
    git(root, "init", "--quiet")
    assert commit_of(root) is None  # nothing is committed
    (root / "part" / "code.py").write_text("1\n")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "Begin")
    commit = git(root, "rev-parse", "HEAD")
    assert commit_of(root) == commit
    assert commit_of(root / "part") is None  # of somebody else's checkout
    (root / "part" / "code.py").write_text("2\n")
    assert commit_of(root) == f"{commit}, with changes that are in no commit"


def test_what_was_held_out_is_not_public(config, tmp_path):
    found = facts(config, tmp_path / "one", "data.holdout=0.2")
    assert "scored" not in found["public_data"]
