"""Plans for users: every row is what calibration says of it, and the best is the least."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dptrain.accounting import calibrate
from dptrain.commands.cli import main
from dptrain.planning import plan_users
from dptrain.sampling import GraphPartition, UserCyclic
from tests.helpers.user_graphs import graph_of, random_lists

LISTS = random_lists(11, 900, 1200, 2)
GRAPH = graph_of(LISTS)
ASKED = {"epsilon": 4.0, "delta": 1e-4, "batch_size": 20, "steps": 40}


@pytest.fixture(scope="module")
def plan():
    return plan_users(GRAPH, bounds=(1, 2), max_bands=4, progress=False, **ASKED)


def test_rows_are_what_calibration_says(plan):
    assert len(plan.rows) > 12
    kinds = {type(row.mechanism.scheme).__name__ for row in plan.rows}
    assert kinds == {"UserCyclic", "UserMinSep", "UserFixed"}
    for row in plan.rows[::5]:
        shown = calibrate(
            scheme=row.mechanism.scheme,
            strategy=row.mechanism.strategy,
            epsilon=4.0,
            delta=1e-4,
        )
        sigma = row.mechanism.noise_multiplier
        assert shown.mechanism.noise_multiplier == pytest.approx(sigma)
        strategy = row.mechanism.strategy
        assert row.error == pytest.approx(strategy.rmse(40) * sigma / 20)
        assert row.mechanism.scheme.unit.max_examples <= row.bound


def test_kept_counts_different_examples_that_can_be_drawn(plan):
    bounded = GRAPH.bound(2, duplicates=True, seed=0)
    for row in plan.rows:
        if (row.bound, row.duplicates) != (2, True):
            continue
        kept = set(bounded.rows.tolist())
        if isinstance(row.mechanism.scheme, UserCyclic):
            partition = GraphPartition.of_graph(bounded.graph, **row.scheme)
            kept = set(bounded.rows[partition.slots >= 0].tolist())
        assert row.kept == len(kept) / 900
        assert row.cost == row.error / row.kept


def test_the_best_has_the_least_error_for_what_it_keeps(plan):
    assert plan.best.cost == min(row.error / row.kept for row in plan.rows)
    assert list(plan.rows) == sorted(plan.rows, key=lambda row: row.cost)
    text = str(plan)
    assert f"graph.bound({plan.best.bound}" in text
    assert "\n* " in text
    # Hidden draws cost less than what leaves neighbors out.
    least = {
        kind: min(r.cost for r in plan.rows if type(r.mechanism.scheme).__name__ == kind)
        for kind in ("UserCyclic", "UserMinSep")
    }
    assert least["UserCyclic"] < least["UserMinSep"]
    again = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert len(again["rows"]) == len(plan.rows)
    assert again["rows"][0]["error"] == plan.best.error


def test_what_it_says_to_train_with_runs(plan):
    code = str(plan).split("To train with it:\n")[1]
    names: dict = {"graph": GRAPH}
    exec("from dptrain import *", names)
    exec("\n".join(line.strip() for line in code.splitlines()), names)
    assert names["scheme"] == plan.best.mechanism.scheme
    assert names["strategy"].bind(40) == plan.best.mechanism.strategy
    assert len(next(names["scheme"].stream(0))) > 0


def test_the_command_reads_a_file_of_users(tmp_path, capsys):
    file, out, plot = tmp_path / "users.txt", tmp_path / "plan.json", tmp_path / "plan.png"
    file.write_text("".join(" ".join(f"u{u}" for u in row) + "\n" for row in LISTS))
    words = ["plan", "--users", str(file), "--epsilon", "4", "--delta", "1e-4", "--batch-size"]
    words += ["20", "--steps", "40", "--max-bands", "2", "--bounds", "2"]
    assert main([*words, "--json", str(out), "--plot", str(plot)]) == 0
    assert "Best (*)" in capsys.readouterr().out
    value = json.loads(out.read_text())
    assert value["users"] == len(np.unique(np.concatenate(LISTS)))
    assert {row["max_examples"] for row in value["rows"]} == {2}
    assert plot.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--dataset-size", "900"], "exactly one"),
        (["--bounds", "0"], "bounds"),
        (["--certify"], "--certify"),
        (["--batch-size", "20.5"], "whole number"),
        (["--epochs", "3"], "exactly one"),
    ],
)
def test_the_command_refuses_what_says_nothing_about_users(tmp_path, capsys, more, message):
    file = tmp_path / "users.txt"
    file.write_text("a b\nb\nc\n")
    words = ["plan", "--users", str(file), "--epsilon", "4", "--batch-size", "1", "--steps", "4"]
    assert main([*words, *more]) == 2
    assert message in capsys.readouterr().err


def test_an_example_without_users_is_named(tmp_path, capsys):
    file = tmp_path / "users.txt"
    file.write_text("a b\n\nc\n")
    words = ["plan", "--users", str(file), "--epsilon", "4", "--batch-size", "1", "--steps", "4"]
    assert main(words) == 2
    assert "example 1 has no user" in capsys.readouterr().err


def test_batches_that_nothing_can_fill_are_refused():
    with pytest.raises(ValueError, match="no scheme runs batches of 800"):
        plan_users(
            graph_of([[0, 1, 2]] * 900), bounds=(1,), progress=False, **{**ASKED, "batch_size": 800}
        )


@pytest.mark.parametrize("delta", [1.0, 2.0, float("nan")])
def test_a_delta_that_is_none_is_refused_before_anything_is_computed(delta):
    with pytest.raises(ValueError, match=r"delta=.* below 1") as caught:
        plan_users(GRAPH, bounds=(1,), progress=False, **{**ASKED, "delta": delta})
    assert "no scheme" not in str(caught.value)


def test_slots_without_a_turn_are_not_kept():
    # Of 8 slots a run of 4 steps reaches 4.
    graph = graph_of([[e] for e in range(64)])
    asked = {**ASKED, "batch_size": 4, "steps": 4}
    rows = plan_users(graph, bounds=(1,), duplicates=(False,), progress=False, **asked).rows
    kept = {row.scheme["cycle"]: row.kept for row in rows if "cycle" in row.scheme}
    assert kept[4] == 1.0
    assert kept[8] == 0.5


def test_the_file_that_cannot_be_read_is_named(tmp_path, capsys):
    file = tmp_path / "users.bin"
    file.write_bytes(bytes(range(256)))
    words = ["plan", "--users", str(file), "--epsilon", "4", "--batch-size", "1", "--steps", "4"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "users.bin" in said
    assert "UTF-8" in said
