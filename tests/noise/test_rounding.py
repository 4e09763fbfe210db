"""A release on a grid: what its theorem says, in exact arithmetic (docs/theory/noise.md, 15.4)."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from dptrain.noise import Rounding, noise_stream
from dptrain.strategies import BISR, BLT, BSR, Identity, SquareRoot, TreeRestart

STEPS, SIZE = 9, 4_000


class Given:
    """Whole numbers that a test names, in the place of drawn ones."""

    name, seed = "given by a test", 0

    def __init__(self, rows):
        self.rows = rows

    def fill(self, out, *, group, step, start=0, size=None, bits, scale=1.0):
        out.copy_(torch.from_numpy(self.rows[step][start : start + len(out)]))


def drawn(stream, seed=1):
    """Whole numbers of the standard deviation that the stream's normals have."""
    generator = np.random.default_rng(seed)
    return np.rint(generator.normal(size=(STEPS, SIZE)) * 2.0**stream._bits)


def rows_of(strategy, whole):
    """The noise of a stream that is given the numbers of the finer grid."""
    stream = noise_stream(strategy, steps=STEPS, like=[torch.zeros(SIZE)], seed=1)
    stream.normals = Given(whole(stream))
    return stream, np.array([next(stream)[0].numpy() for _ in range(STEPS)])


@pytest.mark.parametrize("bands", [1, 2, 4])
def test_a_release_is_a_function_of_the_matrix_mechanisms(bands):
    """r = k + n depends on k and z through C k + z alone: bit for bit, as BSR's are dyadic."""
    strategy = BSR(bands=bands)
    generator = np.random.default_rng(2)
    k = generator.integers(-(2**20), 2**20, size=(STEPS, SIZE))
    k[2:5] = generator.integers(-3, 4, size=(3, SIZE))  # odd and even, small
    stream, noise = rows_of(strategy, drawn)
    finer = 2.0 ** (stream._bits - stream.grid_bits)
    moved = strategy.bind(STEPS).apply(k.astype(float)) * finer
    assert np.array_equal(moved, np.rint(moved))  # the oracle is exact
    _, other = rows_of(strategy, lambda stream: drawn(stream) + moved)
    assert np.array_equal(k + noise, other)


