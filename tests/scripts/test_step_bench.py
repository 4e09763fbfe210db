"""The bench of step times: what it works out from measurements, and one small run of it."""

import dataclasses
import importlib.util
import mmap
import time

import pytest
import torch
from torch import nn

from scripts import results
from scripts.bench import (
    step_costs,
    step_load,
    step_measure,
    step_memory,
    step_models,
    step_plot,
    step_sides,
    step_time,
)
from scripts.bench.step_sides import DEFAULT_SIDES, ORDINARY, open_side

SMALL = ["ordinary", "opacus-hooks", "opacus-ghost", "hooks", "bookkeeping"]
SMALL += ["opake"] * (importlib.util.find_spec("opake") is not None)


@pytest.fixture
def small_mlp(monkeypatch):
    case = dataclasses.replace(
        step_models.CASES["mlp"],
        batch=8,
        build=lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, step_models.CLASSES)),
        inputs=lambda rows, generator: {"x": torch.randn(rows, 6, generator=generator)},
    )
    monkeypatch.setitem(step_models.CASES, "mlp", case)
    monkeypatch.setattr(step_sides, "SETTLED", 1)


def test_every_side_measures_the_same_training(small_mlp):
    sides = [open_side(name, "mlp", "cpu") for name in SMALL]
    for side in sides[1:]:
        assert side.labels.equal(sides[0].labels)
        assert side.inputs["x"].equal(sides[0].inputs["x"])
        with torch.no_grad():  # one step of noise apart: 1e-3 · σ R / 8 an entry
            for p, q in zip(side.module.parameters(), sides[0].module.parameters(), strict=True):
                assert 0 < (p - q).abs().max() < 0.01, side.name
        before = [p.detach().clone() for p in side.module.parameters()]
        step_measure.once(side)
        after = list(side.module.parameters())
        assert not any(p.equal(q) for p, q in zip(before, after, strict=True)), side.name


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("name", [name for name in step_models.ON_CPU if name != "gpt2-50k"])
def test_every_model_has_a_loss_of_its_own_rows(name):
    case = step_models.CASES[name]
    torch.manual_seed(0)
    module = case.module().eval()  # dropout would differ from call to call
    inputs, labels = case.data(rows=3)

    def loss(rows):
        part = {key: value[rows] for key, value in inputs.items()}
        return case.loss()(step_models.call(module, part), labels[rows])

    with torch.no_grad():
        single = [float(loss(slice(k, k + 1))) for k in range(3)]
        assert float(loss(slice(0, 3))) == pytest.approx(sum(single) / 3, rel=1e-4)


def test_ratios_are_within_rounds_and_busy_rounds_are_dropped(small_mlp, monkeypatch):
    sides = ["ordinary", "bookkeeping"]
    # The machine is twice as slow in every other round, and the last is disturbed.
    seconds = [{"ordinary": s, "bookkeeping": 1.5 * s} for s in (1.0, 2.0, 1.0, 2.0)]
    rounds = [(0.1, row) for row in seconds[:2]] * 2  # warm-up, then two good ones
    rounds[3:3] = [(1.5, {"ordinary": 1.0, "bookkeeping": 9.0})]
    left = iter(rounds)
    monkeypatch.setattr(step_measure, "round_of", lambda sides, order, clock: next(left))
    row = step_measure.measure("mlp", sides, rounds=2, device="cpu", max_load=0.2)
    assert row["ratio"]["bookkeeping"] == {"q1": 1.5, "median": 1.5, "q3": 1.5}
    assert row["seconds"] == {"ordinary": 1.5, "bookkeeping": 2.25}
    assert row["other_load"] == pytest.approx(0.1)
    assert next(left, None) is None, "no round more than needed"


