"""Sweeps as studies: several runs at once, killed and resumed, and the privacy of the choice."""

from __future__ import annotations

import json
import math
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

from dptrain import MatrixMechanism
from dptrain.accounting import (
    NegativeBinomialTrials,
    TradeOff,
    account,
    compose_runs,
    select_run,
    trade_off,
)
from dptrain.commands import main as command
from dptrain.core import Guarantee
from recipes import choice, random_search, study, sweep
from recipes.command import INTERRUPTED
from recipes.config import load_config
from recipes.runfolder import CHECKPOINT, load_checkpoint
from recipes.study import Job, Study, minimized, ranked
from recipes.sweep import main
from tests.helpers.gaussian_runs import full_batches

ROOT = pathlib.Path(__file__).parents[2]

TINY = """
data: {image_size: 8}
model: {channels: [4], groups: 2, hidden: 4}
scheme: {type: Poisson, batch_size: 40}
strategy: {type: Identity}
privacy: {epsilon: 2, delta: 1.0e-4}
plots: false
steps: 2
"""

# A run in small: it writes what a run writes, one line every few hundredths of a second.
FAKE = """
import json, pathlib, signal, sys, time
folder, level, steps = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
stopped = []
signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
(folder / "started").open("a").write("x")
with (folder / "metrics.jsonl").open("a") as file:
    for step in range(steps + 1):
        print(json.dumps({"step": step, "split": "test", "loss": level}), file=file, flush=True)
        time.sleep(0.02)
        if stopped:
            sys.exit(130)
(folder / "summary.txt").write_text("done")
"""


def fake(tmp_path, name, level, *, steps=3):
    folder = tmp_path / "runs" / name
    command = ["-S", "-c", FAKE, str(folder), str(level), str(steps)]
    return Job(folder=folder, parameters={"level": level}, command=command)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(study, "POLL", 0.02)


def states(output):
    optuna = pytest.importorskip("optuna")
    storage = f"sqlite:///{output / study.DATABASE}"
    trials = optuna.load_study(study_name="sweep", storage=storage).trials
    return [(trial.user_attrs["folder"], trial.state.name, trial.value) for trial in trials]


@pytest.mark.slow
def test_runs_at_once_and_not_again(tmp_path):
    jobs = [fake(tmp_path, f"run{i}", float(i), steps=10) for i in range(4)]
    begun = time.monotonic()
    assert Study(tmp_path, metric="loss", prune=False, jobs=jobs).run(at_once=4) == ([], False)
    assert time.monotonic() - begun < 60
    assert sorted(states(tmp_path)) == [(f"run{i}", "COMPLETE", float(i)) for i in range(4)]
    started = [job.folder / "started" for job in jobs]
    assert Study(tmp_path, metric="loss", prune=False, jobs=jobs).run(at_once=2) == ([], False)
    assert [path.read_text() for path in started] == ["x"] * 4
    assert (tmp_path / study.DATABASE).stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_run_again(tmp_path):
    bad = Job(
        folder=tmp_path / "bad", parameters={"level": 1.0}, command=["-c", "raise SystemExit(2)"]
    )
    jobs = [bad, fake(tmp_path, "good", 2.0)]
    assert Study(tmp_path, metric="loss", prune=False, jobs=jobs).run(at_once=1) == (["bad"], False)
    assert Study(tmp_path, metric="loss", prune=False, jobs=jobs).run(at_once=1) == (["bad"], False)
    assert [state for _, state, _ in states(tmp_path)] == ["FAIL", "COMPLETE", "FAIL"]


