"""Rounding does not build up: 10^4 steps on the grid against float64, for every kind of stream."""

import mpmath
import numpy as np
import pytest
import torch

from dptrain.noise import noise_stream
from dptrain.noise.generators.normals import CHUNK, Normals
from dptrain.strategies import BSR, BandMF
from dptrain.strategies.blt.blt import BLT
from dptrain.strategies.toeplitz.bisr import BISR
from dptrain.testing.noise_checks import Watched, units
from tests.helpers.stand_in_strategies import Triangle

STEPS = 10_000


def run(stream, steps):
    return np.array([units(next(stream)[0], stream).copy() for _ in range(steps)])


def drawn_by(stream, size):
    """Z as a stream that was run has asked for it, in standard deviations."""
    out, row = np.empty((stream.steps, size)), torch.empty(size, dtype=torch.float64)
    for step, (bits, scale) in stream.normals.asked.items():
        Normals(5).fill(row, group=0, step=step, bits=bits, scale=scale)
        out[step] = row.numpy() * (2.0**-bits / scale)
    return out


@pytest.mark.sample(every=40)
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
def test_noise_of_ten_thousand_steps(strategy):
    bound = strategy.bind(STEPS)
    stream = noise_stream(bound, steps=STEPS, like=[torch.zeros(4)], seed=5)
    stream.normals = Watched(stream.normals)
    noise = run(stream, STEPS)
    error = np.abs(noise - bound.solve(drawn_by(stream, 4)))
    # How far rounding moves a number of Z, times what C^-1 makes of it (sums of |g| up to 50), and
    # what the solution in float64 is off by.
    assert error.max() < 50 * (0.5 * 2.0**-stream.grid_bits + stream.rounding_error) + 1e-11
    assert error[-1000:].max() < 5 * error[:1000].max() + 1e-11


@pytest.mark.slow
def test_a_blt_stays_within_its_rounding_error_at_every_step():
    """u_t by 120 bits from the noise itself, for decays that outlast the run."""
    theta, omega = (0.99999, 0.5), (0.01, 0.4)
    strategy = BLT(buffers=2, theta=theta, omega=omega)
    stream = noise_stream(strategy, steps=STEPS, like=[torch.zeros(2)], seed=5)
    stream.normals = Watched(stream.normals)
    noise = run(stream, STEPS)
    z = drawn_by(stream, 2)
    with mpmath.workprec(120):
        for column in range(2):
            sums, apart = [mpmath.mpf(0)] * 2, 0
            for y, drawn in zip(noise[:, column], z[:, column], strict=True):
                past = -sum(o * s for o, s in zip(omega, sums, strict=True))
                apart = max(apart, abs(mpmath.mpf(y) - mpmath.mpf(drawn) - past))
                sums = [t * s + y for t, s in zip(theta, sums, strict=True)]
            assert 0 < apart <= stream.rounding_error


@pytest.mark.sample(every=3)
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
    if dtype is torch.float32:  # in units of the grid, in float64; a step rounds twice
        error = sums[0].numpy() * 2.0**-stream.grid_bits - total
        assert np.abs(error).max() < 2 / (1 - theta) * 2.0**-52 * largest.max()
    else:
        error = sums[0].double().numpy() - total
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
