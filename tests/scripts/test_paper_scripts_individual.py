"""The script behind the figure of individual ε by two accountants runs, on tiny settings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from dptrain.contrib.individual.norm_grid import NormGrid
from recipes.data.digits import digits
from recipes.models.mlp import mlp
from scripts.paper import individual_fig1, norm_history
from scripts.paper.common import read_csv
from scripts.paper.norm_history import Digits, NormHistory, Training
from tests.helpers.image_files import write_mnist

pytest.importorskip("matplotlib")


@pytest.mark.slow
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


@pytest.mark.slow
def test_mnist_in_its_own_setting_and_files(tmp_path, monkeypatch):
    write_mnist(tmp_path / "mnist", train=200, test=50)
    seen = []
    train = NormHistory.of.__func__
    monkeypatch.setattr(
        NormHistory, "of", classmethod(lambda cls, t, **o: seen.append(t) or train(cls, t, **o))
    )
    individual_fig1.main(
        ["--mnist", str(tmp_path / "mnist"), "--rows", "5", "--epochs", "0.1", "--points", "12",
         "--probability", "0.02", "--levels", "4", "--width", "4", "--output", str(tmp_path)]
    )  # fmt: skip
    assert (seen[0].max_grad_norm, seen[0].noise_multiplier, seen[0].width) == (5, 2, 4)
    assert len(read_csv(tmp_path / "individual_fig1_mnist.csv")) == 5
    assert (tmp_path / "individual_fig1_mnist.png").stat().st_size > 10_000
    assert not (tmp_path / "individual_fig1.csv").exists()
    assert not list(tmp_path.glob("*checkpoint*"))


class TestCheckpoint:
    """A long training goes on where it was stopped, to the same norms."""

    training = Training(
        probability=0.05, noise_multiplier=1.0, max_grad_norm=2.0, steps=12, learning_rate=0.5,
        width=8, seed=5,
    )  # fmt: skip
    grid = NormGrid(smallest=1e-2, ratio=1.1)

    def _train(self, **options):
        return NormHistory.of(self.training, rows=6, grid=self.grid, **options)

    @pytest.fixture
    def stopped(self, tmp_path, monkeypatch):
        """A checkpoint of a training that was interrupted after 7 steps."""
        monkeypatch.setattr(norm_history, "SAVED_EVERY", 3)
        path, calls = tmp_path / "checkpoint", []
        count = norm_history.per_example_norms

        def interrupt(*arguments, **options):
            calls.append(1)
            if len(calls) == 8:
                raise KeyboardInterrupt
            return count(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(norm_history, "per_example_norms", interrupt)
            with pytest.raises(KeyboardInterrupt):
                self._train(checkpoint=path)
        assert torch.load(path, weights_only=True)["counts"].sum() == 6 * 6
        return path

    def test_the_norms_are_those_of_a_training_without_a_stop(self, stopped):
        whole, again = self._train(), self._train(checkpoint=stopped)
        assert np.array_equal(whole.counts, again.counts)
        assert np.array_equal(whole.rows, again.rows)
        assert whole.accuracy == again.accuracy
        assert again.counts.sum() == 6 * 12
        assert not stopped.exists()

    @pytest.mark.parametrize("change", ["learning rate", "rows", "data"])
    def test_another_training_does_not_go_on_from_it(self, stopped, change):
        training, rows, data = self.training, 6, Digits.of_scikit_learn()
        if change == "learning rate":
            training = dataclasses.replace(training, learning_rate=0.1)
        elif change == "rows":
            rows = 7
        else:
            data.train[0][0, 0] += 1
        with pytest.raises(ValueError, match=r"another training|dataset has changed"):
            NormHistory.of(training, rows=rows, grid=self.grid, data=data, checkpoint=stopped)
