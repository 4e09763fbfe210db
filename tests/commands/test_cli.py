"""The command line."""

import json
import subprocess
import sys

import pytest

from dptrain.commands.cli import main

SMALL = ["strategies", "--steps", "24", "--bands", "1", "4", "--parameters", "1000"]


def test_table_with_files(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    figures, plot = tmp_path / "a" / "t.json", tmp_path / "b" / "t.png"
    assert main([*SMALL, "--epochs", "2", "--json", str(figures), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "BandMF(bands=4)" in out
    assert "24 steps" in out
    value = json.loads(figures.read_text())
    assert value["max_participations"] == 2
    assert value["min_sep"] == 12
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_momentum_changes_the_errors(capsys):
    main([*SMALL, "--no-time"])
    plain = capsys.readouterr().out
    main([*SMALL, "--no-time", "--momentum", "0.9"])
    assert "MomentumSGD" in (momentum := capsys.readouterr().out)
    assert momentum != plain


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--steps", "0"], "steps=0"),
        (["--steps", "8", "--epochs", "9"], "epochs=9"),
        (["--steps", "8", "--bands", "16"], "bands=16"),
        (["--steps", "8", "--momentum", "1.5"], "momentum=1.5"),
        (["--steps", "3000", "--bands", "1", "--dense"], "dense=True"),
    ],
)
def test_mistakes_are_named_and_exit_with_2(arguments, match, capsys):
    assert main(["strategies", *arguments]) == 2
    assert match in capsys.readouterr().err


def test_bands_that_nobody_asked_for_are_left_out_of_short_runs(capsys):
    assert main(["strategies", "--steps", "5", "--parameters", "10", "--no-time"]) == 0
    out = capsys.readouterr().out
    assert "BandMF(bands=4)" in out
    assert "bands=16" not in out


def test_a_place_that_cannot_be_written_to_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert main([*SMALL, "--no-time", "--json", str(tmp_path / "file" / "t.json")]) == 2
    said = capsys.readouterr()
    assert str(tmp_path / "file") in said.err
    assert "Identity" not in said.out  # found out before the work


def test_files_that_cannot_be_written_are_found_before_the_work(tmp_path, capsys, monkeypatch):
    def never(**_):
        raise AssertionError("worked")

    monkeypatch.setattr("dptrain.commands.strategies.compare_strategies", never)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    for option, name, match in (
        ("--plot", "x.foo", ".png, .pdf, .svg"),
        ("--plot", "folder.png", "folder.png"),
        ("--json", "file/x.json", "file"),
    ):
        assert main([*SMALL, option, str(tmp_path / name)]) == 2
        assert match in capsys.readouterr().err


def test_an_interruption_exits_with_130_and_says_what_is_kept(capsys, monkeypatch):
    for said in ("", "partial certificate: place/x.json"):

        def interrupted(said=said, **_):
            raise KeyboardInterrupt(*([said] if said else []))

        monkeypatch.setattr("dptrain.commands.strategies.compare_strategies", interrupted)
        assert main(SMALL) == 130
        assert capsys.readouterr().err == f"dptrain strategies: interrupted{said and ': '}{said}\n"


def test_unknown_command():
    with pytest.raises(SystemExit) as error:
        main(["startegies"])
    assert error.value.code == 2


@pytest.mark.slow
def test_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "dptrain", *SMALL, "--no-time"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Identity()" in done.stdout


PLAN = [
    "plan", "--epsilon", "4", "--delta", "1e-4", "--dataset-size", "1000", "--batch-size", "100",
    "--steps", "20", "--max-bands", "2", "--buffers", "0", "--parameters", "1000", "--no-time",
]  # fmt: skip


def test_a_plan_says_what_is_best_while_it_grows(capsys):
    assert main([*PLAN, "--accountant", "poisson-pld"]) == 0
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("best so far: ")]
    errors = [float(line.rpartition("error ")[2]) for line in lines]
    assert errors
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == len(errors)
    assert "best so far: " not in said.out


@pytest.mark.slow
def test_an_interrupted_plan_prints_what_it_has(tmp_path, capsys, monkeypatch):
    from dptrain.planning import comparison

    answered, left = comparison._Trials.try_out, [8]

    def try_out(self, candidate):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return answered(self, candidate)

    monkeypatch.setattr(comparison._Trials, "try_out", try_out)
    figures = tmp_path / "plan.json"
    assert main([*PLAN, "--json", str(figures)]) == 130
    said = capsys.readouterr()
    assert "Best (*): " in said.out
    assert (
        "interrupted: the comparison ended early with these results, and nothing was written"
        in said.err
    )
    assert not figures.exists()
    left[0] = 0
    assert main(PLAN) == 130
    assert "Best" not in capsys.readouterr().out
