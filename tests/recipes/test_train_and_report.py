"""``dptrain train`` runs the recipe of a configuration; ``dptrain report`` reads its files."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from dptrain.commands.cli import main
from dptrain.core import Guarantee
from recipes.command import INTERRUPTED
from recipes.runfolder import load_checkpoint
from tests.helpers.stopping import ctrl_c, stop_at
from tests.helpers.tiny_vision import PLAIN, run


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    path = tmp_path_factory.mktemp("named") / "run.yaml"
    path.write_text("recipe: vision\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def finished(named, tmp_path_factory):
    output = tmp_path_factory.mktemp("finished") / "run"
    assert main(["train", "--config", str(named), "--output", str(output), *PLAIN]) == 0
    return output


def test_it_is_the_run_that_the_recipe_makes(finished, config, tmp_path):
    assert run(config, tmp_path / "run", *PLAIN) == 0
    ours, theirs = (load_checkpoint(path)["run"]["module"] for path in (finished, tmp_path / "run"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_interrupted_between_words_and_resumed(named, finished, tmp_path, monkeypatch, capsys):
    output = tmp_path / "run"
    words = ["--output", str(output), "--config", str(named)]
    with monkeypatch.context() as patch:
        stop_at(patch, 3, ctrl_c)
        assert main(["train", *PLAIN, *words]) == INTERRUPTED
    capsys.readouterr()
    assert main(["report", str(output)]) == 0
    said = capsys.readouterr().out
    assert "3 of 6 steps have run" in said
    assert "- checkpoint.pt: " in said
    assert main(["train", PLAIN[0], *words, "--resume", *PLAIN[1:]]) == 0
    again, whole = (load_checkpoint(path)["run"]["module"] for path in (output, finished))
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_a_report_is_what_the_statement_says(finished, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    figures, plot = tmp_path / "r.json", tmp_path / "r.png"
    assert main(["report", str(finished), "--json", str(figures), "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    stated = json.loads((finished / "privacy_report.json").read_text())["guarantee"]
    guarantee = Guarantee.from_json(json.dumps(stated))
    assert str(guarantee) in said
    value = json.loads(figures.read_text())
    assert value["guarantees"] == [stated]
    assert {record["split"] for record in value["metrics"]} == {"train", "test"}
    train = next(record for record in value["metrics"] if record["split"] == "train")
    assert train["not_for_release"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    # Whatever a run leaves is either named as private, or may be published.
    left = {path.name for path in finished.iterdir()} - set(value["not_for_release"])
    assert left == {
        "model.safetensors", "privacy_report.json", "privacy_report.md", "summary.txt",
    }  # fmt: skip
    # A statement alone, as it was published.
    assert main(["report", str(finished / "privacy_report.json")]) == 0
    assert str(guarantee) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words", "match"),
    [
        ("steps: 3", [], "names no recipe: add the line 'recipe: vision'"),
        ("recipe: visoin", [], "recipe=visoin: did you mean vision?"),
        ("recipe: vision", ["recipe=arxive"], "recipe=arxive: did you mean arxiv?"),
        ("recipe: vision", ["stesp=3"], "unknown field 'stesp'; did you mean 'steps'?"),
        ("recipe: vision", ["--resmue"], "unknown option --resmue: did you mean --resume?"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, text, words, match):
    file = tmp_path / "run.yaml"
    file.write_text(text + "\n", encoding="utf-8")
    try:
        status = main(["train", "--config", str(file), *words])
    except SystemExit as stopped:
        status = stopped.code
    said = capsys.readouterr().err
    assert status == 2
    assert match in said
    assert said.count("\n") == 1


def test_what_is_no_run_is_refused(tmp_path, finished, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "contains neither privacy_report.json nor checkpoint.pt" in capsys.readouterr().err
    damaged = tmp_path / "damaged"
    shutil.copytree(finished, damaged)
    (damaged / "privacy_report.json").unlink()
    whole = (damaged / "checkpoint.pt").read_bytes()
    (damaged / "checkpoint.pt").write_bytes(whole[: len(whole) // 2])
    assert main(["report", str(damaged)]) == 2
    assert "is damaged" in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert main(["report", str(other)]) == 2
    assert "no 'guarantee'" in capsys.readouterr().err
    other.write_text("{")
    assert main(["report", str(other)]) == 2
    assert "not valid JSON" in capsys.readouterr().err
    (damaged / "privacy_report.json").write_text((finished / "privacy_report.json").read_text())
    (damaged / "metrics.jsonl").unlink()
    assert main(["report", str(damaged), "--plot", str(tmp_path / "p.png")]) == 2
    assert "there are no metrics" in capsys.readouterr().err


def test_without_the_recipes_the_remedy_is_said(named, monkeypatch, capsys):
    """As after ``pip install`` of the package alone."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["train", "--config", str(named)]) == 2
    assert "change to a clone" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_options(shell, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--print-completion", shell])
    assert stopped.value.code == 0
    script = capsys.readouterr().out
    for word in ("plan", "train", "report", "--resume", "--epsilon"):
        assert word in script, word
