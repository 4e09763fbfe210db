"""The law of the rounded normals: fixed seeds, six sigma (2e-9) a comparison."""

import numpy as np
import pytest
import torch
from scipy import stats

from dptrain.noise.generators import rounded
from dptrain.noise.generators.keystream import derive_key, key_stream
from dptrain.noise.generators.normals import CHUNK, Normals, philox_words

BITS = 43
SIZE = 1 << 19


def whole(size, *, seed=1, group=0, step=0, scale=1.0, bits=BITS):
    out = torch.full((size,), torch.nan, dtype=torch.float64)
    Normals(seed).fill(out, group=group, step=step, bits=bits, scale=scale)
    return out.numpy()


def draw(size, **place):
    return whole(size, **place) * 2.0**-BITS


@pytest.fixture(scope="module")
def sample():
    return np.concatenate([draw(SIZE + 777, step=t) for t in range(4)])


WIDTH = 2.0**-rounded.DITHER
"""Of the dither of scale 1: it adds a uniform number, of variance width²/12."""


def moments(orders):
    """E (z + d)^k for a normal z and a d uniform over ``WIDTH``."""
    normal = [1.0, 0.0]
    for k in range(2, orders + 1):
        normal.append((k - 1) * normal[k - 2])
    uniform = [0.0 if k % 2 else (WIDTH / 2) ** k / (k + 1) for k in range(orders + 1)]
    return [
        sum(stats.binom(k, 0.5).pmf(j) * 2**k * normal[j] * uniform[k - j] for j in range(k + 1))
        for k in range(orders + 1)
    ]


@pytest.mark.parametrize("moment", range(1, 7))
def test_moments(sample, moment):
    exact = moments(12)
    deviation = np.sqrt((exact[2 * moment] - exact[moment] ** 2) / len(sample))
    assert abs((sample**moment).mean() - exact[moment]) < 6 * deviation


def test_variance_by_scale():
    """1 + width²/12 of the square of the scale, with the width that the scale has."""
    for scale in (0.51, 0.99, 1.0, 1.7, 3.0):
        z = whole(SIZE, bits=40, scale=scale) * 2.0**-40
        width = 2.0 ** (64 - rounded._shift(40, scale) - 40)
        expected = scale**2 + width**2 / 12
        assert abs(z.var() / expected - 1) < 6 * np.sqrt(2 / SIZE)


@pytest.mark.parametrize("size", [100, 10_000, 1_000_000])
def test_distribution(sample, size):
    # The dither widens the normal by 1e-5 of it, far less than these sizes show.
    assert stats.kstest(sample[:size], "norm").pvalue > 2e-9


@pytest.mark.parametrize("limit", [1.0, 2.0, 3.0, 4.0, 5.0])
def test_tails(sample, limit):
    # An exact binomial test: beyond 5 one entry is expected, no normal law there.
    widened = limit / np.sqrt(1 + WIDTH**2 / 12)
    for values in (sample, -sample):
        count = int(np.sum(values > limit))
        assert stats.binomtest(count, len(sample), stats.norm.sf(widened)).pvalue > 2e-9


def assert_uncorrelated(a, b):
    """Products and squares: E ab = 0 and cov(a², b²) = 0, whose variances are 1 and 4 a pair."""
    size = len(a)
    assert abs((a * b).mean()) < 6 / np.sqrt(size)
    assert abs(((a**2 - 1) * (b**2 - 1)).mean()) < 6 * 2 / np.sqrt(size)


