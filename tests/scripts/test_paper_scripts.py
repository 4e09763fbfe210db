"""The scripts that redo figures of papers run, and their small helpers are right."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

from dptrain.accounting.poisson import SubsampledGaussianCurve, truncated_curve
from dptrain.core.guarantee import Adjacency
from scripts.paper import (
    common,
    gradient_descent,
    individual_fig3,
    individual_fig4,
    individual_fig5,
    individual_fig6,
    min_sep_fig2_fig3,
    min_sep_grid,
    truncated_poisson,
)
from scripts.results import rows_of

SMALL = min_sep_grid.Grid(16, (8, 16), (2, 4), (4.0,), delta=0.02)


@pytest.mark.parametrize("script", [individual_fig3, individual_fig4, individual_fig5])
def test_gradient_descent_figures(script, tmp_path, capsys):
    script.main(["--points", "5", "--output", str(tmp_path)])
    name = script.__name__.rpartition(".")[2]
    assert len(common.read_csv(tmp_path / f"{name}.csv")) == 5
    assert (tmp_path / f"{name}.png").stat().st_size > 1000
    assert "495" in capsys.readouterr().out


@pytest.mark.slow
def test_filtered_runs(tmp_path, capsys):
    few = ["individual.start=10", "epochs=20", "groups.size=20", "groups.test_size=10"]
    chosen = ["--factors", "1", "5", "--seeds", "2", "--output", str(tmp_path)]
    individual_fig6.main([*chosen, *few])
    rows = common.read_csv(tmp_path / "individual_fig6.csv")
    assert [float(row["factor"]) for row in rows[::20]] == [1, 5]
    assert all(int(row["active"]) == 1437 for row in rows if int(row["epoch"]) <= 10)
    assert len(common.read_csv(tmp_path / "individual_fig2.csv")) == 2 * 2 * 5
    spent = common.read_csv(tmp_path / "individual_fig7_fig8.csv")
    for factor in ("1", "5"):
        assert sum(int(row[f"images_at_{factor}"]) for row in spent) == 1437
    for name in ("6_auc", "6_active", "2", "7", "8"):
        assert (tmp_path / f"individual_fig{name}.png").stat().st_size > 1000
    assert "negligible gain" in capsys.readouterr().out


def test_steps_and_epsilon_of_gradient_descent_are_inverse():
    # Known numbers: 478 and 405 steps at ε = .8.
    sigma, delta = 100.0, 1e-5
    for steps_of, epsilon_of, expected in (
        (gradient_descent.gdp_steps, gradient_descent.gdp_epsilon, 478),
        (gradient_descent.rdp_steps, gradient_descent.rdp_epsilon, 405),
    ):
        steps = steps_of(0.8, sigma, delta)
        assert steps == expected
        assert epsilon_of(steps, sigma, delta) <= 0.8 < epsilon_of(steps + 1, sigma, delta)


def test_renyi_delta_and_epsilon_agree():
    for steps in (1, 30, 420, 3000):
        epsilon = gradient_descent.rdp_epsilon(steps, 100.0, 1e-5)
        assert gradient_descent.rdp_delta(steps, 100.0, epsilon) == pytest.approx(1e-5, rel=1e-9)
        assert epsilon > gradient_descent.gdp_epsilon(steps, 100.0, 1e-5)


@pytest.mark.slow
def test_min_sep_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(min_sep_fig2_fig3, "QUARTER", SMALL)
    min_sep_fig2_fig3.main(["--output", str(tmp_path)])
    rows = rows_of(tmp_path / "min_sep_fig2_fig3.json", "min_sep_fig2_fig3")
    assert [int(row["epoch_length"]) for row in rows] == [8, 16]
    assert all(float(row["ratio_to_balls_in_bins"]) <= 1 for row in rows)
    assert (tmp_path / "min_sep_fig2.png").exists()
    assert (tmp_path / "min_sep_fig3.png").exists()
    assert "never above 1" in capsys.readouterr().out


@pytest.mark.slow
def test_going_downhill_finds_what_trying_all_finds():
    found = [
        min_sep_grid.Search(SMALL, 16, 4.0, seed=1, exhaustive=exhaustive).min_sep((2, 2))
        for exhaustive in (False, True)
    ]
    assert found[0] == found[1]


def test_mse_is_that_of_the_definition():
    found = min_sep_grid.Search(SMALL, 8, 4.0, seed=1, exhaustive=False).cyclic()
    c, n = min_sep_grid.BandMF(bands=found.bands).bind(16).first_column(16), 16
    matrix = sum(value * np.eye(n, k=-k) for k, value in enumerate(c))
    error = np.tril(np.ones((n, n))) @ np.linalg.inv(matrix)
    assert found.mse == pytest.approx((error**2).sum() / n * found.sigma**2)


@pytest.mark.slow
def test_truncated_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(truncated_poisson, "_TABLE", 40_001)
    truncated_poisson.main(
        ["--examples", "200", "--probability", "0.05", "--steps", "3", "--delta", "1e-4",
         "--sigma", "2", "--batches", "12", "110", "--output", str(tmp_path)]
    )  # fmt: skip
    few, all_kept = rows_of(tmp_path / "truncated_poisson.json", "truncated_poisson")
    assert float(few["theorem_3_3"]) >= float(few["zero_out"])
    assert float(few["theorem_3_4"]) >= float(few["replace_one"])
    # Nothing is cut at B = 110: all are Poisson sampling, the older bound on its grid of .001.
    poisson = SubsampledGaussianCurve(0.05, 3, 1.0).epsilon(2.0, 1e-4)
    for name in ("theorem_3_1", "theorem_3_3", "zero_out"):
        assert float(all_kept[name]) == pytest.approx(poisson, rel=1e-3)
    assert poisson <= float(all_kept["older_bound"]) <= poisson + 2e-3
    assert float(few["older_bound"]) == math.inf
    assert (tmp_path / "truncated_poisson.png").exists()
    assert "took" in capsys.readouterr().out


def test_stated_pairs_are_those_of_the_theorem():
    # δ at γ = e^ε of one draw, as the integral of (P - γQ)_+ on a fine grid.
    q, sigma, epsilon = 0.3, 1.2, 0.4
    x = np.linspace(-18.0, 18.0, 400_001)
    for right, left in ((2.0, -1.0), (1.0, -2.0), (2.0, -2.0)):
        masses = [
            np.diff((1 - q) * ndtr(x / sigma) + q * ndtr((x - shift) / sigma))
            for shift in (right, left)
        ]
        exact = np.maximum(masses[0] - math.exp(epsilon) * masses[1], 0.0).sum()
        losses = truncated_poisson.stated_pair(q, right, left, sigma, 1e-3)
        excess = -np.expm1(np.minimum(epsilon - losses.losses, 0.0))
        found = float(np.exp(losses.log_mass) @ excess) + losses.infinity
        assert found == pytest.approx(exact, rel=1e-4)


def test_theorem_3_4_is_dearer_than_ours():
    given = {"size": 200, "p": 0.05, "largest": 12, "sigma": 1.0, "steps": 3, "delta": 1e-4}
    ours = truncated_curve(
        Adjacency.REPLACE_ONE, dataset_size=200, probability=0.05, max_batch_size=12, steps=3,
        sensitivity=1.0,
    ).epsilon(1.0, 1e-4)  # fmt: skip
    assert truncated_poisson.theorem(Adjacency.REPLACE_ONE, **given) > ours


def test_tables_refuse_ragged_rows(tmp_path):
    with pytest.raises(ValueError, match="2 values for 1 columns"):
        common.write_csv(tmp_path / "x.csv", ("a",), [(1, 2)])
