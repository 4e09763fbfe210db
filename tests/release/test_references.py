"""The attacks and the noise that they succeed on, against brute force and laws in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from tests.oracles.float_noise import EDGE, FloatNoise, box_muller, fast_normals, secure_normals
from tests.oracles.reachable import (
    FLOAT32,
    Codes,
    LastBits,
    last_bits,
    noisy_sum,
    off_grid,
    share_unreachable,
    stepped,
    unreachable,
)

SIGMAS = (0.7, 1.2161, 10.0, 1000.0)


@pytest.mark.parametrize("draw", [fast_normals, secure_normals])
def test_the_reference_draws_normals(draw):
    drawn = draw(100_001, np.random.default_rng(3))
    assert drawn.dtype == torch.float32
    assert drawn.shape == (100_001,)
    assert kstest(drawn.numpy(), "norm").pvalue > 1e-6


def test_a_radius_word_of_zero_is_the_edge():
    """Over a circle of angles the larger coordinate comes as near as half of their distance."""
    angles = np.arange(0, 1 << 32, 1 << 16, dtype=np.int64).astype(np.uint32)
    largest = box_muller(np.zeros_like(angles), angles).abs().max().item()
    assert EDGE * (1 - 1e-6) < largest <= EDGE * (1 + 1e-6)
    assert box_muller(np.ones_like(angles), angles).abs().max().item() < EDGE - 0.1


def test_correlated_noise_of_the_reference_is_white_again():
    """C y = z: what the columns add up to is what one seed draws."""
    column = (0.8, 0.5, 0.3)
    noise = FloatNoise(column, seed=4)
    rows = [noise.release([torch.zeros(50)], 1.0)[0].clone() for _ in range(5)]
    rng = np.random.default_rng(4)
    for t in range(5):
        white = sum(column[k] * rows[t - k] for k in range(3) if t >= k)
        assert (white - fast_normals(50, rng)).abs().max() < 1e-5


def test_codes_of_float32_are_all_its_numbers_in_order():
    codes = torch.arange(-(1 << 20), 1 << 20) * 997
    codes = codes[codes.abs() <= FLOAT32.last]
    numbers = FLOAT32.number(codes).numpy()
    assert (np.diff(numbers) > 0).all()
    some = FLOAT32.number(torch.tensor([-2, -1, 0, 1, 2, FLOAT32.last])).numpy()
    tiny = np.float32(2.0**-149)
    assert (some == np.array([-2 * tiny, -tiny, 0, tiny, 2 * tiny, 64], np.float32)).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_is_unreachable_by_trying_all_noise(sign):
    """Noise of 201 numbers: every sum is compared with all that it brings about."""
    few = Codes(100, lambda codes: codes.float() / 7)
    total = torch.linspace(-3, 3, 13)[:, None].expand(13, 401).contiguous()
    seen = torch.linspace(-40, 40, 401).expand(13, 401).contiguous()

    def forward(z: torch.Tensor) -> torch.Tensor:
        return (sign * (total + 3 * z)).round()

    found = unreachable(seen, forward, few)
    noise = few.number(torch.arange(-100, 101))
    for i in range(13):
        possible = set((sign * (total[i, 0] + 3 * noise)).round().tolist())
        assert found[i].tolist() == [each not in possible for each in seen[i].tolist()]


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("draw", [fast_normals, secure_normals])
def test_the_share_that_is_unreachable_is_the_one_computed(sigma, draw):
    """Of noise alone nothing is. The share is right to first order: 5 %, and 6 sigma."""
    size = 60_000
    none, rng = torch.zeros(size), np.random.default_rng(1)
    forward = noisy_sum(none, sigma, 32.0)
    alone = none.clone().add_(draw(size, rng), alpha=sigma).div_(32.0)
    assert not unreachable(alone, forward, FLOAT32).any()
    total = torch.from_numpy(rng.normal(0, 0.05, size).astype(np.float32))
    seen = total.add_(draw(size, rng), alpha=sigma).div_(32.0)
    share, found = share_unreachable(sigma), unreachable(seen, forward, FLOAT32).double().mean()
    assert abs(found - share) < 0.05 * share + 6 * (share / size) ** 0.5


def test_powers_of_two_leave_nothing_out():
    assert share_unreachable(0.5) == share_unreachable(64.0) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_numbers_are_on_their_grid_and_others_are_not(dtype):
    """Float32 numbers of this size are nearer to each other than those of the grid."""
    rng = np.random.default_rng(2)
    drawn = torch.from_numpy(rng.normal(0, 2.0**20, 50_000)).round()
    seen = (drawn * (1.7 * 2.0**-20)).to(dtype)
    assert not off_grid(seen, 1.7, 20).any()
    moved = torch.nextafter(seen, torch.full_like(seen, 99.0))
    assert off_grid(moved, 1.7, 20).all()


def test_a_step_of_the_optimizer_is_looked_through():
    before, rng = torch.zeros(3000), np.random.default_rng(5)
    release = noisy_sum(torch.zeros(3000), 1.3)
    optimizer = lambda weights: torch.optim.SGD(weights, lr=0.25)  # noqa: E731
    forward = stepped(release, before, optimizer)
    after = forward(fast_normals(3000, rng))
    assert not unreachable(after, forward, FLOAT32).any()
    assert unreachable(after + 1e-3, forward, FLOAT32).any()


def test_last_bits():
    seen = torch.tensor([1.0, 1.5, -0.75, 2.0**-30 + 1, 12.0, 5.0], dtype=torch.float64)
    assert last_bits(seen).tolist() == [0, -1, -2, -30, 2, 0]


def test_who_has_learned_last_bits_tells_coarse_numbers():
    """Whole numbers of 2^-20 and of 2^-24: a number of the former is told by its last bits."""
    rng = np.random.default_rng(6)

    def draw(bits):
        values = torch.from_numpy(rng.normal(0, 1, (2000, 8)))
        return (values * 2.0**bits).round() * 2.0**-bits

    learned = LastBits.learn(draw(20).flatten(), draw(24).flatten())
    assert (learned.score(draw(24)).sum(dim=1) > 0).double().mean() > 0.999
    assert (learned.score(draw(20)).sum(dim=1) > 0).double().mean() < 0.001
