"""The grid of norms: bounds, rounding up, counting."""

import numpy as np
import pytest

from dptrain.contrib.individual.norm_grid import NormGrid


@pytest.mark.parametrize(("smallest", "ratio"), [(1e-3, 1.01), (0.2, 1.5), (1.0, 1.01), (0.9, 3.0)])
def test_values(smallest, ratio):
    values = NormGrid(smallest=smallest, ratio=ratio).values
    assert values[0] == 0.0
    assert values[-1] == 1.0
    assert values[1] == pytest.approx(smallest, rel=1e-12)
    assert np.all(np.diff(values) > 0)
    if values.size > 2:
        assert np.all(values[2:] / values[1:-1] <= ratio * (1 + 1e-12))


def test_bucket_is_the_least_value_not_below():
    grid = NormGrid(smallest=0.01, ratio=1.1)
    ratios = np.random.default_rng(1).uniform(0, 1, 1000)
    ratios[:3] = [0.0, 1e-9, 1.0]
    found = grid.bucket(ratios)
    assert np.all(grid.values[found] >= ratios)
    positive = found > 0
    assert np.all(grid.values[found[positive] - 1] < ratios[positive])
    np.testing.assert_array_equal(grid.bucket(grid.values), np.arange(grid.values.size))


def test_counts():
    grid = NormGrid(smallest=0.25, ratio=2.0)
    np.testing.assert_array_equal(grid.values, [0.0, 0.25, 0.5, 1.0])
    found = grid.counts([[0.0, 0.1, 0.3, 1.0], [1.0, 1.0, 0.5, 0.25]])
    np.testing.assert_array_equal(found, [[1, 1, 1, 1], [0, 1, 1, 2]])


def test_refuses_bad_input():
    for wrong in ({"smallest": 0.0}, {"smallest": 1.5}, {"ratio": 1.0}, {"ratio": np.nan}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            NormGrid(**wrong)
    for ratios in ([-0.1], [1.1], [np.nan]):
        with pytest.raises(ValueError, match="ratios"):
            NormGrid().bucket(ratios)
    with pytest.raises(ValueError, match="shape"):
        NormGrid().counts([0.5])
