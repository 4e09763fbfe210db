"""``dptrain audit``: the audit of the function, and an exit status that says what it found."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dptrain.accounting import account
from dptrain.auditing import StatedCurve, audit_mechanism
from dptrain.auditing.plots import reached, trade_off
from dptrain.commands.cli import main
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import plot_audit
from dptrain.sampling import AttributionGraph, Poisson, UserCyclic
from dptrain.strategies import Identity

SCHEME = Poisson.for_batch_size(batch_size=20, dataset_size=1000, steps=20)
MECHANISM = MatrixMechanism(scheme=SCHEME, strategy=Identity(), noise_multiplier=0.8)
SMALL = ["--samples", "4000", "--runs", "2000", "--seed", "5"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mechanism.json"
    path.write_text(MECHANISM.to_json())
    return str(path)


def test_what_is_stated_passes(file, tmp_path, capsys):
    out, plot = tmp_path / "audit.json", tmp_path / "audit.png"
    words = [file, "--delta", "1e-4", *SMALL, "--json", str(out), "--plot", str(plot)]
    assert main(["audit", *words]) == 0
    printed = capsys.readouterr().out
    assert "PASSED: nothing contradicts the statement" in printed
    assert "proves no guarantee" in printed
    value = json.loads(out.read_text())
    assert value["passed"] is True
    assert value["epsilon"] == account(MECHANISM, delta=1e-4).epsilon
    assert value["seed"] == 5
    assert {each["direction"] for each in value["estimates"]} == {"remove", "add"}
    assert plot.stat().st_size > 10_000


def test_what_is_false_fails_loudly(file, capsys):
    epsilon = 0.7 * account(MECHANISM, delta=1e-4).epsilon
    words = [file, "--delta", "1e-4", "--epsilon", str(epsilon), *SMALL]
    assert main(["audit", *words]) == 1
    assert "VIOLATED: δ(" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--delta", "1e-4", "--samples", "10"], "samples=10 must be at least 1000"),
        (["--delta", "1e-4", "--sigma", "0"], "ε = ∞"),
        (["--delta", "1e-4", "--confidence", "1"], "confidence=1"),
        ([], "--delta is missing"),
    ],
)
def test_mistakes_are_told(file, capsys, words, said):
    assert main(["audit", file, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_seed_that_is_not_given_is_fresh_and_kept(file, tmp_path):
    found = []
    for name in ("a", "b"):
        out = tmp_path / name
        words = ["--delta", "1e-4", *SMALL[:4], "--json", str(out)]
        assert main(["audit", file, *words]) == 0
        found.append(json.loads(out.read_text())["seed"])
    assert found[0] != found[1]


def test_the_trade_off_is_that_of_the_curve():
    """Pure ε: min(e^ε α, 1 - e^-ε (1 - α))."""
    zero = np.array([0.0])
    curve = StatedCurve(epsilon=np.array([1.0]), remove=zero, add=zero)
    rates = np.array([0.0, 0.1, 0.5, 1.0])
    expected = np.minimum(np.e * rates, 1 - (1 - rates) / np.e)
    np.testing.assert_allclose(reached(curve, rates), expected)


def test_an_audit_without_a_curve_is_drawn(tmp_path):
    audit = audit_mechanism(
        MECHANISM, epsilon=1.0, delta=1e-3, samples=1000, runs=200, progress=False
    )
    plot_audit(audit, tmp_path / "plain.png")
    assert (tmp_path / "plain.png").stat().st_size > 10_000


def test_the_trade_off_of_canaries_is_that_of_every_threshold():
    """Brute force, with scores that several canaries have."""
    rng = np.random.default_rng(4)
    scores, included = rng.integers(0, 9, 40).astype(float), rng.random(40) < 0.5
    expected = {(0.0, 0.0)}
    for threshold in range(9):
        said = scores >= threshold
        expected.add((np.mean(said[~included]), np.mean(said[included])))
    found = trade_off(scores, included)
    np.testing.assert_allclose(np.transpose(found), sorted(expected))


GAUSSIAN = MatrixMechanism(
    scheme=Poisson(probability=1, dataset_size=1000, steps=4),
    strategy=Identity(),
    noise_multiplier=1.0,
)  # μ = 2, ε = 9.3 at δ = 1e-6


def test_canaries_go_through_the_engine(tmp_path, capsys):
    path, out = tmp_path / "gaussian.json", tmp_path / "canaries.json"
    path.write_text(GAUSSIAN.to_json())
    words = ["audit", str(path), "--delta", "1e-6", "--canaries", "--seed", "3"]
    plot = tmp_path / "canaries.png"
    assert main([*words, "--json", str(out), "--plot", str(plot)]) == 0
    assert plot.stat().st_size > 10_000
    assert (
        "1000 canaries, in or out by coins, and no gradients but theirs" in capsys.readouterr().out
    )
    value = json.loads(out.read_text())
    assert (value["seed"], value["canaries"]) == (3, 1000)
    assert 1 < value["one_run"]["epsilon_lower"] < value["epsilon"]
    assert value["one_run"]["curve_p_value"] is not None
    assert main([*words, "--epsilon", "1"]) == 1
    assert "VIOLATED: ε ≥ " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dataset-size", "5001"], "--canaries with a data set of 5001"),
        (
            ["--dataset-size", "100", "--adjacency", "add-remove"],
            "--canaries with adjacency='add_remove'",
        ),
    ],
)
def test_what_canaries_cannot_show_is_refused(capsys, words, said):
    scheme = ["--scheme", "Poisson", "batch_size=20", "--strategy", "Identity", "--steps", "5"]
    assert main(["audit", *scheme, *words, "--sigma", "1", "--delta", "1e-5", "--canaries"]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def of_users(tmp_path):
    """A mechanism's file, which holds no edges, and the file of its graph."""
    rows = [[f"u{e // 2}", f"v{e % 20}"] for e in range(80)]
    users, file = tmp_path / "users.txt", tmp_path / "users.json"
    users.write_text("\n".join(" ".join(row) for row in rows))
    scheme = UserCyclic.for_batch_size(
        graph=AttributionGraph.from_lists(sorted(row) for row in rows),
        batch_size=8,
        cycle=1,
        steps=4,
        method="greedy",
    )
    file.write_text(
        MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=2.0).to_json()
    )
    return str(file), str(users)


