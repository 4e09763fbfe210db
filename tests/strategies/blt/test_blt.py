"""BLT as a strategy: the contract for several parameters, and bad input."""

import functools
import json
import math

import numpy as np
import pytest

from dptrain.strategies.blt.blt import BLT
from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.strategy import Strategy
from dptrain.strategies.workloads import PREFIX_SUMS
from dptrain.testing.strategy_contract import StrategyContract
from tests.oracles import strategy_matrices as matrices


@functools.lru_cache
def optimized(strategy, steps):
    return strategy.bind(steps)


class OptimizedContract(StrategyContract):
    """Optimizes once for all checks; that it does so alike every time is a check of its own."""

    def bound(self):
        return optimized(self.make_strategy(), self.steps)

    def test_optimizes_to_the_same_value_every_time(self):
        assert self.make_strategy().bind(self.steps) == self.bound()


class TestOptimized(OptimizedContract):
    def make_strategy(self):
        return BLT(buffers=2)


class TestOptimizedForWorstQuery(OptimizedContract):
    steps = 9

    def make_strategy(self):
        return BLT(buffers=3, objective="max", max_participations=3, min_sep=3)


class TestOptimizedForMomentum(OptimizedContract):
    steps = 8

    def make_strategy(self):
        return BLT(buffers=1, workload=MomentumSGD(momentum=0.9))


class TestExplicit(StrategyContract):
    def make_strategy(self):
        return BLT(buffers=3, theta=(0.3, 0.95, 0.7), omega=(0.2, 0.05, 0.1))


class TestSecondCoefficientAboveTheFirst(StrategyContract):
    """Σω = 1.25: c rises once, and the regular pattern is still the worst."""

    def make_strategy(self):
        return BLT(buffers=2, theta=(0.7, 0.1), omega=(0.85, 0.4))


class TestSecondCoefficientFarAboveTheFirst(StrategyContract):
    steps = 9

    def make_strategy(self):
        return BLT(buffers=1, theta=(0.99,), omega=(1.9,))


class TestNearlyConstantBuffer(StrategyContract):
    def make_strategy(self):
        return BLT(buffers=2, theta=(1 - 2**-50, 1e-5), omega=(0.3, 0.6))


class TestBufferWithoutWeight(StrategyContract):
    def make_strategy(self):
        return BLT(buffers=2, theta=(0.9, 0.5), omega=(0.0, 0.3))


class TestNoWeightAtAll(StrategyContract):
    def make_strategy(self):
        return BLT(buffers=1, theta=(0.9,), omega=(0.0,))


class TestOneStep(StrategyContract):
    steps = 1

    def make_strategy(self):
        return BLT(buffers=2)


THETA, OMEGA = (0.95, 0.4), (0.1, 0.3)


def explicit(n, theta=THETA, omega=OMEGA):
    return BLT(buffers=len(theta), theta=theta, omega=omega).bind(n)


def test_matrix_is_the_definition():
    np.testing.assert_allclose(
        explicit(20).columns(20, np.arange(20)), matrices.blt(THETA, OMEGA, 20), rtol=1e-13
    )


