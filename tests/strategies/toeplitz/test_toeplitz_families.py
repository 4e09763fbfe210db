"""Coefficients, errors and bad input of the families."""

import math

import numpy as np
import pytest
from scipy.linalg import toeplitz

from dptrain.strategies import BSR, BandMF, Identity, Strategy


def test_identity_is_the_identity():
    np.testing.assert_array_equal(Identity().columns(6, np.arange(6)), np.eye(6))


def test_full_bsr_is_the_square_root_of_prefix_sums():
    n = 40
    root = BSR(bands=n).columns(n, np.arange(n))
    np.testing.assert_allclose(root @ root, np.tril(np.ones((n, n))), atol=1e-12)


def test_bsr_cuts_the_square_root():
    full = BSR(bands=30).columns(30, np.arange(30))
    lag = np.subtract.outer(np.arange(30), np.arange(30))
    np.testing.assert_array_equal(
        BSR(bands=7).columns(30, np.arange(30)), np.where(lag < 7, full, 0)
    )


def test_explicit_coefficients_make_their_toeplitz_matrix():
    bound = BandMF(bands=3, coefficients=[2, 0.5, 1]).bind(5)
    expected = np.tril(toeplitz([2, 0.5, 1, 0, 0]))
    np.testing.assert_array_equal(bound.columns(5, np.arange(5)), expected)
    assert bound.coefficients == (2.0, 0.5, 1.0)


@pytest.mark.parametrize("make", [BSR, BandMF])
@pytest.mark.parametrize("bands", [0, -1, 1.5, 2.0, "3", None, True])
def test_bands_must_be_a_positive_integer(make, bands):
    with pytest.raises((TypeError, ValueError), match="bands="):
        make(bands=bands)


@pytest.mark.parametrize("make", [BSR, BandMF])
def test_more_bands_than_steps_names_the_remedy(make):
    with pytest.raises(ValueError, match="at most bands=7"):
        make(bands=8).bind(7)
    assert make(bands=7).bind(7).bands == 7


def test_numpy_integers_become_plain_ones():
    assert BSR(bands=np.int64(3)) == BSR(bands=3)
    assert BSR(bands=np.int64(3)).coefficient_hash == BSR(bands=3).coefficient_hash
    assert BandMF(bands=2).bind(np.int64(9)) == BandMF(bands=2).bind(9)


@pytest.mark.parametrize("make", [Identity, lambda *a: BSR(*a), lambda *a: BandMF(*a)])
def test_arguments_are_keyword_only(make):
    with pytest.raises(TypeError):
        make(3)


@pytest.mark.parametrize(
    "coefficients",
    [
        (1.0, -0.1),
        (0.0, 1.0),
        (-1.0, 0.5),
        (1.0, math.nan),
        (1.0, math.inf),
        (1.0,),
        (1.0, 0.5, 0.2),
    ],
)
def test_bad_coefficients(coefficients):
    with pytest.raises(ValueError, match="coefficients"):
        BandMF(bands=2, coefficients=coefficients)


def test_unknown_objective():
    with pytest.raises(ValueError, match="objective='median'"):
        BandMF(bands=2, objective="median")


def test_steps_without_coefficients():
    with pytest.raises(ValueError, match=r"bind\(5\)"):
        BandMF(bands=2, steps=5)


def test_stored_steps_must_hold_the_bands():
    with pytest.raises(ValueError, match="at most bands=1"):
        BandMF(bands=2, coefficients=(1.0, 0.5), steps=1)


def test_an_unbound_strategy_has_no_matrix():
    for use in (
        lambda s: s.rmse(5),
        lambda s: s.columns(5, [0]),
        lambda s: s.apply(np.ones(5)),
        lambda s: s.column_norms(5),
        lambda s: s.sensitivity(steps=5, max_participations=1, min_sep=1),
    ):
        with pytest.raises(ValueError, match="bind"):
            use(BandMF(bands=2))


def test_bound_to_one_length_only():
    bound = BandMF(bands=2).bind(9)
    with pytest.raises(ValueError, match="bound to 9 steps, not 10"):
        bound.bind(10)
    with pytest.raises(ValueError, match="bound to 9"):
        bound.rmse(10)


def test_reading_back_does_not_optimize(monkeypatch):
    bound = BandMF(bands=3).bind(20)

    def fail(*args):
        raise AssertionError("optimized again")

    monkeypatch.setattr("dptrain.strategies.toeplitz.band_mf.optimal_coefficients", fail)
    again = Strategy.from_dict(bound.to_dict()).bind(20)
    assert again.coefficients == bound.coefficients


def test_strategies_differ():
    values = [
        Identity(),
        BSR(bands=1),
        BSR(bands=2),
        BandMF(bands=2),
        BandMF(bands=2, objective="max"),
        BandMF(bands=2).bind(9),
        BandMF(bands=2).bind(10),
    ]
    assert len({value.coefficient_hash for value in values}) == len(values)
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("x", [np.ones((2, 2, 2)), np.float64(1.0), np.ones((0, 3))])
def test_apply_refuses_other_shapes(x):
    with pytest.raises(ValueError, match="shape"):
        BSR(bands=2).apply(x)


@pytest.mark.parametrize("indices", [[0.5], [[0, 1]]])
def test_columns_refuses_what_is_no_list_of_integers(indices):
    with pytest.raises(ValueError, match="integers"):
        BSR(bands=2).columns(5, indices)