@pytest.mark.slow
@pytest.mark.parametrize("look", [0.02, 2.0])
def test_what_is_worse_than_the_others_is_ended(tmp_path, monkeypatch, look):
    """However seldom it is looked at: a good run may have ended, a bad one be far ahead by then."""
    monkeypatch.setattr(study, "STARTUP_TRIALS", 1)
    monkeypatch.setattr(study, "POLL", look)
    jobs = [fake(tmp_path, "good", 1.0), fake(tmp_path, "worse", 5.0, steps=3000)]
    assert Study(tmp_path, metric="loss", prune=True, jobs=jobs).run(at_once=1) == ([], False)
    assert [(n, s) for n, s, _ in states(tmp_path)] == [("good", "COMPLETE"), ("worse", "PRUNED")]
    # It stays ended.
    Study(tmp_path, metric="loss", prune=True, jobs=jobs).run(at_once=1)
    assert (jobs[1].folder / "started").read_text() == "x"


@pytest.mark.slow
def test_a_killed_sweep_is_locked_until_its_runs_end_and_then_goes_on(tmp_path):
    """The sweep's process is killed outright; its run lives on for a while."""
    job = fake(tmp_path, "slow", 1.0, steps=150)
    code = (
        "import pathlib, sys\n"
        "from recipes.study import Study\n"
        "from tests.recipes.test_search import fake\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "job = fake(folder, 'slow', 1.0, steps=150)\n"
        "Study(folder, metric='loss', prune=False, jobs=[job]).run(at_once=1)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment, cwd=ROOT)
    while not (job.folder / "started").exists():
        time.sleep(0.05)
        assert first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait()
    with pytest.raises(ValueError, match="still at work there"):
        Study(tmp_path, metric="loss", prune=False, jobs=[job]).run(at_once=1)
    while not (job.folder / "summary.txt").exists():
        time.sleep(0.05)
    time.sleep(0.3)
    other = fake(tmp_path, "next", 2.0)
    assert Study(tmp_path, metric="loss", prune=False, jobs=[job, other]).run(at_once=1) == (
        [],
        False,
    )
    assert (job.folder / "started").read_text() == "x"
    assert ("next", "COMPLETE", 2.0) in states(tmp_path)
    assert "RUNNING" not in [state for _, state, _ in states(tmp_path)]


def test_a_study_keeps_its_metric(tmp_path):
    jobs = [fake(tmp_path, "run", 1.0)]
    with pytest.raises(ValueError, match="--score accuracy: the runs have loss"):
        Study(tmp_path, metric="accuracy", prune=False, jobs=jobs).run(at_once=1)
    with pytest.raises(ValueError, match="was begun with accuracy"):
        Study(tmp_path, metric="loss", prune=False, jobs=jobs)


def test_scores_are_ordered():
    assert minimized("loss")
    assert not minimized("accuracy")
    assert ranked(1.0, "loss") > ranked(2.0, "loss") > ranked(float("nan"), "loss")
    assert ranked(0.9, "accuracy") > ranked(0.2, "accuracy") > ranked(float("nan"), "accuracy")


def _grid(tmp_path, *, config=TINY, **axes):
    (tmp_path / "tiny.yaml").write_text(config)
    runs = [
        {"config": str(tmp_path / "tiny.yaml"), "grid": axes or {"optimizer.lr": [0.1, 0.2, 0.3]}}
    ]
    path = tmp_path / "grid.yaml"
    value = {"recipe": "vision", "output": str(tmp_path / "out"), "runs": runs}
    path.write_text(yaml.safe_dump(value))
    return str(path)


def of_report(folder):
    value = json.loads((folder / "privacy_report.json").read_text())["guarantee"]
    return Guarantee.from_json(json.dumps(value))


@pytest.mark.slow
def test_all_runs_of_a_grid_are_composed(tmp_path, capsys):
    """The figure is that of the runs' own curves, and so is at most what adding up gives."""
    assert main(["--grid", _grid(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "Privacy of the choice: all 3 runs together are at most (ε = 6, δ = 0.0003)"
    )
    assert "Not covered: whoever is in the test set" in out
    value = json.loads((tmp_path / "out" / "privacy_of_choice.json").read_text())
    folder = tmp_path / "out" / "tiny_lr=0.1"
    mechanism = MatrixMechanism.from_dict(load_checkpoint(folder)["run"]["mechanism"])
    one = trade_off(mechanism, of_report(folder), floor=1e-10, points=801)
    truth = compose_runs([one] * 3, delta=1e-4)
    assert value["epsilon"] == pytest.approx(truth.epsilon, rel=1e-6)
    assert 2.0 < value["epsilon"] < 6.0
    assert (value["delta"], value["runs"]) == (1e-4, 3)
    # The statement of each says it, and is otherwise what it was.
    for run in (tmp_path / "out").glob("tiny_*"):
        told = json.loads((run / "privacy_report.json").read_text())["run"]
        assert (told["runs"], told["choice"]["epsilon"]) == (3, value["epsilon"])
        assert value["sentence"] in (run / "privacy_report.md").read_text()
        assert command(["verify", str(run)]) == 0


@pytest.mark.slow
def test_a_grid_counts_whole_however_many_runs_were_made(tmp_path, capsys, monkeypatch):
    """The sweep is stopped after the first run, as somebody might who likes what came out of it."""
    vision = sweep.RECIPES["vision"]
    calls = []

    def only_the_first(argv):
        calls.append(argv)
        return vision(argv) if len(calls) == 1 else INTERRUPTED

    monkeypatch.setitem(sweep.RECIPES, "vision", only_the_first)
    axes = {"optimizer.lr": [0.1, 0.2, 0.3], "privacy.epsilon": [2, 3]}
    grid = _grid(tmp_path, **axes)
    assert main(["--grid", grid]) == INTERRUPTED
    assert "5 of them have not begun, and count all the same" in capsys.readouterr().out
    value = json.loads((tmp_path / "out" / "privacy_of_choice.json").read_text())
    folder = tmp_path / "out" / "tiny_lr=0.1_epsilon=2"
    mechanism = MatrixMechanism.from_dict(load_checkpoint(folder)["run"]["mechanism"])
    one = trade_off(mechanism, of_report(folder), floor=1e-10, points=801)
    # Runs at ε = 2 are like the first; of those at ε = 3 their promise is what is known.
    promise = TradeOff(
        epsilon=(3.0,),
        remove=(1e-4,),
        add=(1e-4,),
        floor=1e-4,
        kind=one.kind,
        accountant="other",
        adjacency=one.adjacency,
        unit=one.unit,
    )
    runs = [one] * 3 + [promise] * 3
    truth = compose_runs(runs, delta=1e-4)
    assert math.isinf(truth.epsilon)  # three points of δ each: nothing is shown at one δ
    truth = compose_runs(runs, delta=6e-4 * (1 + 1e-6))
    assert value["epsilon"] == pytest.approx(truth.epsilon, rel=1e-6)
    assert (value["delta"], value["runs"]) == (pytest.approx(6e-4, rel=2e-6), 6)
    assert "fixed before the first result" in value["condition"]
    told = (folder / "privacy_report.md").read_text()
    assert "All 6 planned runs together, whichever of them were made" in told


def test_a_run_of_which_nothing_is_known_is_not_left_out(tmp_path, monkeypatch):
    """It has not begun, its noise is stated and not its ε, and no other run has its mechanism."""
    folders = [tmp_path / name for name in ("made", "planned")]
    schema = sweep.SCHEMAS["vision"]
    settings = {
        folder: load_config(schema, None, ["privacy.epsilon=null", f"privacy.noise_multiplier={s}"])
        for folder, s in zip(folders, (1.0, 0.5), strict=True)
    }
    folders[0].mkdir()
    (folders[0] / CHECKPOINT).write_text("")
    stated = account(full_batches(0.5), delta=1e-5)
    known = TradeOff.of(stated), stated
    monkeypatch.setattr(choice, "_found", lambda made: [known for _ in made])
    with pytest.raises(ValueError, match=r"planned was planned and has not begun.*let it begin"):
        choice.reached(settings)
    again = {folders[0]: settings[folders[0]], folders[1]: settings[folders[0]]}
    assert choice.reached(again).runs == 2


def test_a_grid_that_grows_is_refused(tmp_path, capsys, monkeypatch):
    def begins(argv):
        folder = pathlib.Path(argv[argv.index("--output") + 1])
        folder.mkdir(parents=True)
        (folder / CHECKPOINT).write_text("")
        return 2

    monkeypatch.setattr(choice, "reached", lambda settings: None)
    monkeypatch.setitem(sweep.RECIPES, "vision", lambda argv: 2)
    first = {"optimizer.lr": [0.1, 0.2]}
    assert main(["--grid", _grid(tmp_path, **{"optimizer.lr": [0.1]})]) == 1
    monkeypatch.setitem(sweep.RECIPES, "vision", begins)
    assert main(["--grid", _grid(tmp_path, **first)]) == 1  # nothing had begun
    capsys.readouterr()
    for other in ({"optimizer.lr": [0.1, 0.2, 0.3]}, {"optimizer.lr": [0.1]}):
        assert main(["--grid", _grid(tmp_path, **other)]) == 2
        assert "runs of another grid have begun here" in capsys.readouterr().err
    assert main(["--grid", _grid(tmp_path, **first), "privacy.epsilon=3"]) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["simulate=2"], "a simulation is not private"),
        (["seed=1"], "belongs to several runs"),
        (["privacy.epsilon=null", "privacy.noise_multiplier=0"], "there is no noise"),
    ],
)
def test_the_first_line_says_what_is_not_accounted(tmp_path, capsys, monkeypatch, options, reason):
    monkeypatch.setitem(sweep.RECIPES, "vision", lambda argv: 2)
    main(["--grid", _grid(tmp_path), *options])
    first, *_, last = capsys.readouterr().out.splitlines()
    for line in (first, last):
        assert line.startswith("PRIVACY OF THE CHOICE: NOT ACCOUNTED")
        assert reason in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prune"], "say so by --public-score"),
        (["--trials", "3", "--prune", "--public-score"], "no independent draw"),
        (["--trials", "3", "seed=4"], "set seed to null"),
        (["--trials", "3", "simulate=2"], "not private"),
        (["--trials", "1"], "--trials 1: "),
        (["--public-score", "data.holdout=0.2"], "as private as that"),
        (["--jobs", "0"], "at least one"),
    ],
)
def test_what_the_theorem_does_not_cover_is_refused(tmp_path, capsys, options, message):
    assert main(["--grid", _grid(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_points_of_different_noise_have_to_say_what_they_promise(tmp_path, capsys):
    grid = _grid(tmp_path, **{"privacy.epsilon": [1, 2]})
    assert main(["--grid", grid, "--trials", "3", "privacy.delta=null"]) == 2
    assert "each has to state both" in capsys.readouterr().err


def in_this_process(found, arguments, recipe, output):
    return sweep.one_by_one(found, arguments, recipe)


@pytest.mark.slow
def test_a_random_search_releases_the_best_and_nothing_else(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "studied", in_this_process)
    monkeypatch.setattr(secrets, "randbelow", lambda most: int(0.6 * most))  # K = 2
    call = ["--grid", _grid(tmp_path), "--trials", "2", "--score", "accuracy", "--public-score"]
    assert main(call) == 0
    out, chosen = capsys.readouterr().out, tmp_path / "out" / "chosen"
    assert out.startswith("Privacy of the choice: The best of a secret, random number of runs")
    runs = list((tmp_path / "out" / random_search.RUNS).iterdir())
    assert len(runs) == 2
    accuracies = [
        json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"] for run in runs
    ]
    best = runs[int(np.argmax(accuracies))]
    assert (chosen / "model.safetensors").read_bytes() in [
        (run / "model.safetensors").read_bytes()
        for run, accuracy in zip(runs, accuracies, strict=True)
        if accuracy == max(accuracies)
    ]
    value = json.loads((chosen / "privacy_of_choice.json").read_text())
    mechanism = MatrixMechanism.from_dict(load_checkpoint(best)["run"]["mechanism"])
    one = trade_off(mechanism, of_report(best), floor=1e-10, points=801)
    truth = select_run(one, NegativeBinomialTrials(0.5), delta=1e-4)
    assert value["epsilon"] == pytest.approx(truth.epsilon, rel=1e-4)
    told = json.loads((chosen / "privacy_report.json").read_text())["run"]
    assert (told["runs"], told["choice"]["epsilon"]) == (None, value["epsilon"])
    assert value["sentence"] in (chosen / "privacy_report.md").read_text()
    # What is released tells neither how many there were nor which one it was.
    for path in chosen.rglob("*"):
        text = path.read_bytes() if path.is_file() else b""
        assert not any(run.name.encode() in text for run in runs), path
    assert {path.name for path in chosen.iterdir()} == {
        *("config.yaml", "summary.txt", "model.safetensors", "privacy_report.json"),
        *("privacy_report.md", "privacy_of_choice.json", "privacy_of_choice.txt"),
    }
    drawn = tmp_path / "out" / random_search.DRAWN
    assert drawn.stat().st_mode & 0o077 == 0
    # Again: nothing is drawn anew, and nothing runs again.
    before = drawn.read_text()
    monkeypatch.setattr(secrets, "randbelow", lambda most: most - 1)
    assert main(call) == 0
    assert drawn.read_text() == before
    # Another law or other settings are another search.
    for other in (["--law", "logarithmic"], ["steps=3"]):
        assert main([*call, *other]) == 2
        assert "drawn from another grid" in capsys.readouterr().err


def test_draws_are_uniform_and_of_the_law(tmp_path):
    trials, points = NegativeBinomialTrials(0.5), ["a", "b", "c"]
    numbers, names = [], []
    for i in range(600):
        (folder := tmp_path / str(i)).mkdir()
        found = random_search.drawn(folder, points, trials, "settings")
        numbers.append(len(found))
        names += [name for name, _ in found]
        assert len({path for _, path in found}) == len(found)
    assert abs(np.mean(numbers) - 2.0) <= 6 * np.sqrt(2.0 / 600)
    for name in points:
        share = names.count(name) / len(names)
        assert abs(share - 1 / 3) <= 6 * np.sqrt(2 / 9 / len(names))


def test_no_run_at_all_releases_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(secrets, "randbelow", lambda most: 0)
    assert main(["--grid", _grid(tmp_path), "--trials", "3", "--law", "poisson"]) == 0
    assert "nothing to release" in capsys.readouterr().out
    assert not (tmp_path / "out" / "chosen").exists()


@pytest.mark.slow
def test_two_runs_at_once_are_killed_and_resumed(tmp_path):
    """Of the recipe itself: the sweep and its runs are killed between their steps."""
    grid = _grid(
        tmp_path, config=TINY.replace("steps: 2", "steps: 300"), **{"optimizer.lr": [0.1, 0.2]}
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-m", "recipes.sweep", "--grid", grid, "--jobs", "2"]
    call += ["checkpoint_every=1", "evaluate_every=300"]
    first = subprocess.Popen(call, env=environment, cwd=tmp_path)
    folders = [tmp_path / "out" / f"tiny_lr={lr}" for lr in (0.1, 0.2)]
    while not all((folder / "ledger.jsonl").exists() for folder in folders):
        time.sleep(0.1)
        assert first.poll() is None
    first.send_signal(signal.SIGINT)
    assert first.wait() == 130
    assert not any((folder / "summary.txt").exists() for folder in folders)
    again = subprocess.run(call, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "2 of 2 runs are finished" in again.stdout
    assert "All 2 planned runs together" in again.stdout
