"""A misspelt word is answered by the nearest one, and nothing by an error number."""

from __future__ import annotations

import pytest

import dptrain
from dptrain.commands import CommandParser, certify, main
from dptrain.core import checks
from recipes import sweep, vision

PAIR = ["--scheme", "Poisson", "batch_size=20", "--strategy", "Identity", "--dataset-size", "1000"]
RUN = [*PAIR, "--steps", "50", "--sigma", "1", "--delta", "1e-5"]


def said(capsys, command, arguments):
    """What a command prints when it refuses, which is its last line."""
    try:
        status = command(arguments)
    except SystemExit as error:
        status = error.code
    assert status == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert "Errno" not in found.err
    return found.err.splitlines()[-1]


def replaced(words, old, new):
    assert old in words
    return [new if word == old else word for word in words]


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["acount", *RUN], "did you mean account?"),
        (["startegies"], "did you mean strategies?"),
        (["--vresion"], "did you mean --version?"),
        (["account", *replaced(RUN, "--sigma", "--noise-multiplyer")], "--noise-multiplier?"),
        (["account", *replaced(RUN, "--sigma", "--noise_multiplier")], "--noise-multiplier?"),
        (["account", *replaced(RUN, "--delta", "-delta")], "did you mean --delta?"),
        (["account", *replaced(RUN, "--scheme", "--sheme")], "did you mean --scheme?"),
        (["account", *replaced(RUN, "--dataset-size", "--datasetsize")], "--dataset-size?"),
        (["plan", "--epsilom", "8", "--dataset-size", "100"], "did you mean --epsilon?"),
        (["plan", "--epsilon=8", "--batchsize=3"], "did you mean --batch-size?"),
        (["strategies", "--step", "8", "--band=4", "--paramters", "9"], "--parameters?"),
        (["account", *RUN, "--adjacency", "add-or-remove"], "did you mean add_remove?"),
        (["account", *RUN, "--accountant", "gausian"], "did you mean gaussian?"),
        (["account", *replaced(RUN, "Poisson", "Poison")], "did you mean Poisson?"),
        (["account", *replaced(RUN, "Poisson", "poisson")], "did you mean Poisson?"),
        (["account", *replaced(RUN, "Identity", "Identty")], "did you mean Identity?"),
        (["account", *replaced(RUN, "batch_size=20", "batchsize=20")], "scheme.batch_size?"),
    ],
)
def test_the_nearest_word_is_named(capsys, arguments, nearest):
    assert nearest in said(capsys, main, arguments)


CONFIG = """
scheme: {type: Poisson, batch_size: 20}
strategy: {type: Identity}
privacy: {noise_multiplier: 1.0, delta: 1.0e-5}
steps: 50
model: {channels: [4]}
"""


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("right", "wrong", "nearest"),
    [
        ("scheme:", "shceme:", "'shceme'; did you mean scheme?"),
        ("strategy:", "startegy:", "'startegy'; did you mean strategy?"),
        ("privacy:", "privicy:", "'privicy'; did you mean privacy?"),
        ("steps:", "step:", "'step'; did you mean steps?"),
        ("noise_multiplier:", "noise_multiplyer:", "did you mean privacy.noise_multiplier?"),
        ("batch_size:", "batchsize:", "did you mean scheme.batch_size?"),
        ("type: Poisson", "type: Poisons", "did you mean Poisson?"),
    ],
)
def test_the_nearest_field_of_a_configuration_is_named(capsys, tmp_path, right, wrong, nearest):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    command = ["account", "--config", str(path), "--dataset-size", "1000"]
    assert main(command) == 0  # fields of recipes, such as model, are not looked at
    capsys.readouterr()
    assert right in CONFIG
    path.write_text(CONFIG.replace(right, wrong), encoding="utf-8")
    assert nearest in said(capsys, main, command)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (vision.main, ["--confg", "x.yaml"], "did you mean --config?"),
        (vision.main, ["--config", "CONFIG", "--steps=3"], "write the field as steps=VALUE"),
        (vision.main, ["--config", "CONFIG", "stesp=3"], "did you mean 'steps'?"),
        (vision.main, ["--config", "CONFIG", "optimizer.name=adan"], "did you mean adam?"),
        (vision.main, ["--config", "CONFIG", "clipping.type=Falt"], "did you mean Flat?"),
        (sweep.main, ["--gird", "x.yaml"], "did you mean --grid?"),
        (sweep.main, ["--grid", "GRID"], "did you mean vision?"),
        (certify.main, ["m.json", "--epslion", "8"], "did you mean --epsilon?"),
    ],
)
def test_recipes_and_certificates_answer_alike(capsys, tmp_path, command, arguments, message):
    config, grid = tmp_path / "run.yaml", tmp_path / "grid.yaml"
    config.write_text("steps: 5\n", encoding="utf-8")
    grid.write_text(f"recipe: vison\nruns: [{{config: {config}}}]\n", encoding="utf-8")
    places = {"CONFIG": str(config), "GRID": str(grid)}
    assert message in said(capsys, command, [places.get(word, word) for word in arguments])


def test_what_is_missing_is_said_when_every_word_is_known(capsys):
    assert "--epsilon, --batch-size" in said(capsys, main, ["plan", "--dataset-size", "100"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["account", "--steps", "4.5"], "--steps: '4.5' is no whole number"),
        (["account", "--dataset-size", "1e3"], "--dataset-size: '1e3' is no whole number"),
        (["plan", "--epsilon", "eight"], "--epsilon: 'eight' is no number"),
    ],
)
def test_what_is_no_number_is_told_in_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (main, ["account", "PLACE", "--delta", "1e-5"]),
        (main, ["account", "--config", "PLACE", *RUN[5:]]),
        (vision.main, ["--config", "PLACE"]),
        (sweep.main, ["--grid", "PLACE"]),
        (certify.main, ["PLACE", "--epsilon", "8", "--delta", "1e-6", "--out", "kept"]),
    ],
)
@pytest.mark.parametrize("place", ["gone", "folder"])
def test_a_file_that_is_missing_or_a_folder_is_named(
    capsys, tmp_path, monkeypatch, command, arguments, place
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    words = [place if word == "PLACE" else word for word in arguments]
    assert place in said(capsys, command, words)


def test_words_after_two_dashes_and_negative_numbers_are_no_options():
    parser = CommandParser(prog="here")
    parser.add_argument("--least", type=float)
    parser.add_argument("names", nargs="*")
    assert parser.parse_args(["--least", "-1.5", "--", "--odd"]).names == ["--odd"]
    assert parser.parse_args(["--least=-.5", "-"]).least == -0.5
    assert parser.parse_args(["--lea", "-3"]).least == -3  # as argparse, which takes beginnings


def test_a_choice_of_the_library_names_the_nearest():
    with pytest.raises(
        ValueError, match=r"objective='maximum' must be one of .*; did you mean max\?"
    ):
        checks.choice("objective", "maximum", ["mean", "max"])
    with pytest.raises(ValueError, match=r"objective='zzz' must be one of \['mean', 'max'\]$"):
        checks.choice("objective", "zzz", ["mean", "max"])


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"dptrain {dptrain.__version__}\n"
