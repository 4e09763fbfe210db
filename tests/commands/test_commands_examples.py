"""Every help ends with an example, and every example works as it stands."""

from __future__ import annotations

import pathlib
import shlex

import pytest

from dptrain.accounting.simulation import SimulatedAccountant
from dptrain.commands import certify, main
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep
from dptrain.strategies import BandMF
from recipes import arxiv, individual, sweep, vision
from recipes.config import load_config

ROOT = pathlib.Path(__file__).parents[2]
COMMANDS = ("account", "audit", "calibrate", "compose", "odometer", "plan", "strategies", "verify")
RECIPES = {"vision": vision, "individual": individual, "arxiv": arxiv}
SCHEMAS = sweep.SCHEMAS


def examples(capsys, command, *words):
    """The command lines below "example:" in a help, continued ones in one."""
    with pytest.raises(SystemExit) as done:
        command([*words, "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    _, heading, shown = text.partition("\nexample:\n")
    assert heading
    return [shlex.split(line) for line in shown.replace("\\\n", " ").strip().splitlines()]


def test_the_list_of_commands_has_an_example_that_leads_on(capsys):
    (line,) = examples(capsys, main)
    assert line[0] == "dptrain"
    assert examples(capsys, main, *line[1:-1])
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = "plan,strategies,calibrate,account,audit,train,report,verify,compose,odometer"
    assert f"{{{listed}}}" in capsys.readouterr().out
    assert set(COMMANDS) < set(listed.split(","))


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=[pytest.mark.slow] * (each == "plan")) for each in COMMANDS],
)
def test_examples_of_the_command_line_run(capsys, tmp_path, monkeypatch, command):
    lines = examples(capsys, main, command)
    monkeypatch.chdir(tmp_path)
    for program, *words in lines:
        # What is then composed, charged or verified.
        later = ("compose", "odometer", "verify")
        made_first = command in later and words[0] == "calibrate"
        assert (program, words[0]) == ("dptrain", command) or made_first
        assert main(words) == 0
        written = [words[i + 1] for i, word in enumerate(words) if word in ("--out", "--json")]
        assert all(pathlib.Path(name).stat().st_size for name in written)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["open", "add", "show", "check"])
def test_examples_of_a_ledger_run(capsys, tmp_path, monkeypatch, action):
    lines = examples(capsys, main, "odometer", action)
    monkeypatch.chdir(tmp_path)
    assert any(words[1:3] == ["odometer", action] for words in lines)
    for program, *words in lines:
        assert (program, main(words)) == ("dptrain", 0)


@pytest.mark.parametrize("name", RECIPES)
def test_examples_of_recipes_are_whole_runs(capsys, tmp_path, monkeypatch, name):
    """Read and validated, up to where the run would begin."""
    lines = examples(capsys, RECIPES[name].main)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for python, dash_m, module, *words in lines:
        assert (python, dash_m, module) == ("python", "-m", f"recipes.{name}")
        seen = []

        def prepared(settings, *_, seen=seen, **__):
            settings.validate()
            seen.append(settings)
            raise ValueError("far enough")

        monkeypatch.setattr("recipes.command.prepare", prepared)
        assert RECIPES[name].main(words) == 2
        assert capsys.readouterr().err == "error: far enough\n"
        config = words[words.index("--config") + 1]
        assert seen[0] != load_config(SCHEMAS[name], config)  # the example changes something


def test_examples_of_training_are_whole_runs(capsys, monkeypatch):
    lines = examples(capsys, main, "train")
    monkeypatch.chdir(ROOT)
    seen = []

    def prepared(settings, *_, resume, **__):
        settings.validate()
        seen.append((settings.output, resume))
        raise ValueError("far enough")

    monkeypatch.setattr("recipes.command.prepare", prepared)
    for program, *words in lines:
        assert (program, words[0], main(words)) == ("dptrain", "train", 2)
    assert seen == [("runs/tighter", False), ("runs/tighter", True)]
    # The second goes on with the first: what that changed is changed again.
    overridden = [{word for word in words if "=" in word} for _, *words in lines]
    assert overridden[0] == overridden[1] != set()


def test_the_example_of_a_sweep_lists_its_runs(capsys, tmp_path, monkeypatch):
    ((*start, _, _, last),) = lines = examples(capsys, sweep.main)
    assert start == ["python", "-m", "recipes.sweep"]
    assert last == "--list"
    monkeypatch.chdir(ROOT)
    assert sweep.main(lines[0][3:]) == 0
    assert capsys.readouterr().out.strip()


def test_the_example_of_a_plan_is_a_question(capsys, monkeypatch, tmp_path):
    """What takes long is the answer."""
    (line,) = examples(capsys, main, "plan")
    asked = []

    def compared(question, **_):
        asked.append(question)
        raise ValueError("far enough")

    monkeypatch.setattr("dptrain.commands.plan.compare", compared)
    monkeypatch.chdir(tmp_path)
    assert main(line[1:]) == 2
    assert capsys.readouterr().err == "dptrain plan: far enough\n"
    assert asked[0].steps * asked[0].batch_size == 10 * asked[0].dataset_size


def test_the_example_of_a_certificate_is_a_simulation(capsys, tmp_path, monkeypatch):
    """As far as the question: drawing the samples would take longer."""
    ((*start, mechanism), options) = (lambda line: (line[:4], line[4:]))(
        *examples(capsys, certify.main)
    )
    assert start == ["python", "-m", "dptrain.commands.certify"]
    monkeypatch.chdir(tmp_path)
    scheme = MinSep.for_batch_size(batch_size=20, dataset_size=10**5, min_sep=4, steps=8)
    pair = MatrixMechanism(scheme=scheme, strategy=BandMF(bands=4).bind(8), noise_multiplier=1.0)
    pathlib.Path(mechanism).write_text(pair.to_json(), encoding="utf-8")

    def asked(accountant, mechanism, *, epsilon, delta):
        raise ValueError(f"{accountant.name} for epsilon={epsilon}, delta={delta}")

    monkeypatch.setattr(SimulatedAccountant, "calibrate", asked)
    assert certify.main([mechanism, *options]) == 2
    assert "min-sep-importance for epsilon=8.0, delta=1e-06" in capsys.readouterr().err
