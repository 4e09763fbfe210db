"""The noise of banded strategies under the contract."""

from dptrain.strategies import BSR, BandMF, Identity
from dptrain.testing import NoiseStreamContract


class TestBSRNoise(NoiseStreamContract):
    def make_strategy(self):
        return BSR(bands=4)

    def foreign_strategy(self):
        return BSR(bands=3)


class TestIdentityNoise(NoiseStreamContract):
    samples = 60_000

    def make_strategy(self):
        return Identity()

    def foreign_strategy(self):
        return BSR(bands=2)


class TestBandMFNoise(NoiseStreamContract):
    steps = 20  # the ring of 5 rows is full at the end of a turn
    samples = 60_000

    def make_strategy(self):
        return BandMF(bands=6)

    def foreign_strategy(self):
        return BandMF(bands=6, objective="max")


class TestFullBandNoise(NoiseStreamContract):
    samples = 60_000

    def make_strategy(self):
        return BandMF(bands=19, objective="max")

    def foreign_strategy(self):
        return BandMF(bands=17)


class TestScaledNoise(NoiseStreamContract):
    """One band that is not 1, and coefficients that rise."""

    samples = 60_000

    def make_strategy(self):
        return BandMF(bands=3, coefficients=(2.0, 0.0, 0.9))

    def foreign_strategy(self):
        return BandMF(bands=3, coefficients=(2.0, 0.0, 0.8))


class TestScaledIdentityNoise(NoiseStreamContract):
    samples = 60_000

    def make_strategy(self):
        return BandMF(bands=1, coefficients=(0.5,))

    def foreign_strategy(self):
        return BandMF(bands=1, coefficients=(2.0,))
