"""The normals themselves: their law, and what they depend on."""

import hashlib

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from dptrain.noise.generators.gaussian import CHUNK, _box_muller, fill_normal


def draw(size, *, seed=1, group=0, step=0):
    out = torch.full((size,), torch.nan)
    fill_normal(out, seed=seed, group=group, step=step)
    return out


@pytest.fixture(scope="module")
def sample():
    return np.concatenate([draw(2 * CHUNK + 1234, step=t).numpy() for t in range(8)])


def test_is_standard_normal(sample):
    # Six-sigma level in each of the tests below: 2e-9, with a fixed seed.
    assert stats.kstest(sample, "norm").pvalue > 2e-9
    n = len(sample)
    for moment, (mean, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        powers = sample.astype(np.float64) ** moment
        assert abs(powers.mean() - mean) < 6 * np.sqrt(variance / n)


@pytest.mark.parametrize("limit", [2.0, 3.0, 4.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_tails(sample, limit, sign):
    count = np.sum(sign * sample > limit)
    expected = len(sample) * stats.norm.sf(limit)
    assert abs(count - expected) < 6 * np.sqrt(expected)


def test_box_muller_pairs_are_independent():
    # Entries i and i + half of a chunk share a radius: their squares must not be correlated.
    half = CHUNK // 2
    pairs = [draw(CHUNK, step=t).double() for t in range(10)]
    x = torch.cat([row[:half] for row in pairs])
    y = torch.cat([row[half:] for row in pairs])
    for f in (lambda v: v, lambda v: v**2 - 1, torch.abs):
        a, b = f(x) - f(x).mean(), f(y) - f(y).mean()
        assert abs((a * b).mean() / (a.std() * b.std())) < 6 / np.sqrt(len(a))
    angle = torch.atan2(y, x).numpy() / (2 * np.pi) + 0.5
    assert stats.kstest(angle, "uniform").pvalue > 2e-9


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1001, CHUNK - 1, CHUNK, CHUNK + 1])
def test_every_entry_is_drawn(size):
    out = draw(size)
    assert torch.all(torch.isfinite(out))
    assert len(torch.unique(out)) >= size * 0.99


@pytest.mark.parametrize(
    "change", [{"step": 1}, {"group": 1}, {"seed": 0}, {"seed": 1 + (1 << 64)}]
)
def test_everything_that_names_a_row_changes_it(change):
    a, b = draw(10_000).double(), draw(10_000, **change).double()
    assert abs((a * b).mean()) < 6 / np.sqrt(10_000)


def test_chunks_differ():
    out = draw(2 * CHUNK).double()
    assert abs((out[:CHUNK] * out[CHUNK:]).mean()) < 6 / np.sqrt(CHUNK)


@pytest.mark.parametrize("size", [CHUNK // 3, 2 * CHUNK + 1001, 9 * CHUNK + 7])
def test_the_number_of_threads_changes_nothing(size):
    """Torch divides the work on a chunk among threads, a pool the chunks of long rows."""
    before = torch.get_num_threads()
    try:
        rows = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows.append(draw(size))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_small_uniforms_reach_the_tail_and_stay_finite():
    # The extreme words: radius at its largest (word 0) and smallest (all ones), angle at ±π.
    words = np.array([0, 2**32 - 1, 0, 2**31], dtype=np.uint32)
    out = torch.empty(4)
    _box_muller(words.view(np.uint64), out)
    largest = np.sqrt(2 * 33 * np.log(2))
    np.testing.assert_allclose(out, [largest, 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize(("size", "chunk"), [(7, 0), (10, 0), (CHUNK + 5, 1)])
def test_against_a_slow_reference(size, chunk):
    # Block by block through AES itself, the transform in float64.
    numbers = b"".join(number.to_bytes(16, "little") for number in (2, 3))
    key = hashlib.blake2b(
        numbers, key=(1 << 90).to_bytes(16, "little"), digest_size=32, person=b"dptrain.noise"
    ).digest()
    length = min(CHUNK, size - chunk * CHUNK)
    half = (length + 1) // 2
    aes = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    first = (chunk << 32) + 2
    blocks = (half + 1) // 2
    stream = b"".join(aes.update((first + i).to_bytes(16, "big")) for i in range(blocks))
    words = np.frombuffer(stream[: 8 * half], dtype="<u4")
    radius = np.sqrt(-2 * np.log(words[:half] * 2.0**-32 + 2.0**-33))
    angle = np.pi * words[half:].astype(np.int32) * 2.0**-31
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:length]
    drawn = draw(size, seed=1 << 90, group=2, step=3).numpy()[chunk * CHUNK :][:length]
    np.testing.assert_allclose(drawn, expected, atol=3e-6)


def test_refuses_other_devices():
    with pytest.raises(ValueError, match="device=meta"):
        fill_normal(torch.empty(3, device="meta"), seed=0, group=0, step=0)


SIZE = 2 * CHUNK + 1001


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, 0),
        (0, SIZE),
        (0, 5),
        (CHUNK // 2 - 3, CHUNK // 2 + 3),
        (CHUNK - 1, CHUNK + 1),
        (CHUNK, 2 * CHUNK),
        (17, 2 * CHUNK + 18),
        (2 * CHUNK + 500, SIZE),
        (SIZE, SIZE),
    ],
)
def test_a_slice_equals_the_same_entries_of_the_whole_row(start, stop):
    whole, part = draw(SIZE, seed=3, group=1, step=2), torch.full((stop - start,), torch.nan)
    fill_normal(part, seed=3, group=1, step=2, start=start, size=SIZE)
    assert torch.equal(part, whole[start:stop])


@pytest.mark.parametrize(("start", "size"), [(-1, 9), (8, 9), (0, 1)])
def test_refuses_a_slice_that_leaves_the_row(start, size):
    with pytest.raises(ValueError, match=f"start={start}.*size={size}"):
        fill_normal(torch.empty(2), seed=0, group=0, step=0, start=start, size=size)
