"""Holds a strategy to its dense matrix: products, errors for every workload, and sensitivity."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.strategy import Strategy
from dptrain.strategies.workloads import PREFIX_SUMS, DenseWorkload, Workload
from tests.oracles import strategy_matrices as matrices
from tests.oracles import strategy_patterns as brute
from tests.oracles import strategy_workloads as workloads

Array = npt.NDArray[np.float64]


def every_workload(steps: int, seed: int = 0) -> list[tuple[Workload, Array]]:
    """Workloads of all kinds for n = ``steps``, each with its oracle's matrix."""
    rng = np.random.default_rng(seed)
    rates = rng.uniform(0, 2, steps)
    rates[rng.uniform(size=steps) < 0.2] = 0.0
    rates[0] = rng.uniform(0.1, 1)
    beta, decay = rng.uniform(0, 0.99), rng.uniform(0, 0.5)
    schedule = tuple(rates.tolist())
    dense = np.tril(rng.standard_normal((steps, steps)))
    return [
        (PREFIX_SUMS, workloads.prefix_sums(steps)),
        (MomentumSGD(momentum=beta, learning_rates=0.3), workloads.heavy_ball(steps, beta, 0.3)),
        (
            MomentumSGD(momentum=beta, learning_rates=schedule),
            workloads.heavy_ball(steps, beta, rates),
        ),
        (
            MomentumSGD(momentum=beta, learning_rates=schedule, weight_decay=decay),
            workloads.heavy_ball(steps, beta, rates, decay),
        ),
        (
            MomentumSGD(momentum=beta, learning_rates=0.7, weight_decay=decay),
            workloads.heavy_ball(steps, beta, 0.7, decay),
        ),
        (DenseWorkload(entries=dense), dense),
    ]


def every_schedule(steps: int) -> list[tuple[int, int]]:
    """(m, b) for runs of n = ``steps`` steps, all m with all b where n is small."""
    counts = sorted({1, 2, 3, max(1, steps // 2), steps, steps + 3})
    return [(m, b) for m in counts for b in sorted({*range(1, steps + 1), steps + 5})]


def compare(
    strategy: Strategy,
    matrix: Array,
    noise: Array | None = None,
    *,
    exact: bool | None = None,
    schedules: Iterable[tuple[int, int]] | None = None,
) -> None:
    """``strategy`` (not bound) is C = ``matrix`` with W = ``noise``, its inverse if left out.

    Args:
        strategy: what a user would declare.
        matrix: the oracle's C, shape (rows, n).
        noise: the oracle's W, shape (n, rows).
        exact: what ``sensitivity_is_exact`` must say for every (m, b); left out if it may differ.
        schedules: (m, b) to try, all for tiny n if left out.
    """
    rows, steps = matrix.shape
    noise = matrices.inverse(matrix) if noise is None else noise
    strategy = strategy.bind(steps)
    strategy = Strategy.from_dict(json.loads(json.dumps(strategy.to_dict()))).bind(steps)
    assert strategy.rows(steps) == rows
    size = {"rtol": 1e-9, "atol": 1e-11 * max(1.0, np.abs(noise).max())}

    np.testing.assert_allclose(strategy.columns(steps, np.arange(steps)), matrix, **size)
    backwards = np.arange(steps)[::-1]
    np.testing.assert_allclose(strategy.columns(steps, backwards), matrix[:, ::-1], **size)
    np.testing.assert_allclose(strategy.solve(np.eye(rows)), noise, **size)
    rng = np.random.default_rng(0)
    x, z = rng.standard_normal((steps, 2)), rng.standard_normal(rows)
    np.testing.assert_allclose(strategy.apply(x), matrix @ x, **size)
    np.testing.assert_allclose(strategy.solve(z), noise @ z, **size)
    norms = np.linalg.norm(matrix, axis=0)
    np.testing.assert_allclose(strategy.column_norms(steps), norms, rtol=1e-10)
    magnitude = strategy.magnitude()
    np.testing.assert_allclose(magnitude.columns(steps, range(steps)), np.abs(matrix), **size)
    compare_bands(strategy, matrix)

    for workload, dense in every_workload(steps):
        errors = workloads.errors(dense, noise)
        np.testing.assert_allclose(strategy.errors(steps, workload), errors, rtol=1e-9)
        np.testing.assert_allclose(
            strategy.rmse(steps, workload), workloads.rmse(dense, noise), rtol=1e-9
        )
        np.testing.assert_allclose(strategy.max_error(steps, workload), errors.max(), rtol=1e-9)

    for m, b in every_schedule(steps) if schedules is None else schedules:
        compare_sensitivity(strategy, matrix, m, b, exact=exact)


def compare_bands(strategy: Strategy, matrix: Array) -> None:
    """Columns of C, and of |C|, at least ``bands`` apart are orthogonal."""
    steps = matrix.shape[1]
    lag = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
    gram = np.abs(matrix).T @ np.abs(matrix)
    assert not gram[lag >= strategy.bands].any()


def compare_sensitivity(
    strategy: Strategy, matrix: Array, m: int, b: int, *, exact: bool | None = None
) -> None:
    """Never below the worst contributions, and equal to them where it says that it is exact."""
    steps = matrix.shape[1]
    claimed = strategy.sensitivity(steps=steps, max_participations=m, min_sep=b)
    says_exact = strategy.sensitivity_is_exact(steps=steps, max_participations=m, min_sep=b)
    if (matrix >= 0).all():
        worst = brute.sensitivity(matrix, m, b)
    else:
        worst = brute.vector_sensitivity(matrix, m, b)
    assert claimed >= worst * (1 - 1e-10), (m, b)
    if says_exact:
        assert claimed <= worst * (1 + 1e-10), (m, b)
    else:
        count = min(m, -(-steps // b))  # the triangle inequality is a bound without any thought
        trivial = count * float(np.linalg.norm(matrix, axis=0).max())
        assert claimed <= trivial * (1 + 1e-10), (m, b)
    assert exact is None or says_exact == exact, (m, b)
