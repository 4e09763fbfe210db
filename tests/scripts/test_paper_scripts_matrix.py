"""The scripts behind the figures of the balls-in-bins and the MMCC paper run, on tiny settings."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.accounting.balls_in_bins import BallsInBinsLosses
from dptrain.accounting.renyi.gram import gram_matrix
from dptrain.strategies import BSR
from scripts.paper import (
    balls_in_bins_fig2,
    balls_in_bins_fig3,
    linear_last_iterate,
    matrix_fig4,
    matrix_fig8,
)
from scripts.paper.balls_in_bins_curves import Estimator, Panel, sigma_at
from scripts.paper.common import read_csv
from scripts.results import rows_of
from tests.helpers.plain_means import means

pytest.importorskip("matplotlib")

BINS = ["--bins", "5", "--points", "2", "--samples", "2000"]


@pytest.mark.slow
@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("script", "arguments", "files", "columns"),
    [
        (balls_in_bins_fig2, ["--panels", "ad", *BINS], ["balls_in_bins_fig2"], {"sigma"}),
        (balls_in_bins_fig3, ["--panels", "a", *BINS], ["balls_in_bins_fig3"], {"sigma"}),
        (
            linear_last_iterate,
            ["--steps", "4", "--points", "3", "--groups", "2", "--delta", "1e-6"],
            ["linear_last_iterate"],
            {"epsilon", "last_remove"},
        ),
        (matrix_fig4, ["--steps", "16", "--points", "2"], ["matrix_fig4"], {"epsilon_mmcc"}),
        (matrix_fig8, ["--largest", "4"], ["matrix_fig8"], {"n", "ratio", "epsilon"}),
    ],
)
def test_writes_a_table_and_a_picture(script, arguments, files, columns, tmp_path, capsys):
    script.main([*arguments, "--output", str(tmp_path)])
    for name in files:
        rows = rows_of(tmp_path / f"{name}.json", name) or read_csv(tmp_path / f"{name}.csv")
        assert rows
        assert columns <= set(rows[0])
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert "paper" in capsys.readouterr().out


@pytest.mark.parametrize("remove", [True, False])
def test_importance_sampling_agrees_with_plain_losses(remove):
    sigma, epsilon, samples = 1.5, 0.3, 40_000
    mechanism = Panel("", lambda: BSR(bands=3), bins=8).mechanism(sigma)
    gram = gram_matrix(mechanism.strategy, steps=8, bins=8)
    weighted, error = Estimator(gram, sigma, remove=remove, samples=samples).delta(epsilon)
    losses = BallsInBinsLosses(mechanism.strategy, 8, 8)
    plain = means(losses, sigma, [epsilon], samples=samples)
    which = (plain.remove, plain.remove_error) if remove else (plain.add, plain.add_error)
    assert abs(weighted - which[0][0]) < 6 * np.hypot(error, which[1][0])


def test_a_smaller_sigma_serves_where_a_bound_rises():
    points = [(1.0, 2.0, 2.0, 2.0), (2.0, 1.0, 1.0, 1.0), (4.0, 1.5, 1.5, 1.5)]
    assert sigma_at(points, 1.0) == pytest.approx(2.0)
    assert np.isnan(sigma_at(points, 0.5))
