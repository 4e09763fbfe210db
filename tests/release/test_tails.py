"""Tails: a number that cannot be noise says for sure that there is something else in it."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.stats import binom, norm

from dptrain.noise.generators.rounded import WORDS, rounded_normals
from tests.oracles.float_noise import EDGE, box_muller

PAIRS = 1 << 15
BITS = 40
RARE = 1e-9


def edge_draws(rng: np.random.Generator) -> torch.Tensor:
    """Numbers of the reference whose radius word is 0, its rarest: one in 2^32 has it."""
    angles = rng.integers(0, 1 << 32, PAIRS, dtype=np.uint32)
    return box_muller(np.zeros(PAIRS, np.uint32), angles)


def test_a_number_beyond_the_edge_names_an_example_in_floating_point():
    """An example that moves every number by s: how often one goes where no noise goes is known.

    Given the radius word it is arccos(1 - s/r) / π. So whatever ε is, δ of d such numbers is at
    least 1 - (1 - 2^-32 arccos(1 - s/r)/π)^d.
    """
    rng, s = np.random.default_rng(5), 0.01
    drawn = edge_draws(rng).double()
    # The last bits of the reference's logarithm, of its root and of its cosine.
    beyond = EDGE * (1 + 4 * 2.0**-24)
    assert not (drawn > beyond).any()
    chance = beyond_edge(s)
    low, high = binom.ppf([RARE, 1 - RARE], 2 * PAIRS, chance)
    assert 500 < low <= int((drawn + s > beyond).sum()) <= high
    # Of a gradient as long as the noise's deviation, in a million numbers and in more.
    floors = [
        -math.expm1(d * math.log1p(-(2.0**-32) * beyond_edge(1 / math.sqrt(d)))) for d in (1e6, 1e8)
    ]
    assert floors[0] > 1e-6
    assert floors[1] > 3e-5


def beyond_edge(s: float) -> float:
    """How often a number of radius ``EDGE`` and s more is beyond it."""
    return math.acos(1 - s / EDGE) / math.pi


def rare_words(rng: np.random.Generator) -> np.ndarray:
    """Words whose radius is among the largest 2^-32, as those of ``edge_draws`` are."""
    words = rng.integers(-(1 << 63), (1 << 63) - 1, (WORDS, PAIRS), dtype=np.int64, endpoint=True)
    words[0] = rng.integers(0, 1 << 32, PAIRS, dtype=np.int64) << 1
    return words.reshape(-1)


def test_noise_on_the_grid_goes_beyond_that_edge_as_often_as_it_should():
    """Of numbers with radii among the largest 2^-32 as large a share as a normal has: exactly.

    The dither is less than 2^-6, which moves the edge by as much at most.
    """
    out = np.empty(2 * PAIRS)
    rounded_normals(rare_words(np.random.default_rng(6)), out, bits=BITS, scale=1.0)
    z = np.abs(out) * 2.0**-BITS
    for edge in (EDGE, 7.0, 7.4):
        hits = int((z > edge).sum())
        few, many = (2.0**33 * norm.sf(edge + shift) for shift in (2.0**-6, -(2.0**-6)))
        assert binom.ppf(RARE, 2 * PAIRS, few) <= hits <= binom.ppf(1 - RARE, 2 * PAIRS, many)
        assert hits > 10


def test_the_new_edge_is_far_out():
    """All radius bits zero: |z| of 13.2, which a normal exceeds with a chance of 1e-39."""
    words = np.zeros((WORDS, 1), dtype=np.int64)
    out = np.empty(2)
    rounded_normals(words.reshape(-1), out, bits=BITS, scale=1.0)
    assert 13.0 < np.abs(out).max() * 2.0**-BITS < 13.3
