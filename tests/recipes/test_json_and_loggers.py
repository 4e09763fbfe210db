"""``--json`` of the recipes, and what their loggers get."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from dptrain import Guarantee
from recipes import sweep
from recipes.command import INTERRUPTED
from recipes.runfolder import read_metrics
from tests.helpers.logged import scalars
from tests.helpers.tiny_vision import PLAIN, SEED, run


def told(capsys):
    """The one document on standard output, and standard error."""
    shown = capsys.readouterr()
    return json.loads(shown.out), shown.err


def test_the_summary_is_one_document_and_nothing_else_is_on_stdout(config, tmp_path, capsys):
    output = tmp_path / "run"
    assert run(config, output, *PLAIN, "--json") == 0
    value, errors = told(capsys)
    assert value["folder"] == str(output)
    assert value["steps_executed"] == value["steps_planned"] == 6
    last = [r for r in read_metrics(output / "metrics.jsonl") if r["split"] == "test"][-1]
    assert value["measured"] == {name: last[name] for name in ("loss", "accuracy")}
    assert (value["measured_on"], value["measured_examples"]) == ("test", 360)
    guarantee = Guarantee.from_json(json.dumps(value["guarantee"]))
    stated = json.loads((output / "privacy_report.json").read_text())["guarantee"]
    assert json.loads(guarantee.to_json()) == stated
    assert load_file(value["model"])
    assert value["not_for_release"] == {"nonfinite_gradients": 0, "seed_in_config": True}
    assert str(SEED) not in json.dumps(value)
    assert "train" in errors  # the progress


def test_without_it_words_are_printed(config, tmp_path, capsys):
    assert run(config, tmp_path / "run", *PLAIN) == 0
    assert capsys.readouterr().out.startswith("test loss")


def test_a_mistake_is_one_line_on_stderr_and_nothing_on_stdout(config, tmp_path, capsys):
    assert run(config, tmp_path / "run", *PLAIN, "--json", "optimizer.lr=-1") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: optimizer.lr=-1")
    assert shown.err.count("\n") == 1


def test_an_interruption_prints_no_document(config, tmp_path, capsys, monkeypatch):
    from recipes import command

    def interrupted(current):
        print("words of whoever was interrupted")
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "finish", interrupted)
    assert run(config, tmp_path / "run", *PLAIN, "--json") == INTERRUPTED
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "words of whoever" in shown.err
    assert "continue with the same command" in shown.err


def test_a_simulation_has_no_guarantee_and_no_model(config, tmp_path, capsys):
    assert run(config, tmp_path / "run", *PLAIN, "--json", "--simulate", "4") == 0
    value, _ = told(capsys)
    assert value["simulation"] is True
    assert value["guarantee"] is None
    assert value["model"] is None


def test_numbers_that_json_cannot_write_are_texts(config, tmp_path, capsys):
    without = [*PLAIN, "privacy.noise_multiplier=0"]
    assert run(config, tmp_path / "run", *without, "--json") == 0
    assert told(capsys)[0]["guarantee"]["epsilon"] == "inf"


@pytest.mark.slow
def test_a_grid_prints_its_results(config, tmp_path, capsys):
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        f"recipe: vision\nruns:\n  - config: {config}\n    grid: {{optimizer.lr: [0.1, 0.5]}}\n"
    )
    given = ["--grid", str(grid), "--output", str(tmp_path / "runs"), "--json", *PLAIN]
    assert sweep.main([*given, "--list"]) == 0
    folders = told(capsys)[0]["runs"]
    assert sweep.main(given) == 0
    value, _ = told(capsys)
    assert value["planned"] == len(value["finished"]) == len(folders) == 2
    assert value["failed"] == []
    assert {row["optimizer.lr"] for row in value["finished"]} == {0.1, 0.5}
    assert value["finished"] == json.loads((tmp_path / "runs" / "results.json").read_text())


# Loggers


def tags(output):
    return set(scalars(output / "tensorboard"))


def test_loggers_get_the_test_set_and_where_the_run_stands(config, tmp_path):
    output = tmp_path / "run"
    assert run(config, output, *PLAIN) == 0
    found = scalars(output / "tensorboard")
    assert set(found) == {
        "loss/test",
        "accuracy/test",
        "run/learning_rate",
        "run/epsilon_so_far",
        "run/epsilon_planned",
    }
    records = [r for r in read_metrics(output / "metrics.jsonl") if r["split"] == "test"]
    assert [e.step for e in found["accuracy/test"]] == [r["step"] for r in records]
    assert [e.value for e in found["accuracy/test"]] == pytest.approx(
        [r["accuracy"] for r in records]
    )
    stated = json.loads((output / "privacy_report.json").read_text())["guarantee"]["epsilon"]
    spent = [e.value for e in found["run/epsilon_so_far"]]
    assert spent[0] == 0
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(stated)


def test_private_metrics_go_to_loggers_by_a_field_of_that_name(config, tmp_path):
    output = tmp_path / "run"
    assert run(config, output, *PLAIN, "log_private_metrics=true", "debug_norms=true") == 0
    assert {"loss/train (not for release)", "debug/median_norm/train (not for release)"} <= tags(
        output
    )


@pytest.mark.slow
def test_held_out_examples_and_simulations_are_no_business_of_loggers(config, tmp_path):
    held_out, simulated = tmp_path / "held_out", tmp_path / "simulated"
    assert run(config, held_out, *PLAIN, "data.holdout=0.2") == 0
    assert not any(tag.startswith(("loss", "accuracy")) for tag in tags(held_out))
    assert run(config, simulated, *PLAIN, "--simulate", "4") == 0
    assert tags(simulated) == set()


def test_no_loggers_leave_nothing(config, tmp_path):
    assert run(config, tmp_path / "run", *PLAIN, "loggers=[]") == 0
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_loggers_may_change_when_a_run_goes_on(config, tmp_path, monkeypatch):
    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        from recipes import command

        patch.setattr(command, "finish", lambda current: current.folder.close())
        assert run(config, output, *PLAIN, "loggers=[]") == INTERRUPTED
    assert run(config, output, *PLAIN, "--resume") == 0
    assert "accuracy/test" in tags(output)


def test_mistakes_in_loggers_are_told_before_anything_is_read(
    config, tmp_path, capsys, monkeypatch
):
    for change, said in (
        ("loggers=[wandbb]", "did you mean wandb?"),
        ("loggers=[tensorboard, tensorboard]", "name each of them once"),
        ("loggers=tensorboard", "list"),
        ("log_private_metrics=1", "log_private_metrics"),
    ):
        assert run(config, tmp_path / "run", *PLAIN, change) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(config, tmp_path / "run", *PLAIN, "loggers=[mlflow]") == 2
    assert "dptrain[loggers]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_search_whose_number_of_runs_is_secret_tells_no_service_of_them(config, tmp_path, capsys):
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        f"recipe: vision\nruns:\n  - config: {config}\n    grid: {{optimizer.lr: [0.1, 0.5]}}\n"
    )
    given = ["--grid", str(grid), "--output", str(tmp_path / "runs"), "--trials", "2", *PLAIN]
    assert sweep.main([*given, "seed=null", "loggers=[wandb]"]) == 2
    error = capsys.readouterr().err
    assert "--trials 2 with loggers=['wandb']" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_neither_the_seed_nor_the_machine_is_among_the_facts(config, tmp_path):
    from recipes.vision import VisionSettings

    facts = VisionSettings(seed=SEED, output=str(tmp_path)).public_facts
    assert facts["optimizer.lr"] == 0.5
    assert "seed" not in facts
    assert str(tmp_path) not in facts.values()
