"""Optimized banded inverses as strategies: contract, value, bad input."""

import math

import numpy as np
import pytest

from dptrain.strategies import Strategy
from dptrain.strategies.toeplitz.band_inv_mf import BandInvMF
from dptrain.testing import StrategyContract


class TestOneBand(StrategyContract):
    def make_strategy(self):
        return BandInvMF(inverse_bands=1)


class TestTwoBandsMax(StrategyContract):
    def make_strategy(self):
        return BandInvMF(inverse_bands=2, objective="max")


class _Optimized(StrategyContract):
    """c need not fall before lag min_sep, so some other schedules only have bounds."""

    def expect_exact(self, max_participations, min_sep):
        return max_participations == 1 or min_sep >= self.steps


class TestThreeBands(_Optimized):
    def make_strategy(self):
        return BandInvMF(inverse_bands=3, max_participations=2, min_sep=5)


class TestAllBands(_Optimized):
    steps = 9

    def make_strategy(self):
        return BandInvMF(inverse_bands=self.steps, objective="max", max_participations=3, min_sep=3)


class TestGiven(_Optimized):
    steps = 9  # c is 0 at odd lags

    def make_strategy(self):
        return BandInvMF(inverse_bands=3, coefficients=(2.0, 0.0, -1.9))


class TestGivenAndGrowing(_Optimized):
    def make_strategy(self):
        return BandInvMF(inverse_bands=2, coefficients=(1.0, -1.2))


# -- the value -------------------------------------------------------------------------------------


def test_reading_back_does_not_optimize(monkeypatch):
    bound = BandInvMF(inverse_bands=3, max_participations=2, min_sep=9).bind(20)

    def fail(**kwargs):
        raise AssertionError("optimized again")

    monkeypatch.setattr(
        "dptrain.strategies.toeplitz.band_inv_mf.optimal_inverse_coefficients", fail
    )
    assert Strategy.from_dict(bound.to_dict()).bind(20) == bound


def test_unbound_has_neither_bands_nor_matrix():
    for use in (
        lambda s: s.bands,
        lambda s: s.first_column(5),
        lambda s: s.inverse_column(5),
        lambda s: s.filter(),
    ):
        with pytest.raises(ValueError, match=r"BandInvMF.*bind"):
            use(BandInvMF(inverse_bands=2))


@pytest.mark.parametrize(
    "coefficients",
    [(0.0, -1.0), (-1.0, -0.5), (1.0, math.nan), (1.0, -math.inf), (1.0,), (1, 0, 0)],
)
def test_bad_coefficients(coefficients):
    with pytest.raises(ValueError, match="coefficients"):
        BandInvMF(inverse_bands=2, coefficients=coefficients)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"inverse_bands": 0}, "inverse_bands=0"),
        ({"inverse_bands": 2.0}, r"inverse_bands=2\.0"),
        ({"objective": "median"}, "objective='median'"),
        ({"workload": "sums"}, "workload='sums'"),
        ({"max_participations": 0}, "max_participations=0"),
        ({"max_participations": 2}, "min_sep=None.*max_participations"),
        ({"max_participations": 2, "min_sep": -1}, "min_sep=-1"),
        ({"steps": 5}, r"bind\(5\)"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 1, "coefficients": (1, 0)}, "at most inverse_bands=1"),
    ],
)
def test_bad_input(arguments, match):
    with pytest.raises((TypeError, ValueError), match=match):
        BandInvMF(**{"inverse_bands": 2, **arguments})


def test_binding_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="at most inverse_bands=2"):
        BandInvMF(inverse_bands=3).bind(2)
    bound = BandInvMF(inverse_bands=2).bind(9)
    with pytest.raises(ValueError, match="bound to 9 steps, not 10"):
        bound.bind(10)


def test_a_strategy_that_blows_up_names_the_step():
    # c_t = 1.5^t passes 10^6 at t = 35.
    growing = BandInvMF(inverse_bands=2, coefficients=(1.0, -1.5))
    assert growing.bind(34).steps == 34
    for use in (lambda: growing.bind(100), lambda: growing.bind(5000)):
        with pytest.raises(ValueError, match="diverges: at step 35"):
            use()


def test_positive_coefficients_are_held_to_a_non_negative_matrix():
    # c_1 = -g_1 for g_0 = 1.
    with pytest.raises(ValueError, match="negative at step 1 of 5"):
        BandInvMF(inverse_bands=2, coefficients=(1.0, 0.1)).bind(5)
    # 1/(1 - x/2 + x²/10) has complex poles: its coefficients oscillate, first below 0 at x^4.
    late = BandInvMF(inverse_bands=3, coefficients=(1.0, -0.5, 0.1))
    assert late.bind(4).first_column(4).min() > 0
    with pytest.raises(ValueError, match="negative at step 4 of 100"):
        late.bind(100)
    real = BandInvMF(inverse_bands=3, coefficients=(1.0, -0.9, 0.2)).bind(60)  # poles .4 and .5
    t = np.arange(60)
    np.testing.assert_allclose(real.first_column(60), 5 * 0.5**t - 4 * 0.4**t, rtol=1e-9)
