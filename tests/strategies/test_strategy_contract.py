"""Every strategy under the contract, non-monotone coefficients included."""

import pytest

from dptrain.strategies import BSR, BandMF, Identity
from dptrain.testing import StrategyContract


class TestIdentity(StrategyContract):
    def make_strategy(self):
        return Identity()


class TestBSR(StrategyContract):
    def make_strategy(self):
        return BSR(bands=4)


class TestFullBSR(StrategyContract):
    def make_strategy(self):
        return BSR(bands=self.steps)


class TestBandMFMean(StrategyContract):
    def make_strategy(self):
        return BandMF(bands=4)


class TestBandMFMax(StrategyContract):
    steps = 9

    def make_strategy(self):
        return BandMF(bands=5, objective="max")


class TestOneBand(StrategyContract):
    def make_strategy(self):
        return BandMF(bands=1)


class _Explicit(StrategyContract):
    """The regular pattern is not the worst one here, so only some sensitivities are exact."""

    coefficients: tuple[float, ...]

    def make_strategy(self):
        return BandMF(bands=len(self.coefficients), coefficients=self.coefficients)

    def expect_exact(self, max_participations, min_sep):
        return max_participations == 1 or min_sep >= len(self.coefficients)


class TestRising(_Explicit):
    coefficients = (0.2, 0.5, 1.0)


class TestOneLateEcho(_Explicit):
    coefficients = (1.0, 0.0, 0.0, 0.9)


class TestBump(_Explicit):
    coefficients = (1.0, 0.1, 0.7, 0.3, 0.2)


def test_the_regular_pattern_alone_would_be_too_little():
    # Participations at 0 and 3 add up where the echo falls; 0 and 2 are orthogonal. A closed form
    # that ignores monotonicity would say sqrt(2·1.81) for b = 2.
    strategy = BandMF(bands=4, coefficients=(1.0, 0.0, 0.0, 0.9)).bind(10)
    assert TestOneLateEcho().worst_pattern(2, 2) ** 2 == pytest.approx(2 * 1.81 + 2 * 0.9)
    assert strategy.sensitivity(steps=10, max_participations=2, min_sep=2) ** 2 >= 2 * 1.81 + 1.8
