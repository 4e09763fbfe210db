"""Poisson sampling with independent noise at one and two steps, against quadrature."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.accounting import account, profile
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep, Poisson
from dptrain.strategies import Identity
from tests.oracles import enumeration as oracle
from tests.oracles import quadrature

# Quadrature is good to 1e-8; ε may exceed the truth by one part in a thousand.
ROUNDING, SLACK = 1e-7, 1e-3
CASES = [(0.3, 0.6), (0.3, 2.0), (0.02, 1.0), (0.9, 1.0), (1e-3, 0.4)]


def mechanism(p: float, sigma: float, steps: int) -> MatrixMechanism:
    scheme = Poisson(probability=p, dataset_size=10, steps=steps)
    return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)


def worst(p: float, sigma: float, steps: int, epsilon: float) -> float:
    law = oracle.poisson(steps, p)
    return max(
        quadrature.delta(law, np.eye(steps), sigma, epsilon, remove=r) for r in (True, False)
    )


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("p", "sigma"), CASES)
@pytest.mark.parametrize("delta", [1e-2, pytest.param(1e-5, marks=pytest.mark.slow), 1e-12])
def test_epsilon_at_delta(p: float, sigma: float, steps: int, delta: float) -> None:
    """True δ at the stated ε is at most δ; a thousandth lower it exceeds δ."""
    epsilon = account(mechanism(p, sigma, steps), delta=delta).epsilon
    assert worst(p, sigma, steps, epsilon) <= delta * (1 + ROUNDING)
    if epsilon > 0:
        assert worst(p, sigma, steps, epsilon / (1 + SLACK)) >= delta * (1 - ROUNDING)


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("p", "sigma"), CASES[:3])
def test_profile_in_both_directions(p: float, sigma: float, steps: int) -> None:
    grid = np.array([0.01, 0.1, 0.5, 2.0])
    claimed = profile(mechanism(p, sigma, steps), grid)
    law = oracle.poisson(steps, p)
    for remove, values in ((True, claimed.remove), (False, claimed.add)):
        for at, value in zip(grid, values, strict=True):
            exact, above = (
                quadrature.delta(law, np.eye(steps), sigma, e, remove=remove)
                for e in (at, at / (1 + SLACK))
            )
            assert value >= exact * (1 - ROUNDING)
            if exact > 1e-12:  # mass cut off at both ends counts as δ
                assert value <= above * (1 + ROUNDING)


@pytest.mark.parametrize("sigma", [0.7, 2.0])
@pytest.mark.parametrize("steps", [1, 2, 50])
def test_certain_participation_is_gaussian(sigma: float, steps: int) -> None:
    mu = np.sqrt(steps) / sigma
    for delta in (1e-3, 1e-8):
        epsilon = account(mechanism(1.0, sigma, steps), delta=delta).epsilon
        assert quadrature.gaussian_delta(epsilon, mu) <= delta * (1 + ROUNDING)
        assert quadrature.gaussian_delta(epsilon / (1 + SLACK), mu) >= delta


@pytest.mark.parametrize("warm", [False, True])
def test_min_sep_of_one_has_the_epsilon_of_poisson(warm: bool) -> None:
    one = mechanism(0.1, 0.8, 20)
    scheme = MinSep(probability=0.1, min_sep=1, dataset_size=10, steps=20, warm_start=warm)
    other = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=0.8)
    for delta in (1e-2, 1e-6):
        assert account(other, delta=delta).epsilon == account(one, delta=delta).epsilon
