"""Dense strategies under the contract, signs included, and what they refuse."""

import json
import math

import numpy as np
import pytest
from scipy.linalg import toeplitz

from dptrain.strategies import Strategy
from dptrain.strategies.matrices.dense import Dense
from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.packed import pack
from dptrain.testing import StrategyContract
from tests.oracles.strategy_patterns import signed_sensitivity


class _SignedContract(StrategyContract):
    """Contributions may point against each other: x in {-1, 0, 1}^n."""

    steps = 8

    def worst_pattern(self, max_participations, min_sep):
        return signed_sensitivity(self.dense(), max_participations, min_sep)

    def expect_exact(self, max_participations, min_sep):
        return max_participations == 1 or min_sep >= min(self.bound().bands, self.steps)


def rough(n, bands, low):
    rng = np.random.default_rng(n + bands)
    c = np.tril(np.triu(rng.uniform(low, 0.9, size=(n, n)), 1 - bands))
    np.fill_diagonal(c, rng.uniform(0.5, 1.5, size=n))
    return c


class TestGivenBanded(_SignedContract):
    def make_strategy(self):
        return Dense(matrix=rough(8, 3, 0.1))


class TestGivenSigned(_SignedContract):
    def make_strategy(self):
        return Dense(matrix=rough(8, 8, -0.9))


class TestGivenSignedBanded(_SignedContract):
    def make_strategy(self):
        return Dense(matrix=rough(8, 4, -0.9))


class TestOptimalForEpochs(_SignedContract):
    def make_strategy(self):
        return Dense(epochs=4)


class TestOptimalBanded(_SignedContract):
    def make_strategy(self):
        return Dense(bands=3, workload=MomentumSGD(momentum=0.5))


def test_magnitude_of_signed_entries():
    c = np.array([[1.0, 0.0], [-0.5, 1.0]])
    strategy = Dense(matrix=c)
    assert strategy.magnitude() == Dense(matrix=np.abs(c))
    assert Dense(matrix=np.abs(c)).magnitude() == Dense(matrix=np.abs(c))
    # Opposite contributions add up: ‖(1, -0.5) - (0, 1)‖² = 1 + 2.25.
    found = strategy.sensitivity(steps=2, max_participations=2, min_sep=1)
    assert found == pytest.approx(math.sqrt(3.25), rel=1e-11)
    assert not strategy.sensitivity_is_exact(steps=2, max_participations=2, min_sep=1)


def test_magnitude_is_there_though_its_inverse_blows_up():
    # A polynomial whose roots all have the modulus 1/0.9, while that of its absolute values has
    # one at 0.43: C^-1 stays in range, |C|^-1 grows 2.3-fold a step.
    c = np.ones(1)
    for angle in (3.088, 0.533, 3.111):
        c = np.convolve(c, [1.0, -1.8 * np.cos(angle), 0.81])
    dense = np.tril(toeplitz(np.pad(c, (0, 60 - len(c)))))
    strategy = Dense(matrix=dense).bind(60)
    with pytest.raises(ValueError, match="diverges"):
        Dense(matrix=np.abs(dense)).bind(60)
    np.testing.assert_array_equal(strategy.magnitude().columns(60, range(60)), np.abs(dense))


def test_text_matrix_and_lists_are_the_same_value():
    rows = [[1.0, 0.0], [0.25, 2.0]]
    values = [Dense(matrix=rows), Dense(matrix=np.array(rows)), Dense(matrix=pack(rows))]
    assert len(set(values)) == 1
    assert len({value.coefficient_hash for value in values}) == 1
    assert values[0] != Dense(matrix=[[1.0, 0.0], [0.25, 2.5]])


def test_bands_are_found_from_exact_zeros():
    c = np.eye(6) + np.eye(6, k=-1)
    assert Dense(matrix=c).bands == 2
    c[4, 1] = 1e-300
    assert Dense(matrix=c).bands == 4


def test_binding_keeps_the_declaration_and_reads_back_without_optimizing(monkeypatch):
    bound = Dense(epochs=2).bind(6)
    assert (bound.epochs, bound.steps, bound.bands) == (2, 6, 6)

    def fail(*args):
        raise AssertionError("optimized again")

    monkeypatch.setattr("dptrain.strategies.matrices.dense.optimal_for_epochs", fail)
    assert Strategy.from_dict(json.loads(json.dumps(bound.to_dict()))).bind(6) == bound


def test_repr_leaves_the_text_out():
    assert repr(Dense(matrix=np.eye(3))) == "Dense(steps=3, bands=1)"
    assert "epochs=3" in repr(Dense(epochs=3))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.ones(3), r"matrix has the shape \(3,\)"),
        (np.ones((2, 3)), r"matrix has the shape \(2, 3\)"),
        (np.zeros((0, 0)), "matrix has the shape"),
        (np.array([[1.0, 0.5], [0.0, 1.0]]), r"matrix\[0, 1\]=0.5: must be lower triangular"),
        (np.array([[1.0, 0.0], [math.nan, 1.0]]), r"matrix\[1, 0\]=nan"),
        (np.array([[1.0, 0.0], [math.inf, 1.0]]), r"matrix\[1, 0\]=inf"),
        (np.array([[1.0, 0.0], [1.0, 0.0]]), r"matrix\[1, 1\]=0: the diagonal must be positive"),
        (np.array([[-1.0, 0.0], [1.0, 1.0]]), r"matrix\[0, 0\]=-1: the diagonal"),
        ("no base64!", "matrix: not a packed"),
    ],
)
def test_bad_matrices(matrix, message):
    with pytest.raises(ValueError, match=message):
        Dense(matrix=matrix)


def test_too_many_steps():
    with pytest.raises(ValueError, match="2001 steps: at most 2000"):
        Dense(epochs=1).bind(2001)
    with pytest.raises(ValueError, match="2001 steps: at most 2000"):
        Dense(matrix=np.eye(2001))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give matrix=C, or one of epochs and bands"),
        ({"epochs": 2, "bands": 3}, "epochs=2, bands=3"),
        ({"epochs": 0}, "epochs=0"),
        ({"bands": 1.5}, "bands=1.5"),
        ({"epochs": 2, "steps": 8}, r"steps=8 without a matrix.*bind\(8\)"),
        ({"matrix": np.eye(3), "steps": 4}, "steps=4, but the matrix has steps=3"),
        ({"matrix": np.eye(3), "bands": 2}, "bands=2, but the matrix has bands=1"),
        ({"epochs": 2, "workload": "sums"}, "workload='sums'"),
    ],
)
def test_bad_declarations(fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Dense(**fields)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (Dense(epochs=3), "epochs=3 does not divide the 8 steps"),
        (Dense(bands=9), "use at most bands=8"),
        (Dense(epochs=2, workload=MomentumSGD(learning_rates=(1.0, 2.0))), "has 2 entries"),
        (Dense(matrix=np.eye(7)), "bound to 7 steps, not 8"),
    ],
)
def test_runs_that_do_not_fit(declared, message):
    with pytest.raises(ValueError, match=message):
        declared.bind(8)


def test_an_unbound_value_has_no_matrix():
    for use in (
        lambda s: s.rmse(4),
        lambda s: s.columns(4, [0]),
        lambda s: s.apply(np.ones(4)),
        lambda s: s.solve(np.ones(4)),
        lambda s: s.row(4, 0),
        lambda s: s.magnitude(),
        lambda s: s.sensitivity(steps=4, max_participations=1, min_sep=1),
    ):
        with pytest.raises(ValueError, match="bind"):
            use(Dense(epochs=2))
