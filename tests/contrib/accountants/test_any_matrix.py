"""r-min-sep bounds for any C against enumeration of the exact ratio."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dptrain.contrib.accountants.any_matrix import (
    AnyMatrixLosses,
    MinSepAnyMatrix,
    greatest_overlaps,
)
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep
from dptrain.strategies import BSR, SquareRoot, Tree
from dptrain.testing import AccountantContract
from tests.helpers.min_sep_losses import min_sep_means
from tests.helpers.plain_means import estimate
from tests.oracles import enumeration


def losses_of(strategy, p, b, n, warm) -> AnyMatrixLosses:
    scheme = MinSep(probability=p, min_sep=b, dataset_size=100, steps=n, warm_start=warm)
    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
    return MinSepAnyMatrix().law(mechanism).losses


def law_of(simulation: AnyMatrixLosses) -> enumeration.Law:
    walk = enumeration.min_sep_warm if simulation.warm_start else enumeration.min_sep_cold
    return walk(simulation.steps, simulation.probability, simulation.min_sep)


def matrix_of(simulation: AnyMatrixLosses) -> np.ndarray:
    return np.asarray(simulation.strategy.columns(simulation.steps, np.arange(simulation.steps)))


def exact_log_ratio(simulation: AnyMatrixLosses, outputs: np.ndarray, sigma: float) -> np.ndarray:
    return enumeration.log_ratio(law_of(simulation), matrix_of(simulation), sigma, outputs.T)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(("p", "b", "n"), [(0.2, 2, 7), (0.5, 3, 7), (1.0, 2, 6), (0.3, 1, 6)])
def test_bounds_enclose_the_exact_ratio_of_every_output(p, b, n, warm) -> None:
    simulation = losses_of(SquareRoot(), p, b, n, warm)
    y = np.random.default_rng(3).standard_normal((n, 400)) * 2.5
    truth = exact_log_ratio(simulation, y, 1.4)
    upper = simulation.log_ratio_bound(y, 1.4, upper=True)
    lower = simulation.log_ratio_bound(y, 1.4, upper=False)
    assert (lower <= truth + 1e-10).all()
    assert (truth <= upper + 1e-10).all()
    assert (upper - lower).max() > 1e-3  # columns do overlap here


def test_equal_to_the_exact_loss_where_columns_do_not_overlap() -> None:
    simulation = losses_of(BSR(bands=3), 0.3, 3, 7, True)
    y = np.random.default_rng(4).standard_normal((7, 200)) * 2.0
    truth = exact_log_ratio(simulation, y, 1.2)
    for upper in (True, False):
        np.testing.assert_allclose(
            simulation.log_ratio_bound(y, 1.2, upper=upper), truth, atol=1e-10
        )


def test_greatest_overlaps_by_trying_every_pattern() -> None:
    rng = np.random.default_rng(1)
    c = np.tril(rng.random((7, 7)))
    gram = c.T @ c
    for b in (1, 2, 3):
        found = greatest_overlaps(gram, b)
        for i in range(7):
            later = range(i + b, 7)
            best = 0.0
            for size in range(len(later) + 1):
                for chosen in itertools.combinations(later, size):
                    if all(v - u >= b for u, v in itertools.pairwise(chosen)):
                        best = max(best, sum(gram[i, j] for j in chosen))
            assert found[i] == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_mean_is_not_below_delta_of_the_exact_losses(direction) -> None:
    """6 sigma, with the exact loss of independent outputs."""
    simulation = losses_of(SquareRoot(), 0.3, 2, 7, True)
    sigma, epsilon, size = 1.5, 0.4, 60_000
    rng = np.random.default_rng(6)
    bound = simulation.draw([sigma], direction, rng, size)[0]
    law, c = law_of(simulation), matrix_of(simulation)
    x, chance = law.patterns, law.probabilities
    y = sigma * rng.standard_normal((7, size))
    if direction == "remove":
        y += c @ x[rng.choice(len(x), size=size, p=chance / chance.sum())].T
    loss = exact_log_ratio(simulation, y, sigma) * (1 if direction == "remove" else -1)
    ours, truth = (-np.expm1(np.minimum(epsilon - each, 0.0)) for each in (bound, loss))
    error = math.sqrt((ours.var() + truth.var()) / size)
    assert ours.mean() >= truth.mean() - 6 * error


def test_one_sigma_does_not_depend_on_the_others() -> None:
    simulation = losses_of(SquareRoot(), 0.3, 2, 7, True)
    many = simulation.draw([1.0, 2.0], "both", np.random.default_rng(2), 50)
    one = simulation.draw([2.0], "both", np.random.default_rng(2), 50)
    np.testing.assert_array_equal(many[:, 1:], one)


class TestMinSepAnyMatrix(AccountantContract):
    simulated = True
    delta = 1e-3
    deepest_delta = 1e-4

    def accountant(self):
        return MinSepAnyMatrix(seed=11, progress=False, profile_samples=50_000)

    def mechanism(self):
        scheme = MinSep(probability=0.1, min_sep=4, dataset_size=500, steps=16)
        return MatrixMechanism(scheme=scheme, strategy=SquareRoot(), noise_multiplier=2.5)


@pytest.mark.slow
def test_close_to_the_exact_accountant_where_both_apply() -> None:
    scheme = MinSep(probability=0.1, min_sep=4, dataset_size=500, steps=24)
    mechanism = MatrixMechanism(scheme=scheme, strategy=BSR(bands=3), noise_multiplier=2.0)
    bound = estimate(MinSepAnyMatrix(), mechanism, [0.5], seed=1)
    exact = min_sep_means(mechanism, [0.5], seed=2)
    for side in ("remove", "add"):
        gap = getattr(bound, side)[0] - getattr(exact, side)[0]
        error = math.hypot(getattr(bound, f"{side}_error")[0], getattr(exact, f"{side}_error")[0])
        assert abs(gap) < 6 * error
    assert MinSepAnyMatrix().reserved(mechanism) is not None


def test_refusals() -> None:
    from dptrain.sampling import Poisson

    scheme = Poisson(probability=0.1, dataset_size=500, steps=24)
    poisson = MatrixMechanism(scheme=scheme, strategy=SquareRoot(), noise_multiplier=2.0)
    assert "MinSep" in MinSepAnyMatrix().refusal(poisson)
    long = MinSep(probability=0.1, min_sep=4, dataset_size=500, steps=5000)
    too_long = MatrixMechanism(scheme=long, strategy=SquareRoot(), noise_multiplier=2.0)
    assert "5000" in MinSepAnyMatrix().refusal(too_long)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_trees_have_more_rows_than_steps(direction) -> None:
    scheme = MinSep(probability=0.3, min_sep=2, dataset_size=10, steps=3)
    strategy = Tree().bind(3)
    columns = strategy.columns(3, np.arange(3))
    assert columns.shape[0] > 3
    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
    simulation = MinSepAnyMatrix().law(mechanism).losses
    law = enumeration.min_sep_warm(3, 0.3, 2)
    y = np.random.default_rng(1).standard_normal((200, len(columns)))
    exact = enumeration.log_ratio(law, columns, 1.0, y)
    upper = direction == "remove"
    bound = simulation.log_ratio_bound(y.T, 1.0, upper=upper)
    assert ((bound - exact) * (1 if upper else -1) >= -1e-12).all()
    assert np.isfinite(simulation.draw([1.0], direction, np.random.default_rng(2), 50)).all()
