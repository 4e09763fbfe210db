"""The noise of strategies that are not banded Toeplitz under the contract."""

import numpy as np

from dptrain.noise.streams.convolution import ConvolutionStream
from dptrain.strategies.toeplitz.bisr import BISR
from dptrain.strategies.toeplitz.lambda_cgd import LambdaCGD
from dptrain.strategies.toeplitz.square_root import SquareRoot
from dptrain.testing import NoiseStreamContract
from tests.helpers.stand_in_strategies import Triangle


class _Convolved(NoiseStreamContract):
    samples = 60_000

    def rounding_bound(self, noise, z):
        """C·noise - Z = C·L·e with L the part of C^-1 below the diagonal and |e| ≤ 2^-7 |z|."""
        dense = self.bound().columns(self.steps, np.arange(self.steps))
        below = np.abs(np.tril(self.left_inverse(), -1))
        return np.abs(dense) @ (below @ np.abs(z)) * 2.0**-7

    def test_is_a_convolution(self):
        stream = self.open()
        assert isinstance(stream, ConvolutionStream)
        bands = np.flatnonzero(self.bound().inverse_column(self.steps)).max()
        assert stream.buffer_bytes == 8 * bands * sum(t.numel() for t in self.like())


class TestBISRNoise(_Convolved):
    def make_strategy(self):
        return BISR(inverse_bands=4)

    def foreign_strategy(self):
        return BISR(inverse_bands=5)


class TestLambdaCGDNoise(_Convolved):
    def make_strategy(self):
        return LambdaCGD(cancellation=0.7)

    def foreign_strategy(self):
        return LambdaCGD(cancellation=0.6)


class TestSquareRootNoise(_Convolved):
    def make_strategy(self):
        return SquareRoot()

    def foreign_strategy(self):
        return SquareRoot(beta=0.5)


class TestTriangleNoise(NoiseStreamContract):
    samples = 60_000

    def make_strategy(self):
        return Triangle(bands=5)

    def foreign_strategy(self):
        return Triangle(bands=5, scale=2.0)


class TestFullTriangleNoise(NoiseStreamContract):
    samples = 30_000

    def make_strategy(self):
        return Triangle(bands=19)

    def foreign_strategy(self):
        return Triangle(bands=18)

    def other_lengths(self):
        return [20]
