"""The oracles of strategies against facts known on paper and against each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.oracles import strategy_matrices as matrices
from tests.oracles import strategy_optima as optima
from tests.oracles import strategy_patterns as brute
from tests.oracles import strategy_trees as trees
from tests.oracles import strategy_workloads as workloads


def test_square_root_of_prefix_sums_has_the_known_column() -> None:
    known = [1, 1 / 2, 3 / 8, 5 / 16, 35 / 128, 63 / 256]
    np.testing.assert_allclose(matrices.bsr(6, 6)[:, 0], known, rtol=1e-13)


def test_inverse_square_root_of_prefix_sums_has_the_known_column() -> None:
    noise = matrices.inverse(matrices.bisr(7, 5))
    known = [1, -1 / 2, -1 / 8, -1 / 16, -5 / 128, 0, 0]
    np.testing.assert_allclose(noise[:, 0], known, atol=1e-13)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (1.0, 0.9), (0.99, 0.5), (0.8, 0.8)])
def test_square_root_squares_to_the_workload(alpha: float, beta: float) -> None:
    workload = workloads.momentum_and_decay(9, alpha, beta)
    root = matrices.bsr(9, 9, alpha, beta)
    np.testing.assert_allclose(root @ root, workload, rtol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_constant_heavy_ball_is_the_workload_without_decay(momentum: float) -> None:
    ours = workloads.heavy_ball(8, momentum)
    np.testing.assert_allclose(ours, workloads.momentum_and_decay(8, 1.0, momentum), rtol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_heavy_ball_is_what_sgd_of_torch_does(decay: float) -> None:
    rates = [0.5, 1.0, 2.0, 0.0, 0.25]
    columns = []
    for unit in range(5):
        weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, weight_decay=decay)
        column = []
        for t in range(5):
            optimizer.param_groups[0]["lr"] = rates[t]
            weight.grad = torch.tensor([-1.0 if t == unit else 0.0], dtype=torch.float64)
            optimizer.step()
            column.append(weight.item())
        columns.append(column)
    ours = workloads.heavy_ball(5, 0.9, rates, decay)
    np.testing.assert_allclose(ours, np.array(columns).T, rtol=1e-13)


def test_buffers_give_the_noise_of_the_matrix() -> None:
    theta, omega = [0.9, 0.4, 0.99], [0.2, 0.3, 0.1]
    z = np.random.default_rng(0).standard_normal((9, 2))
    noise = matrices.blt_noise(theta, omega, z)
    np.testing.assert_allclose(matrices.blt(theta, omega, 9) @ noise, z, atol=1e-12)


@pytest.mark.parametrize("steps", range(1, 18))
def test_tree_estimates_are_unbiased_and_best_of_all_that_is_known(steps: int) -> None:
    matrix, noise = trees.matrix(steps), trees.left_inverse(steps)
    assert len(matrix) == 2 * steps - steps.bit_count()
    np.testing.assert_allclose(noise @ matrix, np.eye(steps), atol=1e-10)
    prefixes, best = trees.prefix_weights(steps), trees.available_prefix_weights(steps)
    np.testing.assert_allclose(prefixes, best, atol=1e-10)


def test_a_full_tree_has_the_variance_of_honaker() -> None:
    # A root of height h (2^{h-1} leaves) has variance 1 / (2 - 2^{1-h}) in units of one node's.
    for height in range(1, 6):
        variance = workloads.errors(
            np.eye(2 ** (height - 1)), trees.prefix_weights(2 ** (height - 1))
        )
        assert variance[-1] ** 2 == pytest.approx(1 / (2 - 2.0 ** (1 - height)), rel=1e-12)


def test_restarts_are_trees_one_after_the_other() -> None:
    matrix, noise = trees.restart_matrix(11, 3), trees.restart_left_inverse(11, 3)
    np.testing.assert_allclose(noise @ matrix, np.eye(11), atol=1e-10)
    np.testing.assert_array_equal(matrix[:7, :4], trees.matrix(4))
    np.testing.assert_array_equal(matrix[7:14, 4:8], trees.matrix(4))
    np.testing.assert_array_equal(matrix[14:, 8:], trees.matrix(3))
    gram = matrix.T @ matrix
    assert gram[np.abs(np.subtract.outer(range(11), range(11))) >= 4].max() == 0


def test_patterns_are_all_and_only_the_allowed_ones() -> None:
    found = {tuple(np.flatnonzero(row)) for row in brute.patterns(5, 2, 3)}
    assert found == {(0,), (1,), (2,), (3,), (4,), (0, 3), (0, 4), (1, 4)}
    assert len(brute.patterns(6, 6, 1)) == 2**6 - 1
    assert len(brute.patterns(6, 6, 1, signs=True)) == (3**6 - 1) // 2


def test_vector_contributions_can_beat_signed_ones() -> None:
    # Three unit columns whose Gram matrix has -1/2 everywhere else: vectors at 120° give 9/2.
    gram = np.full((3, 3), -0.5) + 1.5 * np.eye(3)
    matrix = np.linalg.cholesky(gram + 1e-12 * np.eye(3)).T
    assert brute.sensitivity(matrix, 3, 1) == pytest.approx(1.0, abs=1e-6)
    assert brute.signed_sensitivity(matrix, 3, 1) == pytest.approx(2.0, abs=1e-6)
    assert brute.vector_sensitivity(matrix, 3, 1) == pytest.approx(np.sqrt(4.5), abs=1e-6)


def test_optima_are_ordered_as_their_families_are_nested() -> None:
    workload = workloads.prefix_sums(6)
    dense, _ = optima.dense_single(workload)
    convex, gram = optima.dense_multiple(workload, 1, 1)
    assert dense == pytest.approx(convex, rel=1e-6)
    np.testing.assert_allclose(np.diag(gram), 1, atol=1e-6)
    banded = [optima.banded_toeplitz(workload, bands)[0] for bands in (1, 2, 3, 6)]
    assert banded == sorted(banded, reverse=True)
    assert banded[0] == pytest.approx(np.sqrt(3.5))
    assert convex < banded[-1] < matrices_root(workload)
    assert banded[-1] <= optima.blt(workload, 2, 1, 1)[0] * (1 + 1e-6)
    full, _ = optima.inverse_banded(workload, 6, 1, 1)
    assert full == pytest.approx(banded[-1], rel=1e-4)  # the same matrices, seen from C^-1


def matrices_root(workload: np.ndarray) -> float:
    root = matrices.square_root(workload)
    return workloads.rmse(workload, matrices.inverse(root)) * float(np.linalg.norm(root[:, 0]))