def test_solve_is_the_noise_recursion():
    z = np.random.default_rng(0).normal(size=(300, 2))
    np.testing.assert_allclose(
        explicit(300).solve(z), matrices.blt_noise(THETA, OMEGA, z), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("theta", [(1 - 1e-7, 0.999), (0.5, 0.49999999)])
def test_filters_undo_each_other_in_long_runs(theta):
    n = 10**5
    blt = explicit(n, theta, (1e-3, 0.2))
    z = np.random.default_rng(1).normal(size=n)
    np.testing.assert_allclose(blt.apply(blt.solve(z)), z, atol=1e-9)


def test_closed_form_errors_agree_with_all_errors():
    n = 3000
    blt = BLT().bind(n)
    errors = blt.errors(n)
    assert blt.rmse(n) == pytest.approx(math.sqrt(np.mean(errors**2)), rel=1e-10)
    assert blt.max_error(n) == pytest.approx(errors.max(), rel=1e-10)


def test_errors_for_another_workload():
    n = 40
    workload = MomentumSGD(momentum=0.8)
    product = workload.matrix(n) @ matrices.inverse(matrices.blt(THETA, OMEGA, n))
    rows = np.linalg.norm(product, axis=1)
    blt = explicit(n)
    np.testing.assert_allclose(blt.errors(n, workload), rows, rtol=1e-10)
    assert blt.rmse(n, workload) == pytest.approx(math.sqrt(np.mean(rows**2)), rel=1e-10)
    assert blt.max_error(n, workload) == pytest.approx(rows.max(), rel=1e-10)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("omega", [(0.1, 0.3), (0.5, 0.8)])
@pytest.mark.parametrize("m", [1, 2, 5, 1000])
@pytest.mark.parametrize("b", [1, 7, 60, 499])
def test_closed_form_sensitivity_agrees_with_the_filtered_pattern(omega, m, b):
    n = 500
    blt = explicit(n, THETA, omega)
    x = np.zeros(n)
    x[: min(m, -(-n // b)) * b : b] = 1
    norm = np.linalg.norm(matrices.blt(THETA, omega, n) @ x)
    found = blt.sensitivity(steps=n, max_participations=m, min_sep=b)
    assert found == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize("theta", [1e-300, 5e-17])
def test_vanishing_theta(theta):
    # c = (1, ω, 0, …): with b = 1 and all of n steps, entries 1, 1 + ω, 1 + ω, …
    blt = explicit(6, (theta,), (0.5,))
    assert blt.sensitivity(steps=6, max_participations=6, min_sep=1) == pytest.approx(
        math.sqrt(1 + 5 * 1.5**2), rel=1e-14
    )


def test_bound_value_reads_back_without_optimizing(monkeypatch):
    bound = BLT(buffers=2, max_participations=2, min_sep=5).bind(20)

    def fail(**options):
        raise AssertionError("optimized again")

    monkeypatch.setattr("dptrain.strategies.blt.blt.optimal_buffers", fail)
    again = Strategy.from_dict(json.loads(json.dumps(bound.to_dict()))).bind(20)
    assert (again.theta, again.omega) == (bound.theta, bound.omega)


def test_declarations_differ_and_no_workload_means_prefix_sums():
    assert BLT(workload=None) == BLT() == BLT(workload=PREFIX_SUMS)
    values = [BLT(), BLT(buffers=2), BLT(objective="max"), BLT(workload=MomentumSGD())]
    values += [BLT(max_participations=2, min_sep=3), BLT(max_participations=2, min_sep=4)]
    assert len({value.coefficient_hash for value in values}) == len(values)


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [0.0, 1.0, 1 - 1e-17, -0.5, 1.5, math.nan, math.inf])
def test_theta_outside_its_range(theta):
    with pytest.raises((TypeError, ValueError), match=r"theta.*between 0 and 1|theta\[1\].*finite"):
        BLT(buffers=2, theta=(0.5, theta), omega=(0.1, 0.1))


@pytest.mark.parametrize("omega", [-1e-9, math.nan, math.inf])
def test_omega_outside_its_range(omega):
    with pytest.raises((TypeError, ValueError), match=r"omega.*not negative|omega\[1\].*finite"):
        BLT(buffers=2, theta=(0.5, 0.6), omega=(0.1, omega))


def test_equal_theta_name_the_remedy():
    with pytest.raises((TypeError, ValueError), match=r"theta=.*merge"):
        BLT(buffers=2, theta=(0.5, 0.5), omega=(0.1, 0.2))
    with pytest.raises((TypeError, ValueError), match=r"theta=.*after rounding"):
        BLT(buffers=2, theta=(1e-17, 2e-17), omega=(0.1, 0.2))
    with pytest.raises((TypeError, ValueError), match=r"theta=0\.5 must be a sequence"):
        BLT(buffers=1, theta=0.5, omega=(0.1,))


@pytest.mark.parametrize(
    ("name", "theta", "omega"),
    [("theta", (0.5,), (0.1, 0.1)), ("omega", (0.5, 0.6), (0.1,)), ("omega", (0.5, 0.6), ())],
)
def test_lengths_that_differ(name, theta, omega):
    with pytest.raises(ValueError, match=rf"{name} has \d entries, buffers=2"):
        BLT(buffers=2, theta=theta, omega=omega)


@pytest.mark.parametrize(("given", "missing"), [("theta", "omega"), ("omega", "theta")])
def test_one_of_theta_and_omega(given, missing):
    with pytest.raises(ValueError, match=f"{missing} is missing"):
        BLT(buffers=1, **{given: (0.5,)})


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
@pytest.mark.parametrize("name", ["buffers", "max_participations", "min_sep", "steps"])
def test_what_is_no_positive_integer(name, value):
    with pytest.raises((TypeError, ValueError), match=f"{name}="):
        BLT(**{"min_sep": 1, name: value})


def test_participations_without_a_separation():
    with pytest.raises(ValueError, match=r"min_sep is missing.*max_participations=2"):
        BLT(max_participations=2)


def test_unknown_objective_and_workload():
    with pytest.raises((TypeError, ValueError), match="objective='median'"):
        BLT(objective="median")
    with pytest.raises((TypeError, ValueError), match="workload='momentum'"):
        BLT(workload="momentum")


def test_steps_without_coefficients():
    with pytest.raises(ValueError, match=r"bind\(5\)"):
        BLT(steps=5)


def test_an_unbound_value_has_no_matrix():
    for use in (
        lambda s: s.bands,
        lambda s: s.rmse(5),
        lambda s: s.max_error(5),
        lambda s: s.columns(5, [0]),
        lambda s: s.apply(np.ones(5)),
        lambda s: s.solve(np.ones(5)),
        lambda s: s.sensitivity(steps=5, max_participations=1, min_sep=1),
    ):
        for blt in (BLT(), BLT(buffers=1, theta=(0.5,), omega=(0.1,))):
            with pytest.raises(ValueError, match="bind"):
                use(blt)


def test_bound_to_one_length_only():
    bound = explicit(9)
    for use in (
        lambda: bound.bind(10),
        lambda: bound.rmse(10),
        lambda: bound.apply(np.ones(10)),
        lambda: bound.sensitivity(steps=10, max_participations=1, min_sep=1),
    ):
        with pytest.raises(ValueError, match="bound to 9 steps, not 10"):
            use()


def test_workload_of_another_length():
    schedule = MomentumSGD(learning_rates=(1.0, 0.5, 0.25))
    with pytest.raises(ValueError, match="learning_rates has 3 entries, but the run has 4"):
        BLT(workload=schedule).bind(4)
