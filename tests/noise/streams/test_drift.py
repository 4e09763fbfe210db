"""Rounding does not build up: 10^4 steps in float32 against float64, for every kind of stream."""

import numpy as np
import pytest
import torch

from dptrain.noise import noise_stream
from dptrain.noise.generators.gaussian import CHUNK, fill_normal
from dptrain.strategies import BSR, BandMF
from dptrain.strategies.blt.blt import BLT
from dptrain.strategies.toeplitz.bisr import BISR
from tests.helpers.stand_in_strategies import Triangle

STEPS = 10_000


def run(stream, steps):
    return np.array([next(stream)[0].double().numpy().copy() for _ in range(steps)])


@pytest.fixture(scope="module")
def z():
    out, row = np.empty((STEPS, 4)), torch.empty(4)
    for step in range(STEPS):
        fill_normal(row, seed=5, group=0, step=step)
        out[step] = row.numpy()
    return out


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    "strategy",
    [
        BSR(bands=16),
        BandMF(bands=4, coefficients=(1.0, 0.98, 0.9, 0.85)),
        BISR(inverse_bands=16),
        # As float32 this θ is off by 1.4·10^-8: c at the end of the run by 1.4·10^-4 of itself.
        BLT(buffers=2, theta=(0.99999, 0.5), omega=(0.01, 0.4)),
        Triangle(bands=3),
    ],
    ids=repr,
)
def test_float32_noise_of_ten_thousand_steps(strategy, z):
    like = [torch.zeros(4)]
    bound = strategy.bind(STEPS)
    noise = run(noise_stream(bound, steps=STEPS, like=like, seed=5), STEPS)
    exact = bound.solve(z)
    error = np.abs(noise - exact)
    # A row's own rounding, about 6 ulps of 5, times what C^-1 makes of it (sums of |g| up to 50).
    assert error.max() < 50 * 2e-6
    assert error[-1000:].max() < 5 * error[:1000].max() + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_of_a_slow_decay(dtype):
    # 1 - θ is below the spacing of bfloat16: rounded to the nearest, the sum would stand still.
    steps, theta = 3000, 0.999
    strategy = BLT(buffers=2, theta=(theta, 0.9), omega=(0.0009, 0.05))
    stream = noise_stream(strategy, steps=steps, like=[torch.zeros(300)], seed=5, dtype=dtype)
    total, largest = np.zeros(300), np.zeros(300)
    for y in run(stream, steps):
        total = theta * total + y
        largest = np.maximum(largest, np.abs(total))
    (sums,) = stream.state_dict()["buffers"][0]
    error = sums[0].double().numpy() - total
    if dtype is torch.float32:
        assert np.abs(error).max() < 1e-4 * largest.max()
    else:
        # A step adds an independent error, at most 2^-8 of the largest sum in standard deviation;
        # they decay by θ², so about 1/(2 (1-θ)) of them count.
        deviation = 2.0**-8 * np.sqrt(np.mean(largest**2) / (1 - theta**2))
        assert abs(error.mean()) < 6 * error.std() / np.sqrt(300)
        assert error.std() < deviation


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "strategy",
    [
        BSR(bands=3),
        BISR(inverse_bands=3),
        BLT(buffers=1, theta=(0.9,), omega=(0.1,)),
        Triangle(bands=2),
    ],
    ids=repr,
)
def test_the_number_of_threads_changes_nothing(strategy, dtype):
    like = [torch.zeros(8 * CHUNK + 77)]
    before = torch.get_num_threads()
    rows = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            stream = noise_stream(strategy, steps=5, like=like, seed=5, dtype=dtype)
            rows.append([next(stream)[0].clone() for _ in range(4)])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for other in rows[1:]:
        assert all(torch.equal(a, b) for a, b in zip(rows[0], other, strict=True))
