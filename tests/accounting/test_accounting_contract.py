from dptrain.accounting.balls_in_bins.renyi import BallsInBinsRenyi
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.accounting.unamplified import UnsampledGaussian
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep, Poisson
from dptrain.strategies import BSR, Identity
from dptrain.testing import AccountantContract

POISSON = Poisson(probability=0.02, dataset_size=5_000, steps=200)
BINS = BallsInBins(bins=20, epochs=3, dataset_size=5_000)
FEW_BINS = BallsInBins(bins=4, epochs=4, dataset_size=5_000)


class TestUnsampledGaussian(AccountantContract):
    def accountant(self):
        return UnsampledGaussian()

    def mechanism(self):
        return MatrixMechanism(scheme=BINS, strategy=BSR(bands=3), noise_multiplier=3.0)


class TestPoissonPLD(AccountantContract):
    def accountant(self):
        return PoissonPLD()

    def mechanism(self):
        return MatrixMechanism(scheme=POISSON, strategy=Identity(), noise_multiplier=1.0)

    def refused_mechanism(self):
        return MatrixMechanism(scheme=POISSON, strategy=BSR(bands=2), noise_multiplier=1.0)


class TestBallsInBinsIndependentNoise(AccountantContract):
    def accountant(self):
        return BallsInBinsRenyi()

    def mechanism(self):
        return MatrixMechanism(scheme=BINS, strategy=Identity(), noise_multiplier=1.5)

    def refused_mechanism(self):
        return MatrixMechanism(scheme=POISSON, strategy=Identity(), noise_multiplier=1.0)


class TestBallsInBinsBanded(AccountantContract):
    def accountant(self):
        return BallsInBinsRenyi()

    def mechanism(self):
        return MatrixMechanism(scheme=BINS, strategy=BSR(bands=2), noise_multiplier=2.0)

    def refused_mechanism(self):
        scheme = MinSep(probability=0.2, min_sep=4, dataset_size=5_000, steps=20)
        return MatrixMechanism(scheme=scheme, strategy=BSR(bands=3), noise_multiplier=1.0)


class TestBallsInBinsDense(AccountantContract):
    def accountant(self):
        return BallsInBinsRenyi()

    def mechanism(self):
        return MatrixMechanism(scheme=FEW_BINS, strategy=BSR(bands=16), noise_multiplier=4.0)
