"""Every strategy with a formula against its dense matrix, and no sensitivity below the true one."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.strategies.blt.blt import BLT
from dptrain.strategies.matrices.column_normalized import ColumnNormalizedBandMF
from dptrain.strategies.matrices.dense import Dense
from dptrain.strategies.matrices.gram_sensitivity import fixed_epoch_sensitivity
from dptrain.strategies.strategy import Strategy
from dptrain.strategies.toeplitz.band_inv_mf import BandInvMF
from dptrain.strategies.toeplitz.band_mf import BandMF
from dptrain.strategies.toeplitz.bisr import BISR
from dptrain.strategies.toeplitz.bsr import BSR
from dptrain.strategies.toeplitz.identity import Identity
from dptrain.strategies.toeplitz.lambda_cgd import LambdaCGD
from dptrain.strategies.toeplitz.square_root import SquareRoot
from dptrain.strategies.trees import sensitivity as tree_sensitivity
from dptrain.strategies.trees.tree import Tree, TreeRestart
from tests.oracles import strategy_matrices as matrices
from tests.oracles import strategy_patterns as brute
from tests.oracles import strategy_trees as trees
from tests.oracles import strategy_workloads as workloads
from tests.oracles.strategy_comparison import (
    compare,
    compare_sensitivity,
    every_schedule,
    every_workload,
)

DECAYS = [(1.0, 0.0), (1.0, 0.9), (1.0, 0.99), (0.99, 0.5), (0.7, 0.0), (0.5, 0.49), (0.05, 0.01)]


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_identity(steps: int) -> None:
    compare(Identity(), np.eye(steps), np.eye(steps))


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("steps", [1, 2, 5, 8])
@pytest.mark.parametrize("decay", DECAYS)
def test_banded_square_root(steps: int, decay: tuple[float, float]) -> None:
    alpha, beta = decay
    for bands in {1, 2, (steps + 1) // 2, steps} - set(range(steps + 1, 9)):
        matrix = matrices.bsr(steps, bands, alpha, beta)
        compare(BSR(bands=bands, alpha=alpha, beta=beta), matrix, exact=True)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("steps", [1, 2, 5, 8])
@pytest.mark.parametrize("decay", DECAYS)
def test_banded_inverse_square_root(steps: int, decay: tuple[float, float]) -> None:
    alpha, beta = decay
    for bands in {1, 2, (steps + 1) // 2, steps} - set(range(steps + 1, 9)):
        matrix = matrices.bisr(steps, bands, alpha, beta)
        compare(BISR(inverse_bands=bands, alpha=alpha, beta=beta), matrix, exact=True)


@pytest.mark.parametrize("steps", [2, 5, 9])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_partial_cancellation(steps: int, part: float) -> None:
    matrix = np.array(
        [[part ** (t - j) if t >= j else 0.0 for j in range(steps)] for t in range(steps)]
    )
    compare(LambdaCGD(cancellation=part), matrix, exact=True)


@pytest.mark.parametrize("steps", [1, 2, 8])
@pytest.mark.parametrize("decay", DECAYS)
def test_square_root(steps: int, decay: tuple[float, float]) -> None:
    alpha, beta = decay
    matrix = matrices.square_root(workloads.momentum_and_decay(steps, alpha, beta))
    compare(SquareRoot(alpha=alpha, beta=beta), matrix, exact=True)


def random_column(rng: np.random.Generator, bands: int, kind: str) -> np.ndarray:
    """Non-negative, the first one positive, and such that C^-1 does not grow too much."""
    c = rng.uniform(0, 1, bands)
    if kind == "gaps":
        c *= rng.integers(0, 2, bands)
    if kind == "falling":
        c = np.sort(c)[::-1]
    c[0] = max(c) if kind == "falling" else rng.uniform(0.2, 2)
    if kind == "rising":
        c = 0.5 + np.sort(c)
    return c


@pytest.mark.parametrize("kind", ["falling", "rising", "any", "gaps"])
@pytest.mark.parametrize("seed", range(6))
def test_banded_toeplitz_with_given_coefficients(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = int(rng.integers(2, 10))
    bands = int(rng.integers(1, steps + 1))
    c = random_column(rng, bands, kind)
    strategy = BandMF(bands=bands, coefficients=tuple(c.tolist()))
    matrix = matrices.toeplitz(c, steps)
    compare(strategy, matrix, exact=True if kind == "falling" else None)


@pytest.mark.parametrize("growth", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(6))
def test_banded_inverse_with_given_coefficients(growth: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = int(rng.integers(2, 10))
    bands = int(rng.integers(1, steps + 1))
    g = -rng.dirichlet(np.ones(bands)) * growth * rng.integers(0, 2, bands)
    g[0] = rng.uniform(0.5, 2)
    strategy = BandInvMF(inverse_bands=bands, coefficients=tuple(g.tolist()))
    compare(strategy, matrices.inverse_banded(g, steps))


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("total", [0.0, 0.3, 1.0, 1.4])
@pytest.mark.parametrize("seed", range(8))
def test_buffers_with_given_coefficients(total: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, buffers = int(rng.integers(1, 10)), int(rng.integers(1, 5))
    # Σω < 1 + the least θ keeps C^-1 from growing.
    theta = rng.uniform(0.4, 1, buffers) if seed % 2 else 1 - 10 ** rng.uniform(-9, -0.3, buffers)
    if total < 1:
        theta[-1] = 10 ** rng.uniform(-9, -1)
    if buffers > 1 and seed % 3 == 0:
        theta[1] = theta[0] * (1 - 1e-9)  # poles of C and C^-1 that nearly meet
    omega = rng.dirichlet(np.ones(buffers)) * total
    strategy = BLT(buffers=buffers, theta=tuple(theta.tolist()), omega=tuple(omega.tolist()))
    matrix = matrices.blt(theta, omega, steps)
    compare(strategy, matrix, exact=True if total < 1 else None)
    z = rng.standard_normal((steps, 3))
    noise = matrices.blt_noise(theta, omega, z)
    np.testing.assert_allclose(strategy.bind(steps).solve(z), noise, atol=1e-10)


def random_matrix(rng: np.random.Generator, steps: int, bands: int, kind: str) -> np.ndarray:
    """Lower triangular with that many bands and a positive diagonal."""
    matrix = rng.uniform(0, 1, (steps, steps))
    if kind == "signs":
        matrix *= rng.choice([-1.0, 1.0], (steps, steps))
    if kind == "gaps":
        matrix *= rng.integers(0, 2, (steps, steps))
    matrix = np.tril(matrices.truncate(matrix, bands))
    np.fill_diagonal(matrix, rng.uniform(0.3, 2, steps))
    return matrix


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("kind", ["positive", "signs", "gaps"])
@pytest.mark.parametrize("seed", range(8))
def test_given_dense_matrices(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = int(rng.integers(1, 9))
    matrix = random_matrix(rng, steps, int(rng.integers(1, steps + 1)), kind)
    compare(Dense(matrix=matrix), matrix)
    strategy = Dense(matrix=matrix).bind(steps)
    for epochs in (e for e in range(1, steps + 1) if steps % e == 0):
        worst = brute.sensitivity_of_supports(matrix, brute.whole_epochs(steps, epochs))
        claimed = fixed_epoch_sensitivity(strategy, steps=steps, epochs=epochs)
        assert claimed >= worst * (1 - 1e-10)
        if kind != "signs" or epochs <= 2:
            assert claimed == pytest.approx(worst, rel=1e-10)


@pytest.mark.parametrize("seed", range(8))
def test_given_columns_of_norm_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = int(rng.integers(1, 10))
    bands = int(rng.integers(1, steps + 1))
    matrix = matrices.normalize_columns(random_matrix(rng, steps, bands, "positive"))
    diagonals = [[*np.diagonal(matrix, -k), *[0.0] * k] for k in range(bands)]
    compare(ColumnNormalizedBandMF(bands=bands, coefficients=diagonals), matrix)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 7, 8, 9])
def test_tree(steps: int) -> None:
    compare(Tree(), trees.matrix(steps), trees.left_inverse(steps), exact=True)


@pytest.mark.parametrize(
    ("steps", "height"), [(1, 1), (4, 1), (3, 2), (9, 2), (7, 3), (9, 3), (9, 4)]
)
def test_restarted_trees(steps: int, height: int) -> None:
    matrix, noise = trees.restart_matrix(steps, height), trees.restart_left_inverse(steps, height)
    compare(TreeRestart(height=height), matrix, noise, exact=True)


@pytest.mark.parametrize("steps", [13, 16, 23, 37])
@pytest.mark.parametrize("height", [2, 3, 4, None])
def test_longer_trees(steps: int, height: int | None) -> None:
    strategy: Strategy = Tree() if height is None else TreeRestart(height=height)
    whole = steps.bit_length() if height is None else height
    matrix = trees.restart_matrix(steps, whole) if height else trees.matrix(steps)
    noise = trees.restart_left_inverse(steps, whole) if height else trees.left_inverse(steps)
    compare(
        strategy, matrix, noise, exact=True, schedules=[(1, 1), (2, 1), (2, 5), (3, 9), (2, 12)]
    )


@pytest.mark.slow
def test_sensitivity_of_longer_trees_by_integer_programming() -> None:
    rng = np.random.default_rng(0)
    for _ in range(15):
        steps, m, b = (int(rng.integers(*limits)) for limits in ((12, 50), (2, 10), (2, 16)))
        height = int(rng.integers(1, steps.bit_length() + 1))
        for strategy in (Tree().bind(steps), TreeRestart(height=height).bind(steps)):
            matrix = strategy.columns(steps, range(steps))
            worst = trees.worst_square(matrix, m, b)
            claimed = strategy.sensitivity(steps=steps, max_participations=m, min_sep=b)
            assert claimed**2 == pytest.approx(worst, rel=1e-12), (strategy, m, b)


@pytest.mark.parametrize("steps", [9, 12, 21])
def test_bound_on_trees_that_are_too_long_to_search(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(tree_sensitivity, "SEARCH_UP_TO", 0)
    tree_sensitivity.worst_square.cache_clear()
    matrix = trees.matrix(steps)
    for m, b in every_schedule(steps) if steps < 20 else [(3, 5), (4, 3), (2, 9)]:
        compare_sensitivity(Tree().bind(steps), matrix, m, b)
    tree_sensitivity.worst_square.cache_clear()


@pytest.mark.parametrize("seed", range(3))
def test_workloads(seed: int) -> None:
    for steps in (1, 2, 9):
        for workload, matrix in every_workload(steps, seed):
            rng = np.random.default_rng(seed)
            workload.check(steps)
            np.testing.assert_allclose(workload.matrix(steps), matrix, rtol=1e-11, atol=1e-13)
            for shape in ((steps,), (steps, 3)):
                x = rng.standard_normal(shape)
                np.testing.assert_allclose(workload.apply(x), matrix @ x, atol=1e-11)
                np.testing.assert_allclose(workload.adjoint(x), matrix.T @ x, atol=1e-11)
