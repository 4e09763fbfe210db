"""Noise of tree strategies: the contract, with W Z for C^-1 Z, and no drift."""

import numpy as np
import pytest
import torch

from dptrain.noise.generators.gaussian import fill_normal
from dptrain.noise.streams.tree import TreeStream
from dptrain.strategies.trees.tree import Tree, TreeRestart
from dptrain.testing import NoiseStreamContract
from tests.oracles import strategy_trees as oracle

SEED = 0xFEDC_BA98_7654_3210_0123_4567_89AB_CDEF


class _TreeNoiseContract(NoiseStreamContract):
    """W is that of least squares, not the strategy's own."""

    samples = 60_000
    regenerates = False  # z of a whole subtree would have to be drawn again

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


def node_noise(rows, size):
    z = torch.empty(rows, size)
    for row in range(rows):
        fill_normal(z[row], seed=SEED, group=0, step=row)
    return z.double().numpy()


@pytest.mark.slow
@pytest.mark.sample(every=2)
@pytest.mark.parametrize("strategy", [Tree(), TreeRestart(height=3)], ids=["one tree", "restarts"])
def test_ten_thousand_float32_steps_do_not_drift(strategy):
    steps, size = 10_000, 16
    bound = strategy.bind(steps)
    stream = open_stream(strategy, steps, size)
    noise = np.array([next(stream)[0].double().numpy() for _ in range(steps)])
    expected = bound.solve(node_noise(bound.rows(steps), size))
    np.testing.assert_allclose(noise, expected, atol=2e-6, rtol=0)
    # A row and the sum of what it takes over, entries of about 2, are off by less than 10^-7 in
    # standard deviation. Independent errors add up as a walk, 6·sqrt(10^4)·10^-7 after all steps;
    # systematic ones of that size would come to 10^-3.
    drift = np.abs(np.cumsum(noise - expected, axis=0))
    assert drift.max() < 6e-5


def test_error_of_prefix_sums_has_the_stated_size():
    steps, size = 45, 40_000
    for strategy in (Tree(), TreeRestart(height=4)):
        stream = open_stream(strategy, steps, size)
        noise = [next(stream)[0].double().numpy() for _ in range(steps)]
        sums = np.cumsum(noise, axis=0)
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
    bound = Tree().bind(steps)
    stream = open_stream(Tree(), steps, size)
    noise = np.array([next(stream)[0].double().numpy() for _ in range(steps)])
    expected = bound.solve(node_noise(bound.rows(steps), size))
    np.testing.assert_allclose(noise, expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize(("strategy", "height"), [(Tree(), 6), (TreeRestart(height=3), 3)])
def test_bfloat16_errors_in_prefix_sums_are_those_of_the_estimates_taken_over(strategy, height):
    steps, size = 45, 10_000
    bound = strategy.bind(steps)
    like, noise = [torch.zeros(size)], {}
    for dtype in (torch.float32, torch.bfloat16):
        stream = TreeStream(strategy, steps=steps, like=like, seed=SEED, dtype=dtype)
        noise[dtype] = np.array([next(stream)[0].double().numpy() for _ in range(steps)])
    error = np.cumsum(noise[torch.bfloat16] - noise[torch.float32], axis=0)
    # Every rounding error r of a left child is in later prefix sums with a weight of at most 1,
    # |r| ≤ 2^-7 |e|, and e is the best estimate of that child: a prefix sum in a tree of its own.
    z = node_noise(bound.rows(steps), size)
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
        assert np.all(np.abs(error[t]) <= 1.05 * largest + 1e-5)
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
