"""What strategies that are not Toeplitz share, on the dense and on the banded path."""

import numpy as np
import pytest

from dptrain.strategies.matrices import lower_triangular
from dptrain.strategies.matrices.banded_error import inverse_workload
from dptrain.strategies.matrices.dense import Dense
from dptrain.strategies.matrices.lower_triangular import (
    dense_from_diagonals,
    diagonals_from_dense,
    gram_diagonals,
)
from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.workloads import PREFIX_SUMS

N = 50


def matrix(bands, seed=0, signed=False):
    rng = np.random.default_rng(seed)
    c = rng.uniform(-0.1 if signed else 0.0, 0.3, size=(N, N))
    np.fill_diagonal(c, rng.uniform(0.5, 2.0, size=N))
    return np.tril(np.triu(c, 1 - bands))


@pytest.fixture(params=[1, 2, 7, 33, 50])
def bands(request):  # up to 32 by diagonals, beyond as a matrix
    return request.param


def test_diagonals_and_back(bands):
    c = matrix(bands)
    diagonals = diagonals_from_dense(c)
    assert diagonals.shape == (bands, N)
    np.testing.assert_array_equal(dense_from_diagonals(diagonals), c)


def test_apply_and_solve(bands):
    c = matrix(bands)
    strategy = Dense(matrix=c).bind(N)
    for shape in ((N,), (N, 3)):
        x = np.random.default_rng(1).normal(size=shape)
        np.testing.assert_allclose(strategy.apply(x), c @ x, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(strategy.solve(x), np.linalg.solve(c, x), rtol=1e-9, atol=1e-11)


def test_rows_are_rows(bands):
    c = matrix(bands)
    strategy = Dense(matrix=c)
    for t in (0, 1, N // 2, N - 1):
        np.testing.assert_array_equal(strategy.row(N, t), c[t, max(0, t - bands + 1) : t + 1])


@pytest.mark.parametrize(
    "workload",
    [
        PREFIX_SUMS,
        MomentumSGD(momentum=0.8),
        MomentumSGD(momentum=0.8, weight_decay=0.3, learning_rates=tuple(np.linspace(1, 0.1, N))),
        MomentumSGD(momentum=0.8, learning_rates=tuple(np.linspace(0, 1, N))),
    ],
)
def test_errors_for_workloads(bands, workload):
    c = matrix(bands)
    rows = np.linalg.norm(workload.matrix(N) @ np.linalg.inv(c), axis=1)
    np.testing.assert_allclose(Dense(matrix=c).errors(N, workload), rows, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "workload",
    [
        PREFIX_SUMS,
        MomentumSGD(),
        MomentumSGD(weight_decay=0.2),
        MomentumSGD(momentum=0.5, weight_decay=0.1, learning_rates=(1.0, 0.2, 0.7, 0.4, 2.0, 0.1)),
    ],
)
@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_banded_inverse_of_workloads(workload, n):
    if isinstance(getattr(workload, "learning_rates", 1.0), tuple) and n != 6:
        pytest.skip("a schedule has its own length")
    inverse = dense_from_diagonals(inverse_workload(workload, n))
    np.testing.assert_allclose(inverse @ workload.matrix(n), np.eye(n), atol=1e-12)


def test_no_banded_inverse_where_a_learning_rate_is_zero():
    assert inverse_workload(MomentumSGD(learning_rates=(0.0, 1.0)), 2) is None


@pytest.mark.parametrize("largest", [0, 2048])
def test_gram_by_diagonals(bands, largest, monkeypatch):
    monkeypatch.setattr(lower_triangular, "_DENSE_UP_TO", largest)
    c = matrix(bands, signed=True)
    gram = np.abs(c.T @ c)
    found = gram_diagonals(diagonals_from_dense(c))
    for d in range(bands):
        np.testing.assert_allclose(found[d, d:], np.diagonal(gram, -d), rtol=1e-12, atol=1e-14)
        assert not found[d, :d].any()


def test_an_inverse_that_blows_up_names_the_step():
    # Columns that double: C^-1 has the entries (-2)^k, above 10^6 from k = 20 on, and its row
    # norms sqrt(Σ 4^k) from k = 20 on as well (at 19 it is 605 thousand).
    c = np.eye(30) + 2 * np.eye(30, k=-1)
    with pytest.raises(ValueError, match=r"diverges: at step 20 "):
        Dense(matrix=c).bind(30)
    assert Dense(matrix=c[:20, :20]).bind(20).steps == 20


def test_an_inverse_that_overflows_is_refused():
    c = np.eye(400) + 1e3 * np.eye(400, k=-1)
    with pytest.raises(ValueError, match="diverges: at step 2 "):
        Dense(matrix=c).bind(400)


def test_scale_is_no_blow_up():
    assert Dense(matrix=np.diag([1e-9, 1.0, 1e9, 1e-9])).bind(4).bands == 1
