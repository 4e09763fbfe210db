"""Noise of tree strategies: the contract, with W Z for C^-1 Z in law, and no drift."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from dptrain.noise.generators import Normals
from dptrain.noise.streams.tree import TreeStream
from dptrain.strategies.trees.tree import Tree, TreeRestart
from dptrain.testing import NoiseStreamContract
from dptrain.testing.noise_checks import units
from tests.oracles import strategy_trees as oracle

SEED = 0xFEDC_BA98_7654_3210_0123_4567_89AB_CDEF


class _TreeNoiseContract(NoiseStreamContract):
    """W is that of least squares, not the strategy's own."""

    samples = 60_000
    regenerates = False  # normals of a whole subtree would have to be drawn again

    def left_inverse(self):
        return oracle.left_inverse(self.steps)


class TestTreeNoise(_TreeNoiseContract):
    def make_strategy(self):
        return Tree()

    def foreign_strategy(self):
        return TreeRestart(height=4)


class TestTreeNoiseOfWholeTree(_TreeNoiseContract):
    """The last step completes the root."""

    steps = 16

    def make_strategy(self):
        return Tree()

    def foreign_strategy(self):
        return TreeRestart(height=5)


class TestTreeRestartNoise(_TreeNoiseContract):
    def left_inverse(self):
        return oracle.restart_left_inverse(self.steps, 3)

    def make_strategy(self):
        return TreeRestart(height=3)

    def foreign_strategy(self):
        return TreeRestart(height=4)


class TestLeavesNoise(_TreeNoiseContract):
    samples = 30_000

    def left_inverse(self):
        return np.eye(self.steps)

    def make_strategy(self):
        return TreeRestart(height=1)

    def foreign_strategy(self):
        return TreeRestart(height=2)


def open_stream(strategy, steps, size, seed=SEED):
    return TreeStream(strategy, steps=steps, like=[torch.zeros(size)], seed=seed)


def normals(stream, size):
    """Z as the stream draws it, whole numbers: (rows, units of each row)."""
    rows, of_row = [], []
    for step in range(stream.steps):
        stream.step = step
        stream._start_step()
        row = torch.empty(size, dtype=torch.float64)
        place = {"group": 0, "step": step}
        Normals(SEED).fill(row, **place, bits=stream._bits, scale=stream._scale)
        rows.append(row.numpy())
        of_row.append(2.0**-stream._bits / stream._scale)
    stream.step = 0
    return np.array(rows), np.array(of_row)


def node_noise(strategy, steps, size):
    """Numbers of the nodes by which W gives the noise of the stream.

    The nodes of a row are new there, and only the sum counts that W makes of them: b·z, of the
    deviation ‖b‖. A row has one normal in their place; b/‖b‖ of it for each node makes that sum.
    """
    bound = strategy.bind(steps)
    stream = open_stream(strategy, steps, 1)
    whole, of_row = normals(stream, size)
    ends = np.array([b for _, b in restart_nodes(steps, stream._height)])
    z, weights = np.empty((len(ends), size)), {}
    for t in range(steps):
        new = np.flatnonzero(ends == t + 1)
        if len(new) not in weights:
            impulses = np.zeros((len(ends), len(new)))
            impulses[new, range(len(new))] = 1.0
            weights[len(new)] = bound.solve(impulses)[t]
        b = weights[len(new)]
        z[new] = np.outer(b / np.linalg.norm(b), whole[t] * of_row[t])
    return z


def run(stream):
    return np.array([units(next(stream)[0], stream).copy() for _ in range(stream.steps)])


def estimate_errors(top, unit):
    """By level, how far rounding moves the estimate of a node at most.

    An estimate is Σ_l a_l p_l + s z, rounded by half a unit, with a_l ≤ 2^-(k-l).
    """
    errors = []
    for level in range(top + 1):
        errors.append(0.5 * unit + sum(2.0 ** (m - level) * errors[m] for m in range(level)))
    return np.array(errors) * (1 + 1e-6)  # what float64 and the finer grid of z leave


@pytest.mark.slow
@pytest.mark.sample(every=2)
@pytest.mark.parametrize("strategy", [Tree(), TreeRestart(height=3)], ids=["one tree", "restarts"])
def test_ten_thousand_steps_do_not_drift(strategy):
    steps, size = 10_000, 16
    bound = strategy.bind(steps)
    stream = open_stream(strategy, steps, size)
    noise = run(stream)
    errors = estimate_errors(stream._height - 1, 2.0**-stream.grid_bits)
    expected = bound.solve(node_noise(strategy, steps, size))
    # The estimate of a prefix is the sum of those of its maximal nodes, one a level: what is taken
    # over goes again as it came. Of trees that are complete the errors stay, as those of a walk
    # that is nobody's estimate any more.
    assert np.abs(noise - expected).max() <= errors.sum() + 1e-11
    drift = np.abs(np.cumsum(noise - expected, axis=0))
    roots = np.arange(1, steps + 1) // 2 ** (stream._height - 1)
    assert np.all(drift <= (errors.sum() + roots * errors[-1] + 1e-9)[:, None])


