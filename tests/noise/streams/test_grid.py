"""Refusing noise that float32 sums would betray."""

import numpy as np
import pytest
import torch

from dptrain.noise import noise_stream
from dptrain.noise.streams.grid import check_growth
from dptrain.strategies import (
    BLT,
    BSR,
    BandMF,
    Dense,
    MomentumSGD,
    RunShape,
    SquareRoot,
    Strategy,
    Tree,
    TreeRestart,
    proposals,
)

LIKE = [torch.zeros(3)]


def largest_deviation(strategy, steps):
    """Of a row of W over the largest 1/C_tt so far, from the dense inverse."""
    bound = strategy.bind(steps)
    w = bound.solve(np.eye(bound.rows(steps)))
    return np.linalg.norm(w, axis=1)


@pytest.mark.parametrize(
    "strategy",
    [
        BSR(bands=4),
        BandMF(bands=3, coefficients=(0.5, 0.7, 0.1)),
        BLT(buffers=1, theta=(0.2,), omega=(1.3,)),
        SquareRoot(),
        Dense(matrix=np.tril(np.random.default_rng(0).uniform(0.1, 1, (12, 12)) + np.eye(12))),
    ],
)
def test_growth_is_that_of_the_dense_inverse(strategy):
    bound = strategy.bind(12)
    diagonal = np.diag(bound.columns(12, np.arange(12)))
    expected = largest_deviation(strategy, 12) / np.maximum.accumulate(1 / diagonal)
    np.testing.assert_allclose(bound.noise_growth(12), expected, rtol=1e-9)


def test_the_step_is_named():
    # C^-1 of 1 + 2x has the coefficients (-2)^t: sqrt(Σ 4^s) is 74 at t = 6, 148 at t = 7.
    doubling = np.eye(8) + 2 * np.eye(8, k=-1)
    for strategy in (BandMF(bands=2, coefficients=(1.0, 2.0)), Dense(matrix=doubling)):
        with pytest.raises(
            ValueError, match=r"at step 7 its noise has 148 times .* rounding the sums"
        ):
            noise_stream(strategy, steps=8, like=LIKE, seed=0)
    noise_stream(Dense(matrix=doubling[:7, :7]), steps=7, like=LIKE, seed=0)
    noise_stream(BandMF(bands=2, coefficients=(1.0, 2.0)), steps=7, like=LIKE, seed=0)


def test_slow_growth_counts_as_well():
    # C^-1 of 1 + x is (-1)^t: the noise of a random walk.
    with pytest.raises(ValueError, match="at step 10000 "):
        check_growth(BandMF(bands=2, coefficients=(1.0, 1.0)).bind(10_001), 10_001)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("workload", [None, MomentumSGD(momentum=0.95)])
def test_families_stay_far_below(workload):
    options = {} if workload is None else {"workload": workload}
    run = {"steps": 64, "bands": (1, 4, 16), "max_participations": 4, "min_sep": 16}
    for strategy in proposals(RunShape(**run, dense=True, **options)):
        bound = strategy.bind(64)
        if isinstance(bound, Tree | TreeRestart):
            continue  # C_tt has no meaning there: below
        assert bound.noise_growth(64).max() < 3


@pytest.mark.parametrize("strategy", [Tree(), TreeRestart(height=1), TreeRestart(height=4)])
@pytest.mark.parametrize("steps", [8, 63, 64, 300])
def test_trees_state_a_bound_that_grows_slowly(strategy, steps):
    bound = strategy.bind(steps)
    claimed = bound.noise_growth(steps)
    assert (largest_deviation(strategy, steps) <= claimed).all()
    assert claimed.max() <= 2 * np.sqrt(np.log2(steps) + 1)
    exact = Strategy.noise_growth(bound, steps) / bound.column_norms(steps).max()
    np.testing.assert_allclose(exact, largest_deviation(strategy, steps), rtol=1e-12)
