"""``dptrain account`` and ``dptrain calibrate``: the numbers are those of the functions."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from dptrain.accounting import TradeOff, account, calibrate, trade_off
from dptrain.commands.cli import main
from dptrain.core.guarantee import Guarantee
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting.support_table import as_markdown
from dptrain.sampling import CyclicPoisson, MinSep, Poisson
from dptrain.strategies import BSR, Identity
from tests.helpers.stopping import hear_ctrl_c

POISSON = Poisson.for_batch_size(batch_size=20, dataset_size=1000, steps=50)
FLAGS = ["--scheme", "Poisson", "batch_size=20", "--strategy", "Identity", "--dataset-size", "1000"]
STEPS = ["--steps", "50"]
CYCLIC = CyclicPoisson.for_batch_size(batch_size=20, dataset_size=1000, cycle=4, steps=50)
CONFIG = """
scheme: {type: CyclicPoisson, batch_size: null, epoch_length: 50, cycle: 4}
strategy: {type: BSR, bands: 2}
privacy: {epsilon: 3.0}
epochs: 1.0
steps: null
"""


def mechanism(sigma=1.0):
    return MatrixMechanism(scheme=POISSON, strategy=Identity(), noise_multiplier=sigma)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mechanism.json"
    path.write_text(mechanism().to_json())
    return path


@pytest.mark.parametrize("target", [{"delta": 1e-5}, {"epsilon": 1.0}])
def test_states_what_account_states(file, tmp_path, capsys, target):
    out = tmp_path / "new" / "g.json"
    ((name, value),) = target.items()
    asked = [f"--{name}", str(value), "--json", str(out)]
    assert main(["account", str(file), *asked]) == 0
    found = Guarantee.from_json(json.dumps(json.loads(out.read_text())["guarantee"]))
    assert found == account(mechanism(), **target)
    assert str(found) in capsys.readouterr().out
    out.unlink()
    assert main(["account", *FLAGS, *STEPS, "--sigma", "1", *asked]) == 0
    by_flags = json.loads(out.read_text())["guarantee"]
    assert by_flags == json.loads(found.to_json())


def test_another_noise_multiplier_replaces_the_files(file, tmp_path):
    out = tmp_path / "g.json"
    command = ["account", str(file), "--delta", "1e-5", "--sigma", "2", "--json", str(out)]
    assert main(command) == 0
    shown = json.loads(out.read_text())["guarantee"]
    assert shown["epsilon"] == account(mechanism(2.0), delta=1e-5).epsilon


def test_profile_and_plot(file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "p.json", tmp_path / "p.png"
    command = ["account", str(file), "--delta", "1e-5", "--profile"]
    assert main([*command, "--json", str(out), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    curve = json.loads(out.read_text())["profile"]
    assert len(curve["epsilon"]) == len(curve["remove"]) == len(curve["add"])
    assert "remove" in capsys.readouterr().out


def test_list_says_who_answers_and_why_others_do_not(file, capsys):
    assert main(["account", str(file), "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("poisson-pld") and line.endswith("yes") for line in lines)
    assert any(line.startswith("gaussian") and "by name: " in line for line in lines)
    assert any(line.startswith("allocation-pld") and "no: it needs" in line for line in lines)
    assert main(["account", *FLAGS, *STEPS, "--list"]) == 0  # σ decides nothing


def test_support_prints_the_table(capsys):
    assert main(["account", "--support"]) == 0
    assert capsys.readouterr().out == as_markdown() + "\n"


def test_calibrates_from_a_configuration_and_writes_the_mechanism(tmp_path, capsys):
    config, out = tmp_path / "run.yaml", tmp_path / "m.json"
    config.write_text(CONFIG)
    command = ["calibrate", "--config", str(config), "--dataset-size", "1000"]
    assert main([*command, "--epsilon", "3", "--delta", "1e-5", "--out", str(out)]) == 0
    expected = calibrate(scheme=CYCLIC, strategy=BSR(bands=2), epsilon=3.0, delta=1e-5)
    assert MatrixMechanism.from_json(out.read_text()) == expected.mechanism
    said = capsys.readouterr().out
    assert f"{expected.mechanism.noise_multiplier:.6g}" in said
    # What was written is what account reads.
    assert main(["account", str(out), "--delta", "1e-5"]) == 0
    assert str(expected.guarantee) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["FILE"], "exactly one of --delta and --epsilon"),
        (["FILE", "--delta", "1e-5", "--epsilon", "1"], "exactly one of --delta and --epsilon"),
        (["FILE", "--delta", "1.5"], "delta=1.5"),
        (["FILE", "--delta", "0"], "delta=0"),
        (["FILE", "--epsilon", "-1"], "epsilon=-1"),
        (["FILE", "--delta", "1e-5", "--sigma", "-1"], "noise_multiplier=-1"),
        (["FILE", "--delta", "1e-5", "--sigma", "1e-5"], "noise_multiplier=1e-05"),
        (["FILE", "--delta", "1e-5", "--sigma", "1e300"], "noise_multiplier=1e+300"),
        (["FILE", "--delta", "1e-5", "--accountant", "poison"], "did you mean poisson-pld?"),
        (["FILE", "--delta", "1e-5", "--steps", "5"], "--steps with"),
        (["FILE", "--delta", "1e-5", "--plot", "x.png"], "add --profile"),
        (["FILE", "--delta", "1e-5", "--json", "FILE/x.json"], "mechanism.json"),
        (["gone.json", "--delta", "1e-5"], "no mechanism file gone.json: create one with"),
        (["WRONG", "--delta", "1e-5"], "is not a mechanism"),
        (["YAML", "--delta", "1e-5"], "give a configuration as --config"),
        ([*FLAGS, *STEPS, "--delta", "1e-5"], "--noise-multiplier is missing"),
        ([*FLAGS, "--sigma", "1", "--delta", "1e-5"], "exactly one of --epochs and --steps"),
        ([*FLAGS[:-2], *STEPS, "--sigma", "1", "--delta", "1e-5"], "--dataset-size is missing"),
        ([*FLAGS[3:], *STEPS, "--sigma", "1", "--delta", "1e-5"], "--scheme is missing"),
        (
            ["--scheme", "Poison", *FLAGS[2:], *STEPS, "--sigma", "1", "--delta", "1e-5"],
            "did you mean Poisson",
        ),
        (
            ["--scheme", "Poisson", "batch_size=2000", *FLAGS[3:], *STEPS, "--sigma", "1",
             "--delta", "1e-5"],
            "2000",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named_and_exit_with_2(file, tmp_path, capsys, arguments, match):
    (tmp_path / "wrong.json").write_text("{")
    (tmp_path / "run.yaml").write_text("steps: 4\n")
    places = {
        "FILE": str(file),
        "WRONG": str(tmp_path / "wrong.json"),
        "YAML": str(tmp_path / "run.yaml"),
    }
    words = [places.get(word, word.replace("FILE", str(file))) for word in arguments]
    assert main(["account", *words]) == 2
    said = capsys.readouterr()
    assert match in said.err
    assert said.out == ""


def test_unknown_adjacency_exits_with_2(file):
    with pytest.raises(SystemExit) as error:
        main(["account", str(file), "--delta", "1e-5", "--adjacency", "nearby"])
    assert error.value.code == 2


def test_certificates_of_who_makes_none_are_refused(file, tmp_path, capsys):
    command = ["calibrate", str(file), "--epsilon", "1", "--delta", "1e-5"]
    assert main([*command, "--certificates", str(tmp_path / "c")]) == 2
    assert "only simulations create certificates" in capsys.readouterr().err


def test_a_delta_that_protects_nobody_is_warned_of_in_one_line(file, capsys):
    assert main(["account", str(file), "--delta", "0.5"]) == 0
    wrong = "dptrain account: warning: delta=0.5"
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith(wrong) for line in lines] == [True]
    target = ["--epsilon", "1", "--delta", "0.5"]
    assert main(["calibrate", str(file), *target]) == 0  # asks more than once, says it once
    assert capsys.readouterr().err.count("warning: delta=0.5") == 1


def test_a_folder_that_cannot_keep_certificates_is_named_before_the_work(file, capsys):
    scheme = MinSep.for_batch_size(batch_size=20, dataset_size=1000, min_sep=4, steps=50)
    pair = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
    file.write_text(pair.to_json())
    target = ["--epsilon", "1", "--delta", "1e-5", "--certificates", str(file / "c")]
    assert main(["calibrate", str(file), *target]) == 2
    assert f"--certificates {file / 'c'}: cannot write there" in capsys.readouterr().err


def test_no_figure_of_a_profile_is_minus_zero(capsys):
    # Adding has losses of at most -log(1 - q) a step: beyond, δ is 0.
    asked = ["--sigma", "0.3", "--delta", "1e-5", "--profile"]
    assert main(["account", *FLAGS, *STEPS, *asked]) == 0
    assert "-0" not in capsys.readouterr().out.split("| remove")[-1].replace("e-0", "")


@pytest.mark.slow
def test_interrupted_certificate_exits_with_130_and_can_be_continued(tmp_path):
    folder = tmp_path / "certificates"
    command = [
        sys.executable, "-m", "dptrain", "calibrate",
        "--scheme", "MinSep", "batch_size=50", "min_sep=2", "--strategy", "SquareRoot",
        "--dataset-size", "1000", "--steps", "20", "--epsilon", "4", "--delta", "1e-5",
        "--accountant", "min-sep-any-matrix", "--certificates", str(folder),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ, preexec_fn=hear_ctrl_c
    ) as process:
        deadline = time.monotonic() + 60
        while not any(folder.glob("*partial*")) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    (kept,) = folder.glob("*partial*")
    assert "dptrain calibrate: interrupted" in said
    assert str(folder) in said
    assert kept.stat().st_size > 0


@pytest.mark.slow
def test_add_or_remove_needs_no_number_of_examples(tmp_path, capsys):
    """The nominal size stands for N, in epochs and in p, and nothing else is told or read."""
    told = []
    for size in ([], ["--dataset-size", "953"], ["--dataset-size", "954"]):
        out = tmp_path / "-".join(["found", *size])
        assert main(
            ["account", "--scheme", "Poisson", "batch_size=20", "nominal_size=1000",
             "--strategy", "Identity", "--epochs", "2", "--sigma", "1.1", "--delta", "1e-4",
             "--profile", "--json", str(out), *size]
        ) == 0  # fmt: skip
        value = json.loads(out.read_text())
        assert value["guarantee"]["adjacency"] == "add_remove"
        assert value["guarantee"]["steps_planned"] == 2 * 1000 / 20
        assert value["guarantee"]["scheme"]["probability"] == 0.02
        printed = capsys.readouterr().out.replace(str(out), "")
        told.append((printed, out.read_text()))
    assert told[0] == told[1] == told[2]
    public = ["account", *FLAGS, *STEPS, "--sigma", "1", "--delta", "1e-5"]
    assert main([*public, "--adjacency", "add-remove"]) == 2
    assert "nominal_size=" in capsys.readouterr().err


@pytest.mark.slow
def test_a_configuration_is_not_asked_about_what_it_says(tmp_path, capsys):
    """Targets, noise and accountant of the privacy group; flags take precedence."""
    config = tmp_path / "run.yaml"
    scheme = Poisson.for_batch_size(batch_size=20, dataset_size=1000, steps=50)

    def write(privacy):
        config.write_text(
            "scheme: {type: Poisson, batch_size: 20}\nstrategy: {type: Identity}\n"
            f"steps: 50\nprivacy: {privacy}\n"
        )

    def found(command, *flags):
        out = tmp_path / "found.json"
        call = [command, "--config", str(config), "--dataset-size", "1000", "--json", str(out)]
        assert main([*call, *flags]) == 0, capsys.readouterr().err
        value = json.loads(out.read_text())
        return value if command == "calibrate" else value["guarantee"]

    def sigma(epsilon, delta, accountant=None):
        return calibrate(
            scheme=scheme, strategy=Identity(), epsilon=epsilon, delta=delta, accountant=accountant
        ).mechanism.noise_multiplier

    write("{epsilon: 3.0, delta: 1.0e-4}")
    assert found("calibrate")["noise_multiplier"] == sigma(3.0, 1e-4)
    assert found("calibrate", "--epsilon", "4")["noise_multiplier"] == sigma(4.0, 1e-4)
    assert found("calibrate", "--delta", "1e-5")["noise_multiplier"] == sigma(3.0, 1e-5)
    write("{epsilon: 3.0, delta: null, accountant: gaussian}")
    assert found("calibrate")["noise_multiplier"] == sigma(3.0, 1 / 2000, "gaussian")
    write("{epsilon: null, delta: 1.0e-4, noise_multiplier: 1.5, accountant: gaussian}")
    shown = found("account")
    ours = account(mechanism(1.5), delta=1e-4, accountant="gaussian")
    assert (shown["epsilon"], shown["accountant"]) == (ours.epsilon, "gaussian")
    assert found("account", "--epsilon", "2")["epsilon"] == 2.0
    assert main(["calibrate", "--config", str(config), "--dataset-size", "1000"]) == 2
    assert "--epsilon is missing" in capsys.readouterr().err
    write("{epsilon: three, delta: 1.0e-4}")
    assert main(["calibrate", "--config", str(config), "--dataset-size", "1000"]) == 2
    assert "privacy.epsilon='three'" in capsys.readouterr().err


@pytest.mark.slow
def test_attacks_are_told_drawn_and_written(file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "a.json", tmp_path / "a.png"
    command = ["account", str(file), "--delta", "1e-5", "--attacks"]
    assert main([*command, "--json", str(out), "--attacks-plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(out.read_text())["attacks"]
    found = TradeOff.from_json(json.dumps(written.pop("trade_off")))
    assert found == trade_off(mechanism(), account(mechanism(), delta=1e-5))
    assert written == json.loads(json.dumps(found.summary()))
    assert str(found) in capsys.readouterr().out
    assert main(["account", str(file), "--delta", "1e-5", "--attacks-plot", str(plot)]) != 0
    assert "add --attacks" in capsys.readouterr().err
