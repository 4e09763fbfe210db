"""The noise of buffered linear Toeplitz strategies under the contract."""

import numpy as np
import torch

from dptrain.noise.streams.blt import BLTStream
from dptrain.noise.streams.regeneration import RegenerationStream
from dptrain.strategies.blt.blt import BLT
from dptrain.testing import NoiseStreamContract
from dptrain.testing.noise_checks import SEED


class _Buffered(NoiseStreamContract):
    def open(self, seed=SEED, *, regenerate=False, **options):
        stream = super().open(seed, regenerate=regenerate, **options)
        assert isinstance(stream, RegenerationStream if regenerate else BLTStream)
        return stream

    def rounding_bound(self, noise, z):
        """|e_{j,t}| ≤ 2^-7 |s_j|, with s_j of the noise handed out and the errors so far."""
        strategy = self.bound()
        sums = np.zeros((len(strategy.theta), noise.shape[1]))
        error, bound = np.zeros_like(sums), []
        decay, weight = (np.array(v)[:, None] for v in (strategy.theta, strategy.omega))
        for y in noise:
            bound.append((weight * error).sum(axis=0))
            sums = decay * sums + y
            error = decay * error
            error += 2.0**-7 * (np.abs(sums) + error)
        return np.array(bound)


class TestThreeBuffers(_Buffered):
    samples = 60_000

    def make_strategy(self):
        return BLT(buffers=3, theta=(0.95, 0.6, 0.1), omega=(0.2, 0.15, 0.3))

    def foreign_strategy(self):
        return BLT(buffers=3, theta=(0.95, 0.6, 0.2), omega=(0.2, 0.15, 0.3))

    def test_keeps_a_row_a_buffer(self):
        stream = self.open(like=[torch.zeros(50)])
        assert stream.buffer_bytes == 3 * 50 * 8


class TestOneBuffer(_Buffered):
    samples = 30_000
    steps = 9

    def make_strategy(self):
        return BLT(buffers=1, theta=(0.5,), omega=(0.5,))

    def foreign_strategy(self):
        return BLT(buffers=1, theta=(0.5,), omega=(0.25,))


class TestOptimizedBuffers(_Buffered):
    samples = 30_000

    def make_strategy(self):
        return BLT(buffers=2, max_participations=2, min_sep=5)

    def foreign_strategy(self):
        return BLT(buffers=2, max_participations=3, min_sep=5)
