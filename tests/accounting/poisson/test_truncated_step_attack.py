"""Truncated Poisson against the mechanism itself: every coin and every subset at tiny N."""

import itertools
import math

import numpy as np
import pytest

from dptrain.accounting.poisson import SubsampledGaussianCurve, truncated_curve
from dptrain.core.guarantee import Adjacency
from tests.oracles.enumeration import log_sum_exp

EPSILONS = np.array([0.0, 0.1, 0.5, 1.0, 2.0, 4.0])


def curve(size, p, largest, adjacency=Adjacency.ZERO_OUT):
    return truncated_curve(
        adjacency,
        probability=p,
        dataset_size=size,
        max_batch_size=largest,
        steps=1,
        sensitivity=1.0,
    )


def neighbor(adjacency, others):
    """The gradients of the other data set, whose example had gradient (1, 0)."""
    if adjacency is Adjacency.ADD_REMOVE:
        return others
    return [(0.0 if adjacency is Adjacency.ZERO_OUT else -1.0, 0.0), *others]


def sum_law(gradients, p, largest):
    """Every value of the kept sum and its probability: all coins, all subsets kept."""
    law = {}
    size = len(gradients)
    for coins in itertools.product((0, 1), repeat=size):
        drawn = [i for i in range(size) if coins[i]]
        chance = p ** len(drawn) * (1 - p) ** (size - len(drawn))
        if not chance:
            continue
        kept = list(itertools.combinations(drawn, min(largest, len(drawn))))
        for subset in kept:
            total = tuple(sum(gradients[i][axis] for i in subset) for axis in range(2))
            law[total] = law.get(total, 0.0) + chance / len(kept)
    return law


def attained(law, other, sigma, epsilons, planar):
    """∫(P - e^ε Q)_+ of the noisy sums, by a sum over a fine grid; both orders."""
    step = sigma / 8 if planar else sigma / 400
    axis = np.arange(-4 - 8 * sigma, 4 + 8 * sigma, step)
    y = np.stack(np.meshgrid(axis, axis), -1) if planar else axis[:, None] * [1.0, 0.0]

    def log_density(of):
        means, weights = np.array(list(of)), np.array(list(of.values()))
        squares = (y**2).sum(-1)[..., None] - 2 * (y @ means.T) + (means**2).sum(-1)
        return log_sum_exp(np.log(weights) - squares / (2 * sigma**2))

    log_p, log_q = log_density(law), log_density(other)
    cell = (step / (sigma * math.sqrt(2 * math.pi))) ** (2 if planar else 1)
    return [
        [cell * np.maximum(np.exp(a) - np.exp(e + b), 0.0).sum() for e in epsilons]
        for a, b in ((log_p, log_q), (log_q, log_p))
    ]


@pytest.mark.slow
@pytest.mark.sample(every=4)
@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("sigma", [0.6, 1.5])
def test_no_gradients_on_a_line_attain_more_than_is_claimed(sigma, adjacency):
    beyond_poisson = 0
    for size in (2, 3, 4) if adjacency is Adjacency.ZERO_OUT else (2, 3):
        for largest, p in itertools.product(range(1, size), (0.15, 0.5, 0.9, 1.0)):
            claimed = np.array(curve(size, p, largest, adjacency).delta(sigma, EPSILONS))
            poisson = np.array(SubsampledGaussianCurve(p, 1, 1.0).delta(sigma, EPSILONS))
            for others in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), size - 1):
                rest = [(value, 0.0) for value in others]
                mine = sum_law([(1.0, 0.0), *rest], p, largest)
                blank = sum_law(neighbor(adjacency, rest), p, largest)
                found = np.array(attained(mine, blank, sigma, EPSILONS, planar=False))
                # The kinks of the integrand cost the square of the grid's step.
                assert (found <= claimed + 5e-6).all(), (size, largest, p, others)
                beyond_poisson += int((found > poisson + 1e-4).any())
    # The attack is worth something: Poisson's own numbers would be false.
    assert beyond_poisson > 0


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_no_gradients_in_a_plane_attain_more_than_is_claimed(adjacency):
    sigma, size = 0.7, 3
    angles = np.exp(1j * math.pi * np.array([0.0, 0.5, 0.75, 1.0]))
    for largest, p in itertools.product((1, 2), (0.4, 0.9)):
        claimed = np.array(curve(size, p, largest, adjacency).delta(sigma, EPSILONS))
        for others in itertools.combinations_with_replacement(angles, size - 1):
            rest = [(value.real, value.imag) for value in others]
            mine = sum_law([(1.0, 0.0), *rest], p, largest)
            blank = sum_law(neighbor(adjacency, rest), p, largest)
            found = np.array(attained(mine, blank, sigma, EPSILONS, planar=True))
            # The kink of the integrand costs the square of the grid's step.
            assert (found <= claimed + 2e-3).all(), (largest, p, others)
