"""Error losses against dense matrices, their gradients against finite differences."""

import numpy as np
import pytest
from scipy.linalg import toeplitz

from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.toeplitz.error_loss import (
    RowNorms,
    error_losses,
    final_error_loss,
    regular_cost,
    shifted_gram,
)
from dptrain.strategies.workloads import PREFIX_SUMS, DenseWorkload
from tests.helpers.schedules import linear_decay


def dense_workload(n):
    return DenseWorkload(entries=np.tril(np.random.default_rng(n).normal(size=(n, n))))


WORKLOADS = {
    "prefix": lambda n: PREFIX_SUMS,
    "momentum": lambda n: MomentumSGD(),
    "decay": lambda n: MomentumSGD(learning_rates=0.5, weight_decay=0.1),
    "schedule": lambda n: MomentumSGD(learning_rates=linear_decay(n)),
    "dense": dense_workload,
}


def squared_rows(workload, n, g):
    """Squared row norms of A C^-1, with dense matrices."""
    inverse = np.tril(toeplitz(g))
    return np.sum((workload.matrix(n) @ inverse) ** 2, axis=1)


def central_differences(loss, x, h=1e-6):
    steps = h * np.eye(x.size)
    return np.array([(loss(x + s)[0] - loss(x - s)[0]) / (2 * h) for s in steps])


@pytest.mark.parametrize("n", [1, 2, 7, 33])
@pytest.mark.parametrize("kind", WORKLOADS)
def test_mean_is_the_frobenius_norm(kind, n):
    workload = WORKLOADS[kind](n)
    g = np.random.default_rng(0).normal(size=n)
    loss = final_error_loss(workload, n, "mean")
    value, gradient = loss(g)
    assert value == pytest.approx(squared_rows(workload, n, g).sum(), rel=1e-11)
    # Quadratic, so that central differences have rounding errors only.
    numeric = central_differences(loss, g)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-8 * np.abs(numeric).max())


@pytest.mark.parametrize("n", [1, 2, 7, 33])
@pytest.mark.parametrize("kind", WORKLOADS)
def test_max_is_at_least_the_worst_row(kind, n):
    workload = WORKLOADS[kind](n)
    g = np.eye(1, n)[0] + 0.3 * np.random.default_rng(1).normal(size=n)
    worst = squared_rows(workload, n, g).max()
    value, _ = final_error_loss(workload, n, "max")(g)
    if workload.is_toeplitz:
        assert value == pytest.approx(worst, rel=1e-11)
    assert worst * (1 - 1e-12) <= value <= worst * n ** (1 / 4096) * (1 + 1e-12)


@pytest.mark.parametrize("kind", WORKLOADS)
def test_max_gradients(kind):
    n = 9
    workload = WORKLOADS[kind](n)
    g = np.eye(1, n)[0] + 0.3 * np.random.default_rng(2).normal(size=n)
    for loss in error_losses(workload, n, "max"):
        numeric = central_differences(loss, g, h=1e-7)
        value, gradient = loss(g)
        np.testing.assert_allclose(gradient, numeric, rtol=1e-5, atol=1e-6 * value)


def test_power_norms_sandwich_the_worst_row():
    n = 33
    dense = dense_workload(n).matrix(n)
    g = np.random.default_rng(3).normal(size=n)
    rows = RowNorms(dense)
    r = np.sum((dense @ np.tril(toeplitz(g))) ** 2, axis=1)
    np.testing.assert_allclose(rows.squared(g), r, rtol=1e-10)
    for power in (1.0, 2.0, 16.0, 4096.0):
        value, _ = rows.power_norm(g, power=power)
        assert r.max() <= value * (1 + 1e-12)
        assert value <= r.max() * n ** (1 / power) * (1 + 1e-12)
    assert rows.power_norm(g, power=2.0)[0] == pytest.approx(np.linalg.norm(r), rel=1e-10)
    assert len(error_losses(dense_workload(n), n, "max")) > 1


def test_row_norms_in_several_blocks(monkeypatch):
    n = 33
    dense = dense_workload(n).matrix(n)
    g = np.random.default_rng(4).normal(size=n)
    expected = RowNorms(dense).power_norm(g, power=16.0)
    monkeypatch.setattr("dptrain.strategies.toeplitz.error_loss._BLOCK_ENTRIES", 300)
    value, gradient = RowNorms(dense).power_norm(g, power=16.0)
    assert value == pytest.approx(expected[0], rel=1e-13)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-11, atol=1e-13)


def test_shifted_gram_by_its_definition():
    n = 6
    workload = dense_workload(n)
    gram = workload.matrix(n).T @ workload.matrix(n)
    expected = [
        [sum(gram[i + j, i + k] for i in range(n - max(j, k))) for k in range(n)] for j in range(n)
    ]
    np.testing.assert_allclose(shifted_gram(workload, n), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("objective", ["mean", "max"])
def test_a_toeplitz_matrix_given_as_dense_has_the_same_loss(objective):
    n = 12
    g = np.random.default_rng(5).uniform(-0.3, 0.3, size=n)
    toeplitz_loss, _ = final_error_loss(PREFIX_SUMS, n, objective)(g)
    dense_loss, _ = final_error_loss(DenseWorkload(entries=PREFIX_SUMS.matrix(n)), n, objective)(g)
    assert dense_loss == pytest.approx(toeplitz_loss, rel=1e-11 if objective == "mean" else 1e-3)


def test_refuses():
    with pytest.raises(ValueError, match="objective='median'"):
        final_error_loss(PREFIX_SUMS, 5, "median")
    with pytest.raises(ValueError, match="5 entries, but the run has 6 steps"):
        final_error_loss(MomentumSGD(learning_rates=(1.0,) * 5), 6, "mean")
    rates = linear_decay(4001)
    for objective in ("mean", "max"):
        with pytest.raises(ValueError, match=r"steps=4001.*at most 4000"):
            final_error_loss(MomentumSGD(learning_rates=rates), 4001, objective)


@pytest.mark.parametrize(
    ("n", "m", "b"), [(1, 1, 1), (9, 1, 3), (9, 3, 3), (9, 2, 8), (200, 100, 2)]
)
def test_regular_cost(n, m, b):
    c = np.random.default_rng(n + m).uniform(size=n)
    x = np.zeros(n)
    x[[i * b for i in range(m)]] = 1
    value, gradient = regular_cost(c, m, b)
    assert value == pytest.approx(np.sum((np.tril(toeplitz(c)) @ x) ** 2), rel=1e-11)
    numeric = central_differences(lambda v: regular_cost(v, m, b), c)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-9 * value)