def test_users_of_a_graph_are_audited(of_users, tmp_path, capsys):
    file, users = of_users
    out = tmp_path / "audit.json"
    words = ["audit", file, "--users", users, "--delta", "1e-3", *SMALL, "--json", str(out)]
    assert main(words) == 0
    assert "audited:                user" in capsys.readouterr().out
    value = json.loads(out.read_text())
    assert value["passed"] is True
    assert value["epsilon_lower"] > 0.7 * value["epsilon"]
    assert main([*words[:-2], "--epsilon", str(0.6 * value["epsilon"])]) == 1


def test_users_are_canaries(of_users, tmp_path, capsys):
    """Two of them would do with two coins: what is shown is the layout, not the power."""
    file, users = of_users
    out, plot = tmp_path / "audit.json", tmp_path / "audit.png"
    words = ["audit", file, "--users", users, "--canaries", "--delta", "1e-3", "--seed", "3"]
    assert main([*words, "--json", str(out), "--plot", str(plot)]) == 0
    value = json.loads(out.read_text())
    assert value["who"].startswith("users of ")
    assert f"{value['canaries']} {value['who']}, in or out by coins" in capsys.readouterr().out
    assert plot.stat().st_size > 10_000


def test_a_graph_that_is_missing_or_another_one_is_told(of_users, file, tmp_path, capsys):
    mine, users = of_users
    other = tmp_path / "other.txt"
    other.write_text("a b\nb")
    for words, said in (
        ([mine], "give the graph of its examples as --users"),
        ([mine, "--users", str(other)], "the attribution graph has changed"),
        ([mine, "--users", users, "--canaries", "--user", "1"], "--user 1 with --canaries"),
        ([file, "--users", users], "--users with Poisson"),
        ([file, "--user", "1"], "--user 1 without --users"),
    ):
        assert main(["audit", *words, "--delta", "1e-3", *SMALL]) == 2
        assert said in capsys.readouterr().err
