"""The arithmetic of rounded normals: one bit pattern everywhere, and near the exact numbers."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch

from dptrain.noise.generators import rounded
from dptrain.noise.generators.compiled import can_compile, compiled
from dptrain.noise.generators.rounded import (
    DITHER,
    FINEST,
    WORDS,
    rounded_normals,
    rounded_normals_of_tensors,
)
from dptrain.noise.streams.grid import finest_bits

SPARE = 26  # low bits of the last two words that continue the uniform number of the radius
ONES = -1  # all bits, as int64
EXTREME = [0, ONES, 1, 2, 3, -(1 << 63), (1 << 63) - 1, 1 << 62, (1 << 62) - 1, 4095, 1 << 11]


def random_words(pairs, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(-(1 << 63), 1 << 63, WORDS * pairs, dtype=np.int64)


def extreme_words():
    """All extremes of the radius with all of the angle, and of the lower words."""
    each = [
        *itertools.product(EXTREME, EXTREME, [0], [0]),
        *itertools.product([0, 1, ONES], [0, ONES], EXTREME, EXTREME),
        # Near u = 1/2 and the border of the logarithm's mantissas, sqrt(1/2).
        *((w << 1 | low, 0, ONES, 0) for low in (0, 1) for w in (1 << 62, (1 << 63) - 1)),
        *((round(half * 2**64) << 1 | 1, 3, 5, 7) for half in (1 - math.sqrt(0.5), 2**-30)),
    ]
    signed = np.array([[(w + (1 << 63)) % (1 << 64) - (1 << 63) for w in row] for row in each])
    return signed.astype(np.int64).T.reshape(-1).copy()


def by_definition(words):
    """√(-2 ln u)·(cos α, sin α) by 60 digits, for the words of each pair: shape (pairs, 2)."""
    found = []
    with mpmath.workdps(60):
        for w, x, y, z in words.reshape(WORDS, -1).T.tolist():
            low = ((y % (1 << SPARE)) << SPARE | z % (1 << SPARE)) << 9 | (x >> 2) % (1 << 9)
            # 63 bits of w and 61 lower ones; the last bit of w tells from which end.
            half = mpmath.ldexp((w % (1 << 64)) >> 1, -64) + mpmath.ldexp(2 * low + 1, -126)
            u = 1 - half if w & 1 else half
            angle = mpmath.pi / 4 * mpmath.ldexp(2 * (x >> 11) + 1, -53)
            cosine, sine = mpmath.cos(angle), mpmath.sin(angle)
            cosine = -cosine if x & 1 else cosine
            pair = (sine, cosine) if x >> 1 & 1 else (cosine, sine)
            radius = mpmath.sqrt(-2 * mpmath.log(u))
            found.append([radius * each for each in pair])
    return found


def plain(words, size, bits=FINEST, scale=1.0):
    out = np.full(size, np.nan)
    shift = rounded._shift(bits, scale)
    rounded._plain(words, out, len(words) // WORDS, scale * 2.0**bits, shift)
    return out


needs_numba = pytest.mark.skipif(not can_compile(), reason="numba is not installed")


@needs_numba
@pytest.mark.parametrize("pairs", [1, 2, 1023, 1024, 1025, 1 << 15])
@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize(("bits", "scale"), [(FINEST, 1.0), (30, 0.37), (40, 5.2)])
def test_compiled_loops_give_the_bits_of_numpy(pairs, missing, bits, scale):
    words = random_words(pairs, seed=pairs)
    extremes = extreme_words().reshape(WORDS, -1)[:, : pairs // 2]
    words.reshape(WORDS, -1)[:, : extremes.shape[1]] = extremes
    expected = plain(words, 2 * pairs - missing, bits, scale)
    out = np.full(2 * pairs - missing, np.nan)
    compiled(rounded._loops, rounded._SIGNATURES)(
        words, out, pairs, scale * 2.0**bits, rounded._shift(bits, scale)
    )
    assert np.array_equal(out, expected)
    assert np.array_equal(out, np.rint(out))
    chosen = np.full_like(out, np.nan)
    rounded_normals(words, chosen, bits=bits, scale=scale)
    assert np.array_equal(chosen, expected)


@needs_numba
def test_uncompiled_loops_are_the_loops_that_are_compiled():
    """So that what numba makes of them is what is written there."""
    words = np.concatenate([extreme_words().reshape(WORDS, -1), random_words(40).reshape(4, -1)], 1)
    words = np.ascontiguousarray(words).reshape(-1)
    pairs = len(words) // WORDS
    out = np.full(2 * pairs, np.nan)
    rounded._loops(words, out, pairs, 2.0**FINEST, rounded._shift(FINEST, 1.0))
    assert np.array_equal(out, plain(words, 2 * pairs))


def with_finer_grid(words, fill):
    """z before its dither, on a grid of 2^-47: (pairs, 2)."""
    pairs = len(words) // WORDS
    shift = rounded._shift(FINEST, 1.0)
    out = np.empty(2 * pairs)
    fill(words, out, pairs, shift)
    dithers = words[2 * pairs :] >> shift
    return (out - dithers).reshape(2, -1).T


def assert_near_the_exact_numbers(words, found):
    """Within 2^-46 of them, beside the half unit of 2^-47 by which ``found`` is rounded."""
    for row, exact in zip(found, by_definition(words), strict=True):
        for number, number_exactly in zip(row, exact, strict=True):
            assert abs(mpmath.ldexp(mpmath.mpf(number), -47) - number_exactly) <= 2**-46 + 2**-48


@pytest.mark.parametrize("words", [extreme_words(), random_words(3000)], ids=["extreme", "random"])
def test_a_number_is_within_its_error_of_the_exact_one(words):
    def fill(words, out, pairs, shift):
        rounded._plain(words, out, pairs, 2.0**47, shift)

    assert_near_the_exact_numbers(words, with_finer_grid(words, fill))


@pytest.mark.parametrize("words", [extreme_words(), random_words(3000)], ids=["extreme", "random"])
def test_torch_is_within_the_error_too(words, monkeypatch):
    """The functions of a device: here those of the CPU. To double, not to the bit of the loops."""
    shift = rounded._shift(FINEST, 1.0)
    monkeypatch.setattr(rounded, "_shift", lambda bits, scale: shift)

    def fill(words, out, pairs, shift):
        rounded_normals_of_tensors(torch.from_numpy(words), torch.from_numpy(out), bits=47, scale=1)

    assert_near_the_exact_numbers(words, with_finer_grid(words, fill))


@pytest.mark.parametrize("size", [1, 2, 7, 2001])
def test_torch_draws_the_numbers_of_numpy_up_to_a_unit(size):
    words = random_words(-(-size // 2), seed=size)
    out = torch.full((size,), torch.nan, dtype=torch.float64)
    rounded_normals_of_tensors(torch.from_numpy(words), out, bits=FINEST, scale=0.8)
    # Each is within 2^-46 of the exact number, and then rounded to 2^-43.
    assert np.abs(out.numpy() - plain(words, size, FINEST, 0.8)).max() <= 1


def test_the_extreme_words_reach_far_into_the_tail_and_stay_finite():
    out = plain(extreme_words(), 2 * (len(extreme_words()) // WORDS)) * 2.0**-FINEST
    assert np.all(np.isfinite(out))
    # u at its smallest, 2^-126: √(2·126 ln 2).
    furthest = math.sqrt(2 * 126 * math.log(2))
    assert furthest > 13
    assert out.max() == pytest.approx(furthest, abs=2.0**-DITHER)
    words = np.array([0, 0, 0, 0], dtype=np.int64)
    assert plain(words, 2)[0] * 2.0**-FINEST == pytest.approx(furthest, rel=2.0**-46)
    words = np.array([ONES, 0, 0, 0], dtype=np.int64)  # the last bit of w: u near 1/2 from above
    assert plain(words, 2)[0] * 2.0**-FINEST == pytest.approx(math.sqrt(2 * math.log(2)))
    words = np.array([1, 0, 0, 0], dtype=np.int64)  # u nearest to 1
    assert abs(plain(words, 2)[0]) * 2.0**-FINEST < 2.0**-57


@pytest.mark.parametrize("bits", [20, 27, 38, 42, FINEST])
@pytest.mark.parametrize("scale", [2.0**-9, 0.4, 0.5, 0.999, 1.0, 1.5, 1.999999])
def test_dither_and_spare_bits_do_not_overlap(bits, scale):
    shift = rounded._shift(bits, scale)
    assert SPARE <= shift < 64
    width = 2.0 ** (64 - shift)  # of the numbers that a shifted word takes
    assert 2.0 ** -(DITHER + 1) <= width / (scale * 2.0**bits) <= 2.0**-DITHER


@pytest.mark.parametrize(("bits", "scale"), [(FINEST + 1, 1.0), (FINEST, 2.0), (5, 1.0), (40, 33)])
def test_a_grid_on_which_they_would_is_refused(bits, scale):
    with pytest.raises(ValueError, match=f"bits={bits}"):
        rounded._shift(bits, scale)


@pytest.mark.parametrize("deviation", [1e-6, 0.3, 1.0, 1.01, 1.99, 2.0, 3.0, 4.0, 100.0])
def test_the_finest_grid_leaves_room_for_the_largest_noise(deviation):
    """Of whatever deviation: the numbers are held to the bit, and drawn with a dither."""
    bits = finest_bits(deviation)
    assert 13 * deviation * 2.0**bits < 2**51
    rounded._shift(bits, deviation)
    rounded._shift(bits, deviation * (1 + 1e-9))
    assert deviation * 2.0**bits > 2 ** (FINEST - 1)


@pytest.mark.parametrize("number", [2, 3])
def test_every_bit_of_a_lower_word_has_one_use(number):
    """Flipping a dither bit moves the number by whole units; a spare bit by far less than one."""
    words = np.array([1 << 60, 5 << 20, 1 << 61, 1 << 61], dtype=np.int64)
    shift = rounded._shift(FINEST, 1.0)
    base = plain(words, 2)
    for bit in range(64):
        other = words.copy()
        other[number] ^= np.int64(-(1 << 63) if bit == 63 else 1 << bit)
        moved = plain(other, 2) - base
        mine, its = moved[number - 2], moved[3 - number]
        if bit >= shift:
            assert abs(mine) == 2.0 ** (bit - shift)
            assert its == 0
        else:
            assert max(abs(mine), abs(its)) <= 1