@pytest.mark.parametrize(("strategy", "height"), [(Tree(), 6), (TreeRestart(height=3), 3)])
def test_rounding_stays_within_its_bound_in_exact_arithmetic(strategy, height):
    """Estimates, by differences of prefix sums, against inverse-variance weighting by fractions."""
    steps, size = 45, 40
    stream = open_stream(strategy, steps, size)
    z, _ = normals(stream, size)
    limit = Fraction(stream.rounding_error)
    rows = [[int(y) for y in next(stream)[0]] for _ in range(steps)]
    sums = np.vstack([np.zeros(size, dtype=object), np.cumsum(np.array(rows, object), axis=0)])
    shares = [Fraction(1)]  # v_l: own number, of variance 1, beside the sum of two of v_{l-1}
    for _ in range(height):
        shares.append(2 * shares[-1] / (2 * shares[-1] + 1))
    unit, finer = Fraction(1, 1 << stream.grid_bits), Fraction(1, 1 << stream._bits)
    for t in range(steps):
        top = next(k for k in reversed(range(height)) if (t + 1) % 2**k == 0)
        parts = [Fraction(0)] * size
        variance = shares[0] ** 2 * math.prod((1 - v) ** 2 for v in shares[1 : top + 1])
        for level in range(top):
            left = math.prod(1 - v for v in shares[level + 1 : top + 1])
            end = t + 1 - 2**level
            taken = sums[end] - sums[end - 2**level]
            parts = [a + left * b * unit for a, b in zip(parts, taken, strict=True)]
            rest = math.prod(1 - v for v in shares[level + 2 : top + 1])
            variance += (rest * shares[level + 1]) ** 2
        new = sums[t + 1] - sums[t + 1 - 2**top]
        scale = math.sqrt(variance)
        for found, past, drawn in zip(new, parts, z[t], strict=True):
            apart = abs(found * unit - past - int(drawn) * finer)
            assert apart <= unit / 2 + limit * Fraction(scale)


def test_error_of_prefix_sums_has_the_stated_size():
    steps, size = 45, 40_000
    for strategy in (Tree(), TreeRestart(height=4)):
        sums = np.cumsum(run(open_stream(strategy, steps, size)), axis=0)
        ratio = sums.var(axis=1) / strategy.bind(steps).errors(steps) ** 2
        assert np.abs(ratio - 1).max() < 6 * np.sqrt(2 / size)


def test_buffers_grow_with_the_logarithm_of_the_steps():
    for strategy, steps, rows in [
        (Tree(), 1, 0),
        (Tree(), 1000, 9),
        (Tree(), 1 << 20, 20),
        (TreeRestart(height=5), 1000, 4),
        (TreeRestart(height=1), 1000, 0),
    ]:
        assert open_stream(strategy, steps, 7).buffer_bytes == rows * 7 * 4


def test_a_row_longer_than_a_chunk_equals_its_nodes():
    # Blocks, chunks and threads leave no seam; the tail of a chunk is drawn like the whole row.
    steps, size = 6, 300_001
    stream = open_stream(Tree(), steps, size)
    noise = run(stream)
    expected = Tree().bind(steps).solve(node_noise(Tree(), steps, size))
    errors = estimate_errors(2, 2.0**-stream.grid_bits)
    np.testing.assert_allclose(noise, expected, atol=errors.sum(), rtol=0)


@pytest.mark.parametrize(("strategy", "height"), [(Tree(), 6), (TreeRestart(height=3), 3)])
def test_bfloat16_errors_in_prefix_sums_are_those_of_the_estimates_taken_over(strategy, height):
    steps, size = 45, 10_000
    like, noise = [torch.zeros(size)], {}
    for dtype in (torch.float32, torch.bfloat16):
        stream = TreeStream(strategy, steps=steps, like=like, seed=SEED, dtype=dtype)
        noise[dtype] = run(stream)
    error = np.cumsum(noise[torch.bfloat16] - noise[torch.float32], axis=0)
    # Every rounding error r of a left child is in later prefix sums with a weight of at most 1,
    # |r| ≤ 2^-7 |e|, and e is the best estimate of that child: a prefix sum in a tree of its own.
    z = node_noise(strategy, steps, size)
    largest, count = np.zeros(size), 0
    for t in range(steps):
        level = 1
        while level < height and (t + 1) % 2**level == 0:
            first, half = t + 1 - 2**level, 2 ** (level - 1)
            columns = [row for row, (a, b) in enumerate(restart_nodes(steps, height))
                       if first <= a and b <= first + half]  # fmt: skip
            best = oracle.left_inverse(half).sum(axis=0)
            largest += 2.0**-7 * np.abs(best @ z[columns])
            count += 1
            level += 1
        assert np.all(np.abs(error[t]) <= 1.05 * largest + 1e-7)
        deviation = 2.0**-8 * np.sqrt(count)
        assert np.sqrt(np.mean(error[t] ** 2)) <= deviation + 1e-7
    assert error[-1].std() > 2.0**-11


def restart_nodes(steps, height):
    return [(a, b) for a, b in oracle.nodes(steps) if b - a < 2**height]


def test_notes_tell_of_bfloat16_and_its_growth_with_the_tree():
    like = [torch.zeros(4)]
    for strategy, steps, deviation in [
        (Tree(), 1 << 14, "0.5"),
        (TreeRestart(height=5), 99, "0.016"),
    ]:
        stream = TreeStream(strategy, steps=steps, like=like, seed=SEED, dtype=torch.bfloat16)
        (note,) = stream.notes
        assert "bfloat16" in note
        assert f"{deviation} of" in note
        assert open_stream(strategy, steps, 4).notes == ()


def test_refuses_a_restart_taller_than_the_run():
    with pytest.raises(ValueError, match="height=5"):
        open_stream(TreeRestart(height=5), 15, 4)
