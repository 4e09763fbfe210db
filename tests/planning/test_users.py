"""Plans for users: every row is what calibration says of it, and the best is the least."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from dptrain.accounting import calibrate
from dptrain.commands.cli import main
from dptrain.planning import plan_users
from dptrain.sampling import GraphPartition, PerUser, UserCyclic
from tests.helpers.user_graphs import graph_of, random_lists
from tests.sampling.users.test_per_user import graph_with

LISTS = random_lists(11, 900, 1200, 2)
GRAPH = graph_of(LISTS)
ASKED = {"epsilon": 4.0, "delta": 1e-4, "batch_size": 20, "steps": 40}


@pytest.fixture(scope="module")
def plan():
    return plan_users(GRAPH, bounds=(1, 2), max_bands=4, progress=False, **ASKED)


@pytest.mark.slow
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
            # A simulation answers by default, and takes less noise.
            accountant=row.accountant if row.scheme.get("min_sep", 1) > 1 else None,
        )
        sigma = row.mechanism.noise_multiplier
        assert shown.mechanism.noise_multiplier == pytest.approx(sigma)
        strategy = row.mechanism.strategy
        assert row.error == pytest.approx(strategy.rmse(40) * sigma / 20)
        assert row.mechanism.scheme.unit.max_examples <= row.bound


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_best_has_the_least_error_for_what_it_keeps(plan):
    assert plan.best.cost == min(row.error / row.kept for row in plan.rows)
    assert list(plan.rows) == sorted(plan.rows, key=lambda row: row.cost)
    text = str(plan)
    assert f"graph.bound({plan.best.bound}" in text
    assert "\n* " in text
    assert "without samples" in text
    # Hidden draws cost less than what leaves neighbors out.
    least = {
        kind: min(r.cost for r in plan.rows if type(r.mechanism.scheme).__name__ == kind)
        for kind in ("UserCyclic", "UserMinSep")
    }
    assert least["UserCyclic"] < least["UserMinSep"]
    again = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert len(again["rows"]) == len(plan.rows)
    assert again["rows"][0]["error"] == plan.best.error


@pytest.mark.slow
def test_what_it_says_to_train_with_runs(plan):
    code = str(plan).split("To train with it:\n")[1]
    names: dict = {"graph": GRAPH}
    exec("from dptrain import *", names)
    exec("\n".join(line.strip() for line in code.splitlines()), names)
    assert names["scheme"] == plan.best.mechanism.scheme
    assert names["strategy"].bind(40) == plan.best.mechanism.strategy
    assert len(next(names["scheme"].stream(0))) > 0


@pytest.mark.slow
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


OWNED = graph_with((1, 2, 3, 7, 5, 2) * 40)
GROUPS = np.bincount(OWNED.members)  # examples of each user


@pytest.fixture(scope="module")
def owned():
    return plan_users(
        OWNED, bounds=(1, 4), duplicates=(False,), max_bands=4, alignment=0.5, progress=False,
        **{**ASKED, "batch_size": 80},
    )  # fmt: skip


def means(plan):
    return [row for row in plan.rows if isinstance(row.mechanism.scheme, PerUser)]


@pytest.mark.slow
def test_means_of_users_are_compared_where_users_share_nothing(plan, owned):
    assert not means(plan)
    assert "alignment" not in str(plan)
    rows = means(owned)
    found = {(row.mechanism.scheme.group_size, row.strategy_name) for row in rows}
    assert found >= {(g, name) for g in (1, 4) for name in ("Identity(1)", "BandMF(2)")}
    for row in rows:
        scheme, groups = row.mechanism.scheme, np.minimum(GROUPS, row.mechanism.scheme.group_size)
        # As many examples a step as the others, which batches have on average.
        assert scheme.expected_batch_size * groups.mean() == pytest.approx(80)
        assert row.kept == 1.0
        assert row.bound is None
        again = calibrate(
            scheme=scheme.users, strategy=row.mechanism.strategy, epsilon=4.0, delta=1e-4
        )
        sigma = row.mechanism.noise_multiplier
        assert again.mechanism.noise_multiplier == pytest.approx(sigma, rel=1e-3)
        # The mean of g gradients of norm 1, two of which have inner product 1/2.
        square = np.mean([np.mean(0.5 + 0.5 * np.eye(g)) for g in groups])
        assert row.norm == pytest.approx(square**0.5)
        strategy = row.mechanism.strategy
        plain = strategy.rmse(40) * sigma / scheme.expected_batch_size
        assert row.error == row.cost == pytest.approx(plain * square**0.5)


@pytest.mark.slow
def test_the_alignment_at_which_means_pay(owned):
    single = [row for row in owned.rows if row.parts == 1.0]
    grouped = [row for row in owned.rows if row.parts < 1.0]
    assert all(row.breaks_even(1.0) is None for row in single)
    level = min(row.cost for row in single)
    for row in grouped:
        at = row.breaks_even(level)
        other = dataclasses.replace(row, alignment=at)
        assert other.cost == pytest.approx(level)
        assert dataclasses.replace(row, alignment=at - 0.01).cost < level
    limit = max(row.breaks_even(level) for row in grouped)
    assert 0.05 < limit < 1.0
    assert f"at an alignment below {limit:.2f}" in str(owned)
    assert "alignment=0.5" in str(owned)


@pytest.mark.slow
def test_a_users_gradients_of_known_alignment_have_means_of_that_norm():
    """By hand: three orthogonal gradients and three equal ones, each of norm 2."""
    apart, alike = 2.0 * np.eye(3), np.tile([2.0, 0.0, 0.0], (3, 1))
    row = plan_users(
        graph_with((3,) * 40), bounds=(3,), duplicates=(False,), max_bands=1, progress=False,
        **{**ASKED, "batch_size": 6},
    )  # fmt: skip
    row = means(row)[0]
    for gradients, alignment in ((apart, 0.0), (alike, 1.0)):
        norm = dataclasses.replace(row, alignment=alignment).norm
        assert 2.0 * norm == pytest.approx(np.linalg.norm(gradients.mean(axis=0)))


@pytest.mark.slow
def test_what_a_plan_says_of_means_runs(owned):
    names: dict = {"graph": OWNED}
    exec("from dptrain import *", names)
    row = min(means(owned), key=lambda row: row.cost)
    exec("\n".join(row.code), names)
    assert names["scheme"] == row.mechanism.scheme
    assert names["strategy"].bind(40) == row.mechanism.strategy
    again = json.loads(json.dumps(owned.to_dict(), allow_nan=False))
    assert again["alignment"] == 0.5
    assert {row["clipped"] for row in again["rows"]} == {"examples", "users"}


@pytest.mark.slow
def test_the_command_compares_means(tmp_path, capsys):
    file, plot = tmp_path / "users.txt", tmp_path / "plan.png"
    file.write_text("".join(f"u{u}\n" for u in OWNED.members))
    words = ["plan", "--users", str(file), "--epsilon", "4", "--delta", "1e-4", "--batch-size"]
    words += ["20", "--steps", "8", "--max-bands", "1", "--bounds", "1", "2"]
    assert main([*words, "--alignment", "0.25", "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    assert "PerUser(group_size=1, users=Poisson)" in text
    assert "alignment=0.25" in text
    assert plot.stat().st_size > 10_000


@pytest.mark.slow
def test_normalized_columns_and_cycles_in_between_are_tried(plan):
    names = {row.strategy_name.partition("(")[0] for row in plan.rows}
    assert names == {"Identity", "BandMF", "ColumnNormalizedBandMF"}
    cycles = {row.scheme.get("cycle", 1) for row in plan.rows}
    assert any(cycle & (cycle - 1) for cycle in cycles)
    for row in plan.rows:
        if row.strategy_name.startswith("Column"):
            (toeplitz,) = (
                each
                for each in plan.rows
                if each.strategy_name == f"BandMF({row.mechanism.strategy.bands})"
                and (each.scheme, each.bound, each.duplicates, type(each.mechanism.scheme))
                == (row.scheme, row.bound, row.duplicates, type(row.mechanism.scheme))
            )
            assert row.error <= toeplitz.error * (1 + 1e-4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--alignment", "1.5"], "alignment=1.5"),
        (["--dataset-size", "900"], "exactly one"),
        (["--bounds", "0"], "bounds"),
        (["--certify"], "--certify"),
        (["--batch-size", "20.5"], "must be an integer"),
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
    with pytest.raises(ValueError, match="no scheme runs batches of 800") as caught:
        plan_users(
            graph_of([[0, 1, 2]] * 900), bounds=(1,), progress=False, **{**ASKED, "batch_size": 800}
        )
    first, *reasons = str(caught.value).splitlines()
    assert first.endswith(":")
    assert reasons
    assert all(line.startswith("- k=1") and len(line) < 160 for line in reasons)


@pytest.mark.parametrize("delta", [1.0, 2.0, float("nan")])
def test_a_delta_that_is_none_is_refused_before_anything_is_computed(delta):
    with pytest.raises(ValueError, match=r"delta=.* below 1") as caught:
        plan_users(GRAPH, bounds=(1,), progress=False, **{**ASKED, "delta": delta})
    assert "no scheme" not in str(caught.value)


@pytest.mark.slow
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
