"""The full square root: closed forms in both directions."""

import math

import numpy as np
import pytest

from dptrain.strategies.toeplitz.bsr import BSR
from dptrain.strategies.toeplitz.square_root import SquareRoot
from dptrain.testing import StrategyContract


class TestPrefixSums(StrategyContract):
    def make_strategy(self):
        return SquareRoot()


class TestMomentum(StrategyContract):
    def make_strategy(self):
        return SquareRoot(alpha=0.99, beta=0.9)


class TestOneStep(StrategyContract):
    steps = 1

    def make_strategy(self):
        return SquareRoot(alpha=0.5)


@pytest.mark.parametrize("decay", [{}, {"alpha": 0.9}, {"alpha": 0.95, "beta": 0.5}])
def test_is_bsr_with_all_bands(decay):
    n = 300
    root, banded = SquareRoot(**decay).bind(n), BSR(bands=n, **decay)
    np.testing.assert_array_equal(root.first_column(n), banded.first_column(n))
    np.testing.assert_allclose(root.inverse_column(n), banded.inverse_column(n), atol=1e-13)
    assert root.bands == n
    x = np.random.default_rng(0).normal(size=(n, 3))
    np.testing.assert_allclose(root.apply(x), banded.apply(x), atol=1e-11)
    np.testing.assert_allclose(root.solve(x), banded.solve(x), atol=1e-11)
    assert root.rmse(n) == pytest.approx(banded.rmse(n), rel=1e-12)


@pytest.mark.parametrize("n", [10, 1000, 10**5])
def test_error_between_the_known_bounds(n):
    root = SquareRoot().bind(n)
    sensitivity = root.sensitivity(steps=n, max_participations=1, min_sep=1)
    # Every factorization: RMSE · sensitivity ≥ (nuclear norm of A)/n, and the singular values of
    # prefix sums are 1/(2 sin((2j-1)π/(4n+2))), j = 1, …, n.
    j = np.arange(1, n + 1)
    nuclear = np.sum(1 / (2 * np.sin((2 * j - 1) * np.pi / (4 * n + 2))))
    assert root.rmse(n) * sensitivity >= nuclear / n
    # Both factors of the worst query are the root of Σ_{k<n} c_k², where Wallis' inequality
    # c_k² ≤ 1/(π(k + 1/4)) bounds the terms after the first by an integral from 1/2 to n - 1/2
    # (as Fichtenberger, Henzinger & Upadhyay 2023 do).
    assert root.max_error(n) * sensitivity <= 1 + math.log((4 * n - 1) / 3) / math.pi
    assert root.max_error(n) == pytest.approx(sensitivity, rel=1e-9)


def test_large_runs():
    # The sum of c_k², c_k² ~ 1/(πk), is (ln n + γ + ln 16)/π + O(1/n) (complete elliptic integral).
    n = 10**6
    root = SquareRoot().bind(n)
    squared = root.sensitivity(steps=n, max_participations=1, min_sep=1) ** 2
    expected = (math.log(n) + np.euler_gamma + math.log(16)) / math.pi
    assert squared == pytest.approx(expected, rel=1e-6)
    schedule = {"steps": n, "max_participations": 10, "min_sep": n // 10}
    assert root.sensitivity_is_exact(**schedule)
    assert math.sqrt(squared) < root.sensitivity(**schedule) <= 10 * math.sqrt(squared)


def test_unbound_has_neither_bands_nor_matrix():
    for use in (
        lambda s: s.bands,
        lambda s: s.first_column(5),
        lambda s: s.inverse_column(5),
        lambda s: s.solve(np.ones(5)),
    ):
        with pytest.raises(ValueError, match=r"SquareRoot is not bound.*bind"):
            use(SquareRoot())


def test_bound_to_one_length_only():
    bound = SquareRoot().bind(9)
    with pytest.raises(ValueError, match="bound to 9 steps, not 10"):
        bound.bind(10)
    with pytest.raises(ValueError, match="bound to 9"):
        bound.first_column(10)


def test_bad_input():
    with pytest.raises(ValueError, match="alpha=2"):
        SquareRoot(alpha=2)
    with pytest.raises(ValueError, match="beta=1"):
        SquareRoot(beta=1)
    with pytest.raises(ValueError, match="steps=0"):
        SquareRoot(steps=0)
