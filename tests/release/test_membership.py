"""Which of two sums is in a release, told by numbers alone: always in floating point, else never.

The sums are known to the last bit, and σ is so large that the noise itself tells next to nothing.
"""

from __future__ import annotations

import pytest
import torch
from opacus.optimizers.optimizer import _generate_noise
from scipy.stats import binom

from tests.helpers.released import in_floating_point, membership
from tests.oracles.membership_game import Game, leaks
from tests.oracles.reachable import FLOAT32, FLOAT64, share_unreachable, sum_of_noise

DTYPES = [torch.float32, torch.float64]
SIGMAS = [1.0, 10.0, 1000.0]
BOUND = 0.7


@pytest.mark.sample(every=11)
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_membership_is_told_in_floating_point(dtype, sigma, secure):
    """Of 500 numbers a share is unreachable; in float64 nearly all are, as noise is float32."""
    share = share_unreachable(sigma * BOUND)
    assert 1 - 40 * (1 - 0.9 * share) ** 500 > 1 - 1e-9  # that all 40 are told
    with in_floating_point():
        game = membership(sigma, dtype=dtype, seed=3, secure=secure)
    for truth in (0, 1):
        assert not game.floats(game.released[truth], game.sums[truth]).any()
    assert game.right(game.floats) == game.rounds == 40
    assert any("which floats it can reach" in each for each in leaks(game))
    if dtype is torch.float64:
        assert any("are not whole numbers" in each for each in leaks(game))


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_membership_is_not_told_on_the_grid(dtype, sigma, secure):
    """Every number could be of either sum, and what else one counts is right as coins are."""
    game = membership(sigma, dtype=dtype, seed=3, secure=secure)
    for released in game.released:
        for total in game.sums:
            assert not game.grid(released, total).any()
    low, high = binom.ppf([1e-9, 1 - 1e-9], game.rounds, 0.5)
    for evidence in (game.floats, game.odd):
        assert low <= game.right(evidence) <= high
    assert leaks(game) == ()


@pytest.mark.parametrize(("dtype", "codes"), [(torch.float32, FLOAT32), (torch.float64, FLOAT64)])
def test_a_step_of_another_engine_is_audited(dtype, codes):
    """A function from sums to noisy sums, of which no grid is stated: Opacus's, in float64 too."""
    torch.manual_seed(4)
    sums = (torch.randn(500, dtype=dtype), torch.randn(500, dtype=dtype))
    game = Game.play(
        lambda total: total + _generate_noise(1.7, total),
        sums,
        deviation=1.7,
        noisy=sum_of_noise,
        codes=codes,
    )
    for truth in (0, 1):
        assert not game.floats(game.released[truth], sums[truth]).any()
    assert any("40 times of 40" in each for each in leaks(game))


def test_a_grid_that_is_not_kept_is_found():
    """In float64 by every number, and nothing is said of a release that is on its grid."""
    torch.manual_seed(4)
    sums = (torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64))

    def unrounded(total: torch.Tensor) -> torch.Tensor:
        return total + 1.7 * torch.randn(50, dtype=torch.float64)

    assert leaks(Game.play(rounded(torch.float64), sums, deviation=1.7, bits=30)) == ()
    (found,) = leaks(Game.play(unrounded, sums, deviation=1.7, bits=30))
    assert "2000 numbers are not whole numbers" in found


def rounded(dtype: torch.dtype):
    """A release on a grid of 30 bits, its noise rounded from normals of a dtype."""
    unit = 1.7 * 2.0**-30

    def step(total: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(len(total), dtype=dtype).double() * 2.0**30
        return ((total / unit).round() + noise.round()) * unit

    return step


def test_a_grid_finer_than_the_noise_is_found():
    """All numbers are on the grid, but float32 noise in units of 2^-30 ends in zeros."""
    torch.manual_seed(4)
    sums = (torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64))
    found = leaks(Game.play(rounded(torch.float32), sums, deviation=1.7, bits=30))
    assert any("its last bit" in each for each in found)
    assert not any("are not whole numbers" in each for each in found)
