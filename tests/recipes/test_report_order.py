"""What a finished run writes first, what its configuration keeps to itself, what is told early."""

import dataclasses
import json

import pytest
import yaml
from safetensors.torch import load_file

import recipes.report
import recipes.run
from dptrain import PrivateTraining
from dptrain.core.guarantee import Guarantee
from recipes.config import flatten, load_config
from recipes.vision import VisionSettings
from tests.helpers.tiny_vision import PLAIN, run


@pytest.mark.slow
def test_model_and_statement_are_there_before_the_profile(config, tmp_path, monkeypatch):
    output, seen = tmp_path / "run", {}

    def stopped(*_):
        seen["model"] = load_file(output / "model.safetensors")
        seen["statement"] = json.loads((output / "privacy_report.json").read_text())
        raise KeyboardInterrupt

    real = recipes.report._profile
    monkeypatch.setattr(recipes.report, "_profile", stopped)
    drawn = [*PLAIN, "plots=true"]
    assert run(config, output, *drawn) == 130
    assert seen["model"]
    first = Guarantee.from_json(json.dumps(seen["statement"]["guarantee"]))
    assert first.steps_executed == first.steps_planned == 6
    # A curve that takes no time is there, and what attacks can reach by it; going on adds none.
    assert seen["statement"]["profile"]["kind"] == "exact"
    assert seen["statement"]["attacks"]["curve_refused"] is None
    monkeypatch.setattr(recipes.report, "_profile", real)
    assert run(config, output, *drawn, "--resume") == 0
    last = json.loads((output / "privacy_report.json").read_text())
    assert last == seen["statement"]


def test_the_published_configuration_names_no_place(config, tmp_path):
    output = tmp_path / "run"
    assert run(config, output, *PLAIN, "data.root=/home/somebody/secret") == 0
    text = (output / "config.yaml").read_text()
    assert str(tmp_path) not in text
    assert "somebody" not in text
    assert "data.root, output" in text.splitlines()[0]
    # Everything else is there, and is read back.
    back = flatten(dataclasses.asdict(load_config(VisionSettings, output / "config.yaml")))
    given = [word for word in PLAIN if "=" in word]
    stated = flatten(dataclasses.asdict(load_config(VisionSettings, None, given)))
    differ = {name for name in stated if stated[name] != back[name]}
    assert differ == {"privacy.delta"}  # worked out
    assert set(flatten(yaml.safe_load(text))) == set(stated) - {"data.root", "output"}


def test_the_published_summary_keeps_places_and_counts_to_itself(
    config, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(PrivateTraining, "nonfinite_examples", 7)
    output = tmp_path / "run"
    assert run(config, output, *PLAIN) == 0
    printed, kept = capsys.readouterr().out, (output / "summary.txt").read_text()
    assert f"everything is in {output}" in printed
    assert "7 gradients were NaN or infinite" in printed
    assert str(tmp_path) not in kept
    assert "7 gradients" not in kept
    assert str(Guarantee.from_json(_statement(output))) in kept


def _statement(output):
    return json.dumps(json.loads((output / "privacy_report.json").read_text())["guarantee"])


def test_a_name_on_the_hub_is_no_place(tmp_path):
    from recipes.arxiv import ArxivSettings

    words = ["steps=9", "data.path=/data/papers.json", "data.tokenizer=owner/bert"]
    settings = load_config(ArxivSettings, None, [*words, f"model.source={tmp_path}"])
    assert set(settings.local_names()) == {
        "output", "data.path", "data.cache_dir", "model.source",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps=5", "strategy.bands=12"], "bands=12 exceeds the 5 steps"),
        (
            ["steps=null", "epochs=0.5", "scheme.batch_size=null", "scheme.epoch_length=10",
             "strategy.bands=12"],
            "bands=12 exceeds the 5 steps",
        ),
        (
            ["steps=5", "strategy.type=BandInvMF", "strategy.inverse_bands=6"],
            "inverse_bands=6 exceeds the 5 steps",
        ),
        (["privacy.accountant=typo"], "privacy.accountant='typo' is unknown"),
    ],
)  # fmt: skip
def test_told_before_the_data_are_read(words, message, tmp_path, monkeypatch):
    def read(_):
        raise AssertionError("the data were read")

    settings = load_config(VisionSettings, None, ["steps=9", f"output={tmp_path / 'run'}", *words])
    with pytest.raises(ValueError, match=message):
        recipes.run.prepare(settings, read)
    assert not (tmp_path / "run").exists()