def test_halves_do_not_tell_the_parity_of_a_sum():
    """Numbers that are exactly between two of the grid: rounding to even would part k and k + 1."""
    strategy = BSR(bands=2)
    probe = noise_stream(strategy, steps=STEPS, like=[torch.zeros(SIZE)], seed=1)
    finer = 2.0 ** (probe._bits - probe.grid_bits)
    assert finer >= 2
    halves = (np.arange(SIZE) - SIZE // 2 + 0.5) * finer
    k = np.zeros((STEPS, SIZE), dtype=np.int64)
    k[0] = 1

    def given(stream):
        rows = np.zeros((STEPS, SIZE))
        rows[0] = halves
        return rows

    _, noise = rows_of(strategy, given)
    moved = strategy.bind(STEPS).apply(k.astype(float)) * finer
    _, other = rows_of(strategy, lambda stream: given(stream) + moved)
    assert np.array_equal(k + noise, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sums", ["at halves", "random", "large"])
def test_neighboring_sums_stay_neighbors_on_the_grid(dtype, sums):
    """‖k - k'‖ h ≤ R for sums that differ by R (1 - pad), at a grid coarse enough to see it."""
    bits, sigma, size = 12, 3.0, 900
    rounding = Rounding(
        grid_bits=bits, entries=size, steps=1, noise_multiplier=sigma, examples=1000, error=0.0
    )
    pad = rounding.pad
    assert math.isclose(pad, 30 * 3 * 2.0**-12, rel_tol=1e-9)
    h = sigma * 2.0**-bits
    generator = np.random.default_rng(3)
    clipped = generator.normal(size=size)
    clipped *= (1 - pad) / np.linalg.norm(clipped)
    if sums == "at halves":  # one world just below a half, the other at or above it
        base = (np.floor(generator.normal(size=size) * 50) + 0.5) * h - 1e-9
        steps = np.full(size, (1 - pad) / math.sqrt(size))
        clipped = np.ceil(steps / h - 1) * h + 2e-9
        assert np.linalg.norm(clipped) <= 1 - pad
    else:
        base = generator.normal(size=size) * (1.0 if sums == "random" else 30.0)
    worlds = [torch.from_numpy(each).to(dtype) for each in (base, base + clipped)]
    # What float32 rounds in the sums themselves is not the grid's.
    differ = float((worlds[1].double() - worlds[0].double()).norm())
    released = []
    for world in worlds:
        stream = noise_stream(Identity(), steps=1, like=[world], seed=1)
        stream.grid_bits = bits
        stream._bits = bits
        stream.normals = Given(np.zeros((1, size)))
        (total,) = stream.release([world.clone()], sigma)
        released.append(np.rint(total.double().numpy() / h))
    moved = np.linalg.norm(released[1] - released[0]) * h
    assert moved <= differ + math.sqrt(size) * h
    assert moved <= 1.0 + max(0.0, differ - (1 - pad))


def test_a_pad_of_half_the_bound_is_refused():
    rounding = Rounding(
        grid_bits=10, entries=10**6, steps=1, noise_multiplier=1.0, examples=10, error=0.0
    )
    with pytest.raises(ValueError, match=r"noise_multiplier=1 with 1,000,000 parameters"):
        _ = rounding.pad


def hockey_stick(p, q, epsilon):
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


def test_a_change_of_measure_costs_no_more_than_the_lemma_says():
    """Two laws for two data sets, each changed by itself: exact δ of the changed ones."""
    generator = np.random.default_rng(4)
    worst = 0.0
    for _ in range(400):
        size = int(generator.integers(2, 40))
        q = generator.dirichlet(np.full(size, 0.5), size=2)
        change = generator.normal(size=(2, size)) * generator.choice([0.01, 0.1, 0.5])
        p = q * np.exp(change)
        p /= p.sum(axis=1, keepdims=True)
        log = np.log(p / q)
        epsilon = float(generator.uniform(0, 1.5))
        delta = hockey_stick(q[0], q[1], epsilon)
        for a in (0.005, 0.05, 0.2, 1.0):
            tail = max(p[0][log[0] > a].sum(), q[1][log[1] < -a].sum())
            bound = math.exp(a) * delta + tail * (1 + math.exp(epsilon + a))
            found = hockey_stick(p[0], p[1], epsilon + 2 * a)
            assert found <= bound + 1e-12
            worst = max(worst, found / max(bound, 1e-12) if bound > 1e-9 else 0.0)
    assert worst > 0.5  # the cases come near the bound, so that they could break it


STRATEGIES = {
    "ring": BSR(bands=4),
    "convolution": BISR(inverse_bands=4),
    "full convolution": SquareRoot(),
    "BLT": BLT(buffers=2, theta=(0.97, 0.5), omega=(0.1, 0.3)),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_rounding_is_within_what_a_stream_says(name):
    """z + P against -Σ_l C_{t,t-l} n_{t-l} of the noise itself, in rational numbers."""
    strategy = STRATEGIES[name].bind(STEPS)
    kept = {}

    def whole(stream):
        kept["z"] = drawn(stream)
        return kept["z"]

    stream, noise = rows_of(strategy, whole)
    finer = Fraction(2) ** (stream._bits - stream.grid_bits)
    c = [Fraction(float(x)) for x in strategy.first_column(STEPS)]
    assert c[0] == 1
    # Of the coarser grid one unit, of which noise is at most half a unit off.
    allowed = Fraction(stream.rounding_error) * 2**stream._bits + (finer / 2 if finer > 1 else 0)
    largest = Fraction(0)
    for entry in range(0, SIZE, SIZE // 25):
        n = [Fraction(int(x)) for x in noise[:, entry]]
        for t in range(STEPS):
            ideal = -sum((c[k] * n[t - k] for k in range(1, min(t, len(c) - 1) + 1)), Fraction(0))
            off = abs(n[t] * finer - Fraction(float(kept["z"][t, entry])) - ideal * finer)
            assert off <= allowed
            largest = max(largest, off)
    assert largest > 0


def test_the_rows_of_a_tree_are_the_pending_nodes():
    """e_k - Σ p_l with e_k = Σ a_l p_l + z in rational numbers, up to half a unit of the grid."""
    strategy = TreeRestart(height=3).bind(STEPS)
    kept = {}

    def whole(stream):
        kept["z"] = drawn(stream)
        return kept["z"]

    stream, noise = rows_of(strategy, whole)
    finer = Fraction(2) ** (stream._bits - stream.grid_bits)
    share = [Fraction(1) / (2 - Fraction(1, 2**level)) for level in range(3)]
    allowed = Fraction(stream.rounding_error) * 2**stream._bits + finer / 2
    for entry in range(0, SIZE, SIZE // 25):
        pending = {}
        for t in range(STEPS):
            place = t % 4  # of four leaves a tree
            top = {0: 0, 1: 1, 2: 0, 3: 2}[place]
            if place == 0:
                pending = {}
            ideal = Fraction(0)
            for level in range(top):
                left = math.prod(
                    (1 - share[m] for m in range(level + 1, top + 1)), start=Fraction(1)
                )
                ideal += left * pending[level]
            taken = sum((pending[level] for level in range(top)), Fraction(0))
            estimate = Fraction(int(noise[t, entry])) + taken
            z = Fraction(float(kept["z"][t, entry]))
            assert abs(estimate * finer - z - ideal * finer) <= allowed
            for level in range(top):
                pending.pop(level)
            pending[top] = estimate