def test_a_side_that_fails_is_reported_with_its_reason(small_mlp, monkeypatch):
    def refuse(name, model, device):
        if name == "bookkeeping":
            raise NotImplementedError("no rule for\n this layer")
        return open_side(name, model, device)

    monkeypatch.setattr(step_measure, "open_side", refuse)
    sides = ["ordinary", "bookkeeping"]
    row = step_measure.measure("mlp", sides, rounds=1, device="cpu", max_load=99)
    assert row["failures"] == {"bookkeeping": "NotImplementedError: no rule for this layer"}
    assert set(row["seconds"]) == {"ordinary"}


def test_own_work_is_no_load_of_others(monkeypatch):
    load = step_load.OtherLoad()
    if not load.exact:
        pytest.skip("no /proc/stat here")
    busy, own, now = step_load.busy_seconds(), step_load.own_seconds(), time.perf_counter()
    monkeypatch.setattr(step_load, "busy_seconds", lambda: busy + 3.0)
    monkeypatch.setattr(step_load, "own_seconds", lambda: own + 2.0)
    monkeypatch.setattr(step_load.time, "perf_counter", lambda: now + 2.0)
    assert load.read() == pytest.approx(0.5, abs=0.1)  # 3 s less 2 of our own, over 2 s


@pytest.mark.slow
def test_peak_memory_is_of_the_steps(small_mlp, monkeypatch):
    if not (step_memory.PROC / "status").exists():
        pytest.skip("no /proc here")
    side = step_memory.Side(ORDINARY, step_models.CASES["mlp"], "cpu")

    def step():
        # 64 MiB that are gone when the peak is read. A tensor may lie where freed memory is still
        # resident, and raise nothing.
        with mmap.mmap(-1, 64 << 20) as pages:
            pages[:: mmap.PAGESIZE] = bytes(len(pages) // mmap.PAGESIZE)

    monkeypatch.setattr(side, "step", step)
    found = step_memory.measure(side)
    assert 60 << 20 < found["peak_bytes"] - found["start_bytes"] < 200 << 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--threads", "0"], "--threads 0: at least 1"),
        (["--no-time", "--no-memory"], "nothing to measure"),
        (["--processor"], "add --threads 1"),
        (["--json", "/nowhere/step.json"], "no folder /nowhere"),
        (["--models", "gpt"], "invalid choice: 'gpt'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        step_time.parse(arguments)
    assert message in capsys.readouterr().err


def test_ordinary_is_always_a_side():
    assert step_time.parse(["--sides", "hooks"]).sides == [ORDINARY, "hooks"]
    assert step_time.parse([]).sides == DEFAULT_SIDES


def test_run_from_the_command_line_to_the_plot(tmp_path, monkeypatch, capsys):
    def child(script, arguments, allocator):
        side = arguments[arguments.index("--side") + 1] if "--side" in arguments else None
        row = {"model": "mlp", "batch": 1024, "allocator": allocator}
        if side == "opacus-ghost":
            return {**row, "side": side, "failure": "KeyError: x"}
        if side:
            peak = (3 if side == ORDINARY else 6) << 20
            return {**row, "side": side, "start_bytes": 1 << 20, "peak_bytes": peak}
        spread = {"q1": 1.2, "median": 1.25, "q3": 1.3}
        return {
            **row,
            "rounds": 3,
            "clock": "wall",
            "other_load": 0.5,
            "failures": {"opacus-ghost": "KeyError: x"},
            "seconds": {"ordinary": 0.02, "bookkeeping": 0.025},
            "ratio": {"ordinary": {"q1": 1.0, "median": 1.0, "q3": 1.0}, "bookkeeping": spread},
        }

    monkeypatch.setattr(step_time, "child", child)
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    sides = ["--sides", "ordinary", "bookkeeping", "opacus-ghost"]
    step_time.main(["--models", "mlp", "--allocator", "default", "tuned", *sides, *files])
    printed = capsys.readouterr().out
    assert "tuned allocator, wall time, 3 rounds, others 0.50 cores!" in printed
    row = next(line for line in printed.splitlines() if line.startswith("bookkeeping"))
    assert " ".join(row.split()) == "bookkeeping 25.0 ms 1.250 (1.20–1.30) 6 MiB (5) 2.00 (2.50)"
    assert "KeyError: x" in printed
    (result,) = results.read(tmp_path / "a.json")["devices"]
    table = results.read(tmp_path / "a.json")["tables"]["step_time"].markdown().splitlines()
    assert table[2].endswith("| default | 20 ms | 1.25 (1.20–1.30) |")
    assert table[-1].endswith("| tuned | 2 MiB | 2.50 |")
    assert [row["allocator"] for row in result["time"]] == ["default", "tuned"]
    assert len(result["memory"]) == 6
    assert step_plot.ratios(result, "memory", "tuned") == {
        "mlp": {"ordinary": 1.0, "bookkeeping": 2.5}
    }
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_allocator_reaches_the_process(monkeypatch):
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    seen = {}

    def run(command, *, env, **_):
        seen.update(env)
        return type("Done", (), {"returncode": 0, "stdout": "{}"})()

    monkeypatch.setattr(step_time.subprocess, "run", run)
    assert step_time.child("x.py", [], "tuned") == {"allocator": "tuned"}
    assert seen["MALLOC_TOP_PAD_"] == step_time.MALLOC["MALLOC_TOP_PAD_"]
    seen.clear()
    step_time.child("x.py", [], "default")
    assert not set(step_time.MALLOC) & set(seen)


def test_a_process_that_dies_is_no_result(monkeypatch):
    done = type("Done", (), {"returncode": -9, "stdout": ""})()
    monkeypatch.setattr(step_time.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(SystemExit, match="out of memory"):
        step_time.child("x.py", ["--model", "mlp"], "default")


def test_results_of_one_machine_add_up():
    def row(model, allocator, value):
        return {"model": model, "allocator": allocator, "value": value}

    def tree(machine, *rows):
        return {"machine": machine, "time": list(rows), "memory": list(rows[:1])}

    before = tree("a", row("mlp", "default", 1), row("vgg", "tuned", 2), row("vgg", "default", 3))
    again = tree("a", row("vgg", "tuned", 4))
    assert step_time.joined(before, again) == {
        "machine": "a",
        "time": [row("vgg", "default", 3), row("vgg", "tuned", 4), row("mlp", "default", 1)],
        "memory": [row("vgg", "tuned", 4), row("mlp", "default", 1)],
    }
    other = tree("b", row("vgg", "tuned", 4))
    assert step_time.joined(before, other) == other


def test_extra_costs_add_up_to_what_the_step_takes_longer():
    ordinary = {"forward": 2.0, "loss": 0.5, "backward": 5.0, "update": 1.0, "rest": 0.5}
    private = {"forward": 3.0, "loss": 0.5, "backward": 6.0, "norms": 4.0, "clipped sums": 3.5}
    private |= {"noise": 1.0, "noise: release": 0.75, "checksum": 0.25, "update": 1.5, "rest": 2.0}
    totals = {"step": 9.0}, {"step": 17.75}
    found = step_costs.extra(ordinary | totals[0], private | totals[1])
    assert sum(found.values()) == 8.75
    # Without the 4 s of norms the backward pass takes 3 s less, for sums that take 3.5 s.
    assert found["norms"] == 4.0
    assert found["clipped sums"] == 0.5
    assert found["forward pass"] == 1.0
    assert found["other"] == 1.5


def test_costs_of_a_small_step(small_mlp):
    row = step_costs.measure("mlp", 1, min)
    more = row["seconds"]["bookkeeping"] - row["seconds"]["ordinary"]
    assert sum(row["extra"].values()) == pytest.approx(more)
    assert row["extra"]["norms"] > 0
    assert row["extra"]["noise"] > 0


@pytest.mark.parametrize(
    "arguments", [["--rounds", "0"], ["--threads", "0"], ["--processor", "--threads", "2"]]
)
def test_costs_of_what_cannot_be_measured_are_refused(arguments):
    with pytest.raises(SystemExit):
        step_costs.parse(arguments)
