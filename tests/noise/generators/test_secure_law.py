"""The law of the secure normals: fixed seeds, six sigma (2e-9) a comparison."""

import numpy as np
import pytest
import torch
from scipy import stats

from dptrain.noise.generators.secure import BLOCK, SecureNormals

SIZE = 1 << 19


def draw(size, *, seed=1, group=0, step=0):
    out = torch.empty(size)
    SecureNormals(seed).fill(out, group=group, step=step)
    return out.double().numpy()


@pytest.fixture(scope="module")
def sample():
    return np.concatenate([draw(SIZE + 777, step=t) for t in range(4)])


@pytest.mark.parametrize("moment", range(1, 7))
def test_moments(sample, moment):
    def normal(k):
        return 0 if k % 2 else float(np.prod(np.arange(1, k, 2)))  # (k - 1)!!

    deviation = np.sqrt((normal(2 * moment) - normal(moment) ** 2) / len(sample))
    assert abs((sample**moment).mean() - normal(moment)) < 6 * deviation


@pytest.mark.parametrize("size", [100, 10_000, 1_000_000])
def test_distribution(sample, size):
    assert stats.kstest(sample[:size], "norm").pvalue > 2e-9


@pytest.mark.parametrize("limit", [1.0, 2.0, 3.0, 4.0, 5.0])
def test_tails(sample, limit):
    # Exact binomial test at the same level: beyond 5 one entry is expected, no normal law there.
    for values in (sample, -sample):
        count = int(np.sum(values > limit))
        test = stats.binomtest(count, len(sample), stats.norm.sf(limit))
        assert test.pvalue > 2e-9


def assert_uncorrelated(a, b):
    """Products and squares: E ab = 0 and cov(a², b²) = 0, whose variances are 1 and 4 a pair."""
    size = len(a)
    assert abs((a * b).mean()) < 6 / np.sqrt(size)
    assert abs(((a**2 - 1) * (b**2 - 1)).mean()) < 6 * 2 / np.sqrt(size)


@pytest.mark.parametrize("lag", [1, 2, 3, 7, BLOCK // 8, BLOCK // 4, BLOCK // 2, BLOCK, 3 * BLOCK])
def test_lags(lag):
    # BLOCK/2 apart are the cosine and the sine of the same four pairs.
    row = draw(SIZE)
    assert_uncorrelated(row[lag:], row[:-lag])


@pytest.mark.parametrize(
    "change",
    [{"step": 1}, {"step": 1 << 32}, {"group": 1}, {"seed": 0}]
    + [{"seed": 1 ^ 1 << bit} for bit in (31, 63, 64, 127)],
)
def test_rows_are_independent(change):
    assert_uncorrelated(draw(SIZE), draw(SIZE, **change))


def test_cosine_and_sine_of_the_same_pairs_are_jointly_normal():
    row = draw(SIZE).reshape(-1, 2, BLOCK // 2)
    x, y = row[:, 0].ravel(), row[:, 1].ravel()
    angle = np.arctan2(y, x) / (2 * np.pi) + 0.5
    assert stats.kstest(angle, "uniform").pvalue > 2e-9
    assert stats.kstest((x**2 + y**2) / 2, "expon").pvalue > 2e-9


def test_whole_rows_are_drawn():
    row = draw(SIZE)
    assert np.all(np.isfinite(row))
    assert len(np.unique(row)) > SIZE * 0.95  # float32 values of normals coincide now and then
