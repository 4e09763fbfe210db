"""The script behind the figure of individual ε by two accountants runs, on tiny settings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dptrain.accounting.per_example.norm_grid import NormGrid
from recipes.data.digits import digits
from recipes.models.mlp import mlp
from scripts.paper import individual_fig1
from scripts.paper.common import read_csv
from scripts.paper.norm_history import NormHistory, Training

pytest.importorskip("matplotlib")


def test_renyi_is_above_pld_and_the_bound_above_the_curve(tmp_path, capsys):
    individual_fig1.main(
        ["--rows", "20", "--epochs", "0.2", "--probability", "0.02", "--points", "12",
         "--levels", "4", "--output", str(tmp_path)]
    )  # fmt: skip
    rows = read_csv(tmp_path / "individual_fig1.csv")
    assert len({row["row"] for row in rows}) == 20
    assert all(float(row["epsilon_renyi"]) >= float(row["epsilon_pld"]) > 0 for row in rows)
    curve = read_csv(tmp_path / "individual_fig1_curve.csv")
    compared = [row for row in curve if row["compared"] == "1"]
    assert len(compared) == 5
    assert all(float(row["delta_gdp"]) >= float(row["delta"]) for row in compared)
    assert (tmp_path / "individual_fig1.png").stat().st_size > 10_000
    assert "paper" in capsys.readouterr().out


def test_every_row_is_counted_at_every_step_by_its_norm():
    # With a learning rate of 0 the model stays as it is: a row has the same norm at every step.
    training = Training(
        probability=0.01, noise_multiplier=1.0, max_grad_norm=4.0, steps=3, learning_rate=1e-30,
        width=8, seed=5,
    )  # fmt: skip
    grid = NormGrid(smallest=1e-2, ratio=1.1)
    history = NormHistory.of(training, rows=6, grid=grid)
    assert history.counts.sum(axis=1).tolist() == [3] * 6
    assert history.counts.max() == 3
    images, labels = digits(image_size=8).train.tensors

    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = mlp(inputs=64, outputs=10, widths=[8])
    for row, counts in zip(history.rows.tolist(), history.counts, strict=True):
        loss = nn.functional.cross_entropy(model(images[[row]].flatten(1)), labels[[row]])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = float(torch.cat([g.flatten() for g in gradients]).norm())
        assert np.flatnonzero(counts).tolist() == [int(grid.bucket(min(norm / 4.0, 1.0)))]
