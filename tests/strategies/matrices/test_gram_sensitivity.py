"""The bound from inner products of columns, against every pattern and every sign."""

import numpy as np
import pytest

from dptrain.strategies import BSR
from dptrain.strategies.matrices.dense import Dense
from dptrain.strategies.matrices.gram_sensitivity import (
    _COUNTED_UP_TO,
    best_sum,
    best_sums,
    fixed_epoch_sensitivity,
    gram_bound,
)
from tests.oracles.strategy_patterns import signed_sensitivity, supports, vector_sensitivity


def by_diagonals(gram, width=None):
    n = len(gram)
    rows = np.zeros((width or n, n))
    for d in range(width or n):
        rows[d, d:] = np.abs(np.diagonal(gram, -d))
    return rows


@pytest.mark.parametrize("gap", [1, 2, 3, 8, 20])
def test_best_sums_against_all_subsets(gap):
    values = np.random.default_rng(gap).exponential(size=(8, 2))
    sums = list(best_sums(values, 8, gap))
    assert len(sums) == -(-8 // gap)
    for k, found in enumerate(sums, start=1):
        for column in range(2):
            best = max(values[list(u), column].sum() for u in supports(8, k, gap))
            assert found[column] == pytest.approx(best, rel=1e-14)
            assert best_sum(values[:, column], k, gap) == pytest.approx(best, rel=1e-14)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("m", [1, 2, 3, 9])
@pytest.mark.parametrize("b", [1, 2, 3, 5])
def test_bound_holds_for_signed_matrices(seed, m, b):
    rng = np.random.default_rng(seed)
    dense = np.tril(rng.normal(size=(8, 8))) * rng.exponential(size=8)
    if seed % 2:
        dense = np.tril(np.triu(dense, -3))
    gram = dense.T @ dense
    width = 4 if seed % 2 else 8
    bound = gram_bound(by_diagonals(gram, width), max_participations=m, min_sep=b)
    size = np.abs(gram)
    absolute = max(np.sqrt(size[np.ix_(u, u)].sum()) for u in supports(8, m, b))
    assert bound >= absolute
    assert bound >= signed_sensitivity(dense, m, b)
    if seed < 2:
        assert bound >= vector_sensitivity(dense, m, b)


@pytest.mark.parametrize(("m", "b"), [(2, 3), (4, 5), (6, 7), (40, 1), (3, 1)])
def test_bound_is_the_maximum_for_falling_toeplitz_columns(m, b):
    # Kalinin & Lampert 2024, Theorem 2 gives the exact value there; all rows of the regular
    # pattern can take their best partners at once, but for the cut at the end.
    n = 40
    strategy = BSR(bands=n)
    dense = strategy.columns(n, np.arange(n))
    exact = strategy.sensitivity(steps=n, max_participations=m, min_sep=b)
    bound = gram_bound(by_diagonals(dense.T @ dense), max_participations=m, min_sep=b)
    assert exact <= bound <= exact * 1.02


def test_bound_is_no_worse_than_distances_alone():
    # ‖C x‖² <= m r(0) + 2 Σ_s (m - s) max_{d >= s b} r(d), r(d) the largest |G| at a distance d.
    rng = np.random.default_rng(3)
    dense = np.tril(rng.normal(size=(30, 30)))
    rows = by_diagonals(dense.T @ dense)
    r = np.maximum.accumulate(rows.max(axis=1)[::-1])[::-1]
    for m, b in [(2, 4), (3, 7), (7, 4), (5, 1)]:
        plain = m * r[0] + 2 * sum((m - s) * r[s * b] for s in range(1, m))
        bound = gram_bound(rows, max_participations=m, min_sep=b)
        assert bound <= np.sqrt(plain) * (1 + 1e-9)


def test_bound_beyond_the_counted_participations():
    # More participations than are counted one by one: all-ones G has the exact value m.
    n = 3 * _COUNTED_UP_TO
    rows = np.triu(np.ones((n, n)))
    for m in (_COUNTED_UP_TO + 1, _COUNTED_UP_TO + 2, n):
        bound = gram_bound(rows, max_participations=m, min_sep=1)
        assert bound >= m
    assert bound == pytest.approx(n, rel=1e-9)


def test_orthogonal_columns_cost_the_root_of_their_number():
    rows = np.zeros((5, 50))
    rows[0] = 2.0
    for b in (1, 3):
        bound = gram_bound(rows, max_participations=7, min_sep=b)
        assert np.sqrt(14) <= bound <= np.sqrt(14) * (1 + 1e-11)


# -- participations exactly n/e apart -------------------------------------------------------------


@pytest.mark.parametrize("epochs", [1, 2, 3, 4, 6, 12])
def test_fixed_epochs_against_every_start(epochs):
    n = 12
    dense = np.tril(np.random.default_rng(epochs).normal(size=(n, n)))
    np.fill_diagonal(dense, 1.0)
    strategy = Dense(matrix=dense)
    gram = np.abs(dense.T @ dense)
    starts = [np.arange(s, n, n // epochs) for s in range(n // epochs)]
    worst = max(np.sqrt(gram[np.ix_(u, u)].sum()) for u in starts)
    found = fixed_epoch_sensitivity(strategy, steps=n, epochs=epochs)
    assert found == pytest.approx(worst, rel=1e-12)
    assert found >= max(np.linalg.norm(dense[:, u].sum(axis=1)) for u in starts)


@pytest.mark.parametrize("epochs", [1, 2, 5, 20])
def test_fixed_epochs_of_a_toeplitz_matrix_start_at_0(epochs):
    strategy = BSR(bands=13)
    dense = strategy.columns(20, np.arange(20))
    worst = max(
        np.linalg.norm(dense[:, s :: 20 // epochs].sum(axis=1)) for s in range(20 // epochs)
    )
    found = fixed_epoch_sensitivity(strategy, steps=20, epochs=epochs)
    assert found == pytest.approx(worst, rel=1e-12)
    assert found == pytest.approx(
        fixed_epoch_sensitivity(Dense(matrix=dense), steps=20, epochs=epochs), rel=1e-12
    )


def test_fixed_epochs_for_long_toeplitz_runs():
    found = fixed_epoch_sensitivity(BSR(bands=4), steps=10**6, epochs=10)
    assert found == pytest.approx(np.sqrt(10 * (1 + 1 / 4 + 9 / 64 + 25 / 256)), rel=1e-12)


def test_fixed_epochs_refuse_a_broken_last_epoch():
    with pytest.raises(ValueError, match=r"steps=10 is not a multiple of epochs=4.*steps=12"):
        fixed_epoch_sensitivity(BSR(bands=2), steps=10, epochs=4)
    with pytest.raises(ValueError, match="epochs=0"):
        fixed_epoch_sensitivity(BSR(bands=2), steps=10, epochs=0)
