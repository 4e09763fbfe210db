"""Column-normalized banded strategies under the contract, their optimum and bad input."""

import base64
import json
import math

import numpy as np
import pytest
from scipy.optimize import minimize

from dptrain.strategies import BandMF, Strategy
from dptrain.strategies.matrices.banded_error import BandedError, inverse_workload
from dptrain.strategies.matrices.column_normalized import ColumnNormalizedBandMF
from dptrain.strategies.matrices.column_normalized_optimization import squared_error
from dptrain.strategies.matrices.lower_triangular import dense_from_diagonals
from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.workloads import PREFIX_SUMS, DenseWorkload
from dptrain.testing import StrategyContract
from tests.helpers.schedules import linear_decay
from tests.oracles.strategy_optima import duality_gap


class TestColumnNormalized(StrategyContract):
    def make_strategy(self):
        return ColumnNormalizedBandMF(bands=4)

    def expect_exact(self, max_participations, min_sep):
        return max_participations == 1 or min_sep >= 4


class TestColumnNormalizedMomentum(StrategyContract):
    steps = 9

    def make_strategy(self):
        rates = linear_decay(9)
        return ColumnNormalizedBandMF(bands=3, workload=MomentumSGD(learning_rates=rates))

    def expect_exact(self, max_participations, min_sep):
        return max_participations == 1 or min_sep >= 3


def rough(bands, n, seed=0):
    rng = np.random.default_rng(seed)
    diagonals = rng.uniform(0.05, 0.5, size=(bands, n))
    diagonals[0] += 0.7
    return np.where(np.arange(bands)[:, None] + np.arange(n) < n, diagonals, 0.0)