@pytest.mark.parametrize("lag", [1, 2, 3, 7, 1024, CHUNK // 4, CHUNK // 2, CHUNK, 3 * CHUNK])
def test_lags(lag):
    # CHUNK/2 apart are the cosine and the sine of the same pairs.
    row = draw(SIZE)
    assert_uncorrelated(row[lag:], row[:-lag])


@pytest.mark.parametrize(
    "change",
    [{"step": 1}, {"step": 1 << 32}, {"group": 1}, {"seed": 0}]
    + [{"seed": 1 ^ 1 << bit} for bit in (31, 63, 64, 127)],
)
def test_rows_are_independent(change):
    assert_uncorrelated(draw(SIZE), draw(SIZE, **change))


def pairs():
    row = draw(SIZE).reshape(-1, 2, CHUNK // 2)
    return row[:, 0].ravel(), row[:, 1].ravel()


def test_cosine_and_sine_of_the_same_pairs_are_jointly_normal():
    x, y = pairs()
    angle = np.arctan2(y, x) / (2 * np.pi) + 0.5
    assert stats.kstest(angle, "uniform").pvalue > 2e-9
    assert stats.kstest((x**2 + y**2) / 2, "expon").pvalue > 2e-9


def test_the_eight_parts_of_the_circle_are_alike():
    """Two bits choose sign and place of cosine and sine, and one the sign of the angle."""
    x, y = pairs()
    part = (x > 0) * 1 + (y > 0) * 2 + (np.abs(x) > np.abs(y)) * 4
    assert stats.chisquare(np.bincount(part, minlength=8)).pvalue > 2e-9
    # Within each the radius has the same law.
    radius = (x**2 + y**2) / 2
    for k in range(8):
        assert stats.kstest(radius[part == k], "expon").pvalue > 2e-9


def test_the_dither_is_uniform_given_the_rest():
    """What a row has more than without the leading bits of its last two words."""
    shift = rounded._shift(BITS, 1.0)
    dithers, rests = [], []
    for step in range(4):
        row = whole(CHUNK, step=step)
        words = key_stream(derive_key(1, 0, step, tag=b"dptrain.noise"), 0, 2 * CHUNK).copy()
        words = words.view(np.int64)
        words[CHUNK:] &= (1 << shift) - 1
        rest = np.empty(CHUNK)
        rounded.rounded_normals(words, rest, bits=BITS, scale=1.0)
        dithers.append(row - rest)
        rests.append(rest)
    dither, rest = np.concatenate(dithers), np.concatenate(rests)
    width = 2.0 ** (64 - shift)
    assert dither.min() >= -width / 2
    assert dither.max() < width / 2
    bins = ((dither / width + 0.5) * 64).astype(int)
    assert stats.chisquare(np.bincount(bins, minlength=64)).pvalue > 2e-9
    low = dither.astype(np.int64) & 63
    assert stats.chisquare(np.bincount(low, minlength=64)).pvalue > 2e-9
    # By what it is added to: its size in eight parts, and its last bits.
    parts = np.digitize(rest * 2.0**-BITS, stats.norm.ppf(np.arange(1, 8) / 8))
    for given in (parts, rest.astype(np.int64) & 7):
        for part in range(8):
            counts = np.bincount(bins[given == part], minlength=64)
            assert stats.chisquare(counts).pvalue > 2e-9


def test_philox_words_are_uniform_over_all_bits():
    """The sign bit too: the generator has to be asked for the whole range."""
    generator = torch.Generator().manual_seed(5)
    count = 1 << 18
    words = philox_words(count, generator).numpy()
    assert words.dtype == np.int64
    for bit in range(64):
        ones = int(np.sum(words >> bit & 1))
        assert abs(ones - count / 2) < 6 * np.sqrt(count / 4), bit
    for shift in (0, 8, 28, 56):
        counts = np.bincount(words >> shift & 255, minlength=256)
        assert stats.chisquare(counts).pvalue > 2e-9
    # Neighboring bits and words.
    for lag in (1, 8, 31, 32):
        agree = (words ^ words >> lag) & 1
        assert abs(agree.sum() - count / 2) < 6 * np.sqrt(count / 4)
    agree = int(np.bitwise_count((words[1:] ^ words[:-1]).view(np.uint64)).sum())
    assert abs(agree - 32 * (count - 1)) < 6 * np.sqrt(16 * count)


def test_the_normals_of_torch_have_the_law_too():
    """What a GPU computes, here by the functions of the CPU."""
    generator = torch.Generator().manual_seed(7)
    out = torch.empty(SIZE, dtype=torch.float64)
    words = philox_words(rounded.WORDS * SIZE // 2, generator)
    rounded.rounded_normals_of_tensors(words, out, bits=BITS, scale=1.0)
    z = out.numpy() * 2.0**-BITS
    assert stats.kstest(z, "norm").pvalue > 2e-9
    assert_uncorrelated(z[: SIZE // 2], z[SIZE // 2 :])
    exact = moments(8)
    for k in range(1, 5):
        deviation = np.sqrt((exact[2 * k] - exact[k] ** 2) / SIZE)
        assert abs((z**k).mean() - exact[k]) < 6 * deviation
