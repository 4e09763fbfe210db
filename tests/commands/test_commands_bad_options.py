"""Every option of the commands: what it cannot mean ends in exit status 2, at once."""

from __future__ import annotations

import time

import pytest

from dptrain.commands.cli import main

RUN = ["--dataset-size", "100", "--steps", "10"]
PAIR = ["--scheme", "Poisson", "batch_size=10", "--strategy", "Identity"]
PLAN = ["plan", "--no-time", "--epsilon", "1", "--batch-size", "10", *RUN]
# Options come last, where they replace those before.
COMMANDS = {
    "account": ["account", *PAIR, *RUN, "--noise-multiplier", "1"],
    "calibrate": ["calibrate", *PAIR, *RUN, "--epsilon", "1", "--delta", "1e-3"],
    "plan": PLAN,
    "strategies": ["strategies", "--no-time", "--steps", "8"],
}
NO_NUMBER = ("nan", "inf", "-inf", "-1", "1e400", "x", "")
NO_COUNT = ("0", "-1", "1.5", "x", "", "nan")
OPTIONS = [
    *[("account", option, NO_NUMBER) for option in ("--noise-multiplier", "--delta", "--epsilon")],
    *[("calibrate", option, (*NO_NUMBER, "0")) for option in ("--delta", "--epsilon")],
    *[("plan", o, (*NO_NUMBER, "0")) for o in ("--epsilon", "--delta", "--batch-size")],
    ("strategies", "--momentum", (*NO_NUMBER, "1")),
    *[("account", option, NO_COUNT) for option in ("--dataset-size", "--steps")],
    *[("plan", o, NO_COUNT) for o in ("--dataset-size", "--steps", "--max-bands", "--parameters")],
    *[("strategies", o, NO_COUNT) for o in ("--steps", "--bands", "--parameters", "--epochs")],
    *[(command, "--steps", ("1000000000000",)) for command in COMMANDS],
]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("command", "option", "values"), OPTIONS)
def test_bad_options(command: str, option: str, values: tuple[str, ...], capsys) -> None:
    words = list(COMMANDS[command])
    if command == "account" and option not in ("--delta", "--epsilon"):
        words += ["--delta", "1e-3"]
    for value in values:
        started = time.monotonic()
        try:
            status = main([*words, f"{option}={value}"])
        except SystemExit as stopped:  # argparse's own
            status = stopped.code
        said = capsys.readouterr().err
        assert status == 2, f"{option}={value}: {said}"
        assert "Traceback" not in said
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("field", ["batch_size", "probability"])
@pytest.mark.parametrize("value", ["x", "nan", "true", "[1]", "{}", "-1", "0", ".inf"])
def test_bad_fields_of_a_scheme(field: str, value: str, capsys) -> None:
    scheme = ["--scheme", "Poisson", f"{field}={value}", "--strategy", "Identity", *RUN]
    assert main(["account", *scheme, "--noise-multiplier", "1", "--delta", "1e-3"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("field", ["bands=x", "bands=true", "bands=null", "bands=1.5", "bands=0"])
def test_bad_fields_of_a_strategy(field: str, capsys) -> None:
    pair = ["--scheme", "Poisson", "batch_size=10", "--strategy", "BandMF", field, *RUN]
    assert main(["account", *pair, "--noise-multiplier", "1", "--delta", "1e-3"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