WORKLOADS = [
    PREFIX_SUMS,
    MomentumSGD(momentum=0.7),
    MomentumSGD(momentum=0.7, weight_decay=0.1, learning_rates=tuple(np.linspace(1, 0.2, 75))),
    MomentumSGD(momentum=0.7, learning_rates=tuple(np.linspace(0, 1, 75))),
]


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("bands", [1, 2, 5, 40, 75])
def test_loss_and_gradient(workload, bands):
    # 75 steps in blocks of at least 32: one, two and three blocks, the last one padded.
    n = 75
    diagonals = rough(bands, n)
    value, gradient = squared_error(workload, n, bands)(diagonals)
    inverse = np.linalg.inv(dense_from_diagonals(diagonals))
    assert value == pytest.approx(np.sum((workload.matrix(n) @ inverse) ** 2), rel=1e-3)
    if inverse_workload(workload, n) is not None:  # otherwise a ridge keeps A regular
        assert value == pytest.approx(np.sum((workload.matrix(n) @ inverse) ** 2), rel=1e-10)
    h = 1e-6  # central differences are off by about h² relative, and 1e-15/h of rounding
    for k, j in {(0, 0), (0, n - 1), (bands - 1, 0), (bands // 2, 30), (bands - 1, n - bands)}:
        step = np.zeros_like(diagonals)
        step[k, j] = h
        up, _ = squared_error(workload, n, bands)(diagonals + step)
        down, _ = squared_error(workload, n, bands)(diagonals - step)
        difference = (up - down) / (2 * h)
        assert gradient[k, j] == pytest.approx(difference, rel=1e-5, abs=1e-8 * value)


@pytest.mark.parametrize("bands", [1, 3, 33, 64, 100])
def test_squared_rows_of_the_inverse(bands):
    diagonals = rough(bands, 100)
    rows = np.linalg.norm(np.linalg.inv(dense_from_diagonals(diagonals)), axis=1) ** 2
    found = BandedError(bands, np.ones((1, 100))).squared_rows(diagonals)
    np.testing.assert_allclose(found, rows, rtol=1e-10)


@pytest.mark.parametrize("workload", [PREFIX_SUMS, MomentumSGD(momentum=0.5)])
@pytest.mark.parametrize(("n", "bands"), [(3, 2), (5, 2), (5, 3), (4, 4)])
def test_against_a_generic_optimizer(workload, n, bands):
    factor = workload.matrix(n)
    inside = np.arange(bands)[:, None] + np.arange(n) < n

    def loss(entries):
        diagonals = np.zeros((bands, n))
        diagonals[inside] = np.abs(entries)
        diagonals[0] += 1e-9
        c = dense_from_diagonals(diagonals)
        return np.log(np.sum((factor @ np.linalg.inv(c / np.linalg.norm(c, axis=0))) ** 2))

    start = np.random.default_rng(0).uniform(0.2, 1.0, inside.sum())
    best = minimize(loss, start, method="BFGS", options={"gtol": 1e-9}).fun
    bound = ColumnNormalizedBandMF(bands=bands, workload=workload).bind(n)
    assert np.log(n * bound.rmse(n, workload) ** 2) == pytest.approx(best, abs=1e-8)


@pytest.mark.parametrize(
    ("index", "bands"), [(0, 1), (0, 4), (0, 20), (1, 1), (1, 4), (1, 20), (2, 1), (2, 4)]
)
def test_duality_gap(index, bands):
    n, workload = 75, WORKLOADS[index]
    c = ColumnNormalizedBandMF(bands=bands, workload=workload).bind(n).columns(n, range(n))
    lag = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    gap = duality_gap(c, workload.matrix(n), (lag > 0) & (lag < bands))
    assert -1e-9 <= gap <= 1e-5


def test_entries_that_would_be_negative_stay_at_zero():
    # Weight decay makes gradients forgotten: without the restriction the far entries would be
    # negative, which the certificate shows as a gap, here below one per cent.
    n, bands, workload = 75, 20, WORKLOADS[2]
    c = ColumnNormalizedBandMF(bands=bands, workload=workload).bind(n).columns(n, range(n))
    lag = np.subtract.outer(np.arange(n), np.arange(n))
    assert c.min() >= 0
    assert np.any(c[(lag > 0) & (lag < bands)] == 0)
    free = (lag != 0) & (np.abs(lag) < bands)
    assert 1e-4 <= duality_gap(c, workload.matrix(n), free) <= 1e-2


@pytest.mark.parametrize(("n", "bands"), [(20, 1), (20, 2), (20, 20), (200, 9)])
def test_no_worse_than_band_mf(n, bands):
    toeplitz, normalized = BandMF(bands=bands).bind(n), ColumnNormalizedBandMF(bands=bands).bind(n)
    np.testing.assert_allclose(normalized.column_norms(n), 1, rtol=1e-14)
    for m in (1, n // bands):
        cost = [
            s.rmse(n) * s.sensitivity(steps=n, max_participations=m, min_sep=bands)
            for s in (toeplitz, normalized)
        ]
        if m == 1 or m * bands <= n - bands:  # then no column of BandMF's worst pattern is cut
            assert cost[1] <= cost[0] * (1 + 1e-12)
    exact = normalized.sensitivity(steps=n, max_participations=5, min_sep=bands)
    assert exact == pytest.approx(np.sqrt(min(5, -(-n // bands))), rel=1e-12)


def test_dense_workload_without_a_banded_inverse():
    n = 30
    entries = np.tril(np.random.default_rng(0).uniform(0.2, 1, (n, n))) + np.eye(n)
    workload = DenseWorkload(entries=entries)
    bound = ColumnNormalizedBandMF(bands=5, workload=workload).bind(n)
    lag = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    c = bound.columns(n, range(n))
    # C >= 0 may be a restriction for a rough workload, so only the start is sure to be worse.
    start = BandMF(bands=5).bind(n).columns(n, range(n))
    start = start / np.linalg.norm(start, axis=0)
    first = np.sqrt(np.mean((entries @ np.linalg.inv(start)) ** 2) * n)
    assert bound.rmse(n, workload) < first
    assert np.all(c[lag >= 5] == 0)


def test_reading_back_does_not_optimize(monkeypatch):
    bound = ColumnNormalizedBandMF(bands=3).bind(12)

    def fail(*args):
        raise AssertionError("optimized again")

    monkeypatch.setattr("dptrain.strategies.matrices.column_normalized.optimal_columns", fail)
    again = Strategy.from_dict(json.loads(json.dumps(bound.to_dict())))
    assert again.bind(12) == bound
    np.testing.assert_array_equal(again.diagonals(12), bound.diagonals(12))


def test_explicit_coefficients():
    diagonals = rough(3, 8)
    diagonals /= np.linalg.norm(diagonals, axis=0)
    bound = ColumnNormalizedBandMF(bands=3, coefficients=diagonals).bind(8)
    np.testing.assert_array_equal(bound.columns(8, range(8)), dense_from_diagonals(diagonals))
    assert "bands=3" in repr(bound)
    assert len(repr(bound)) < 200


def altered(k, j, value, normalize=False):
    diagonals = rough(3, 8)
    diagonals /= np.linalg.norm(diagonals, axis=0)
    diagonals[k, j] = value
    return diagonals / np.linalg.norm(diagonals, axis=0) if normalize else diagonals


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        (np.ones(3), r"shape \(3,\): must be \(bands, steps\)"),
        (np.ones((2, 8)), r"shape \(2, 8\).*bands=3"),
        (np.ones((3, 2)), "use at most bands=2"),
        (altered(1, 2, -0.1), r"coefficients\[1, 2\]=-0.1: must be finite and not negative"),
        (altered(1, 2, math.nan), r"coefficients\[1, 2\]=nan"),
        (altered(2, 7, 0.5), "must be 0 for j \\+ k >= steps"),
        (altered(0, 4, 0.0, normalize=True), r"coefficients\[0, 4\]=0: the diagonal"),
        (altered(0, 4, 3.0), "column 4 has the norm"),
        ("#", "not the text of a packed band"),
        (base64.b64encode(b"12345678" * 2).decode(), "16 bytes for bands=3"),
    ],
)
def test_bad_coefficients(coefficients, message):
    with pytest.raises(ValueError, match=message):
        ColumnNormalizedBandMF(bands=3, coefficients=coefficients)


@pytest.mark.parametrize(
    ("fields", "steps", "message"),
    [
        ({"bands": 0}, 8, "bands=0"),
        ({"bands": 2.0}, 8, "bands=2.0"),
        ({"bands": 9}, 8, "use at most bands=8"),
        ({"bands": 3, "steps": 8}, 8, r"steps=8 without coefficients.*bind\(8\)"),
        ({"bands": 3, "workload": None}, 8, "workload=None"),
        ({"bands": 3}, 10_001, "at most 10000 steps; use BandMF"),
        ({"bands": 3, "coefficients": altered(0, 7, 1.0)}, 9, "bound to 8 steps, not 9"),
        ({"bands": 3, "coefficients": altered(0, 7, 1.0), "steps": 9}, 9, "are for 8"),
        ({"bands": 2, "workload": MomentumSGD(learning_rates=(1.0, 1.0))}, 8, "has 2 entries"),
        (
            {"bands": 2, "workload": MomentumSGD(learning_rates=(0.0, *[1.0] * 2000))},
            2001,
            "use small positive ones",
        ),
    ],
)
def test_bad_input(fields, steps, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ColumnNormalizedBandMF(**fields).bind(steps)


def test_coefficients_whose_inverse_blows_up():
    n = 60
    diagonals = np.tile([[1.0], [3.0]], (1, n))
    diagonals[1, -1] = 0.0
    diagonals /= np.linalg.norm(diagonals, axis=0)
    with pytest.raises(ValueError, match=r"ColumnNormalizedBandMF\(bands=2\) diverges: at step 1"):
        ColumnNormalizedBandMF(bands=2, coefficients=diagonals).bind(n)


def test_an_unbound_value_has_no_matrix():
    for use in (lambda s: s.rmse(4), lambda s: s.columns(4, [0]), lambda s: s.row(4, 0)):
        with pytest.raises(ValueError, match="bind"):
            use(ColumnNormalizedBandMF(bands=2))
