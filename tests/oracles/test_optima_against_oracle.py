"""Optimized strategies are no worse than what general optimizers find for tiny n."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dptrain.strategies.blt.blt import BLT
from dptrain.strategies.matrices.column_normalized import ColumnNormalizedBandMF
from dptrain.strategies.matrices.dense import Dense
from dptrain.strategies.strategy import Strategy
from dptrain.strategies.toeplitz.band_inv_mf import BandInvMF
from dptrain.strategies.toeplitz.band_mf import BandMF
from dptrain.strategies.workloads import Workload
from tests.oracles import strategy_optima as optima
from tests.oracles import strategy_patterns as brute
from tests.oracles.strategy_comparison import every_workload

MARGIN = 1 + 1e-4


def workload_of(kind: int, steps: int) -> tuple[Workload, np.ndarray]:
    """0: prefix sums, 1: momentum, 2: with a schedule, 3: and weight decay, 5: any matrix."""
    return every_workload(steps, seed=3)[kind]


def achieved(
    strategy: Strategy, workload: Workload, objective: str, steps: int, m: int, b: int
) -> float:
    """Error × the true sensitivity, by trying all patterns, of a bound strategy."""
    error = strategy.rmse if objective == "mean" else strategy.max_error
    matrix = strategy.columns(steps, range(steps))
    return error(steps, workload) * brute.vector_sensitivity(matrix, m, b)


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("kind", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(("steps", "bands"), [(2, 2), (6, 2), (7, 3), (8, 8)])
def test_banded_toeplitz(kind: int, objective: str, steps: int, bands: int) -> None:
    workload, dense = workload_of(kind, steps)
    strategy = BandMF(bands=bands, objective=objective, workload=workload).bind(steps)
    best, _ = optima.banded_toeplitz(dense, bands, objective)
    assert achieved(strategy, workload, objective, steps, 1, 1) <= best * MARGIN


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize("schedule", [(1, 8), (2, 4), (3, 3)])
@pytest.mark.parametrize("bands", [2, 3])
def test_banded_inverse(kind: int, objective: str, schedule: tuple[int, int], bands: int) -> None:
    steps, (m, b) = 8, schedule
    workload, dense = workload_of(kind, steps)
    strategy = BandInvMF(
        inverse_bands=bands,
        objective=objective,
        workload=workload,
        max_participations=m,
        min_sep=b,
    ).bind(steps)
    found = achieved(strategy, workload, objective, steps, m, b)
    best, _ = optima.inverse_banded(dense, bands, m, b, objective, negative_tail=True)
    assert found <= best * MARGIN
    free, _ = optima.inverse_banded(dense, bands, m, b, objective)
    assert found <= 1.1 * free  # what g_1, g_2, … ≤ 0 cost at so few steps; with two bands nothing
    assert bands > 2 or found <= free * MARGIN


BUFFERS = list(itertools.product((1, 2), ((1, 8), (2, 4), (3, 2)), ("mean", "max"), (0, 1, 2)))


@pytest.mark.sample(every=31)
@pytest.mark.parametrize(("buffers", "schedule", "objective", "kind"), BUFFERS)
def test_buffers(buffers: int, schedule: tuple[int, int], objective: str, kind: int) -> None:
    steps, (m, b) = 8, schedule
    workload, dense = workload_of(kind, steps)
    strategy = BLT(
        buffers=buffers, objective=objective, workload=workload, max_participations=m, min_sep=b
    ).bind(steps)
    best, *_ = optima.blt(dense, buffers, m, b, objective)
    assert achieved(strategy, workload, objective, steps, m, b) <= best * MARGIN


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("kind", [0, 1, 3, 4])
@pytest.mark.parametrize(("steps", "bands"), [(2, 1), (2, 2), (6, 2), (7, 3), (5, 5)])
def test_columns_of_norm_one(kind: int, steps: int, bands: int) -> None:
    workload, dense = workload_of(kind, steps)
    best, _ = optima.banded_columns(dense, bands)
    for declared in (
        ColumnNormalizedBandMF(bands=bands, workload=workload),
        Dense(bands=bands, workload=workload),
    ):
        strategy = declared.bind(steps)
        assert achieved(strategy, workload, "mean", steps, 1, 1) <= best * MARGIN
        for m in (2, 3):
            worst = brute.sensitivity(strategy.columns(steps, range(steps)), m, bands)
            assert worst == pytest.approx(np.sqrt(min(m, -(-steps // bands))), rel=1e-9)


EPOCHS = list(
    itertools.product(range(6), [(2, 1), (6, 1), (6, 2), (6, 3), (8, 2), (4, 4)])
)  # kind of workload, (steps, epochs)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("kind", "run"), EPOCHS)
def test_dense_for_epochs(kind: int, run: tuple[int, int]) -> None:
    steps, epochs = run
    workload, dense = workload_of(kind, steps)
    strategy = Dense(epochs=epochs, workload=workload).bind(steps)
    matrix = strategy.columns(steps, range(steps))
    worst = brute.sensitivity_of_supports(matrix, brute.whole_epochs(steps, epochs))
    best, _ = optima.dense_epochs(dense, epochs)
    assert strategy.rmse(steps, workload) * worst <= best * MARGIN
    assert worst == pytest.approx(np.sqrt(epochs), rel=1e-9)
    if epochs == 1:
        single, _ = optima.dense_single(dense)
        assert achieved(strategy, workload, "mean", steps, 1, 1) <= single * MARGIN
