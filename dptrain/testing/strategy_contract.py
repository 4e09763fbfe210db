"""What every strategy must fulfil; subclass it in a test module."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import pytest

from dptrain.strategies.strategy import Strategy

_PRINT_HASH = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
from dptrain.strategies.strategy import Strategy
print(Strategy.from_dict(json.loads(sys.argv[2])).coefficient_hash)
"""


class StrategyContract(ABC):
    """Checks of one strategy against its dense matrix and against all participation patterns.

    Attributes:
        steps: n of the checks; at most about 12, since 2^n patterns are enumerated.
    """

    steps: int = 10

    @abstractmethod
    def make_strategy(self) -> Strategy:
        """A new, equal strategy at every call, as a user would declare it (not bound)."""

    def expect_exact(self, max_participations: int, min_sep: int) -> bool:
        """Whether the sensitivity must be the maximum itself and not a bound on it."""
        return True

    def bound(self) -> Strategy:
        """The strategy of the checks, bound to ``steps``."""
        return self.make_strategy().bind(self.steps)

    def dense(self) -> npt.NDArray[np.float64]:
        """C, shape (steps, steps)."""
        return self.bound().columns(self.steps, np.arange(self.steps))

    # -- the value -------------------------------------------------------------------------------

    def test_json_round_trip(self) -> None:
        for strategy in (self.make_strategy(), self.bound()):
            again = Strategy.from_dict(json.loads(json.dumps(strategy.to_dict())))
            assert again == strategy
            assert type(again) is type(strategy)
            assert hash(again) == hash(strategy)
            assert again.coefficient_hash == strategy.coefficient_hash

    def test_read_back_value_is_the_same_matrix(self) -> None:
        again = Strategy.from_dict(json.loads(json.dumps(self.bound().to_dict()))).bind(self.steps)
        np.testing.assert_array_equal(
            again.columns(self.steps, np.arange(self.steps)), self.dense()
        )

    def test_equal_declarations_bind_to_equal_values(self) -> None:
        assert self.make_strategy() == self.make_strategy()
        assert self.bound() == self.bound()

    def test_hash_is_the_same_in_another_process(self) -> None:
        strategy = self.bound()
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), PYTHONHASHSEED="7")
        arguments = [type(strategy).__module__, json.dumps(strategy.to_dict())]
        printed = subprocess.run(
            [sys.executable, "-c", _PRINT_HASH, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert printed.strip() == strategy.coefficient_hash

    def test_is_immutable(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            self.bound().bands = 1

    def test_binding_again_returns_itself(self) -> None:
        bound = self.bound()
        assert bound.bind(self.steps) is bound

    @pytest.mark.parametrize("steps", [0, -3, 2.0, True])
    def test_refuses_to_bind_to_what_is_no_number_of_steps(self, steps: int) -> None:
        with pytest.raises(ValueError, match="steps"):
            self.make_strategy().bind(steps)

    # -- the matrix ------------------------------------------------------------------------------

    def test_is_lower_triangular_non_negative_and_invertible(self) -> None:
        dense = self.dense()
        assert dense.shape == (self.steps, self.steps)
        assert dense.dtype == np.float64
        assert np.all(np.isfinite(dense))
        assert np.all(dense >= 0)
        assert np.all(np.triu(dense, 1) == 0)
        assert np.all(np.diag(dense) > 0)

    def test_bands_is_the_number_of_diagonals(self) -> None:
        lag = np.subtract.outer(np.arange(self.steps), np.arange(self.steps))
        bands = self.bound().bands
        assert np.all(self.dense()[lag >= bands] == 0)
        assert np.any(self.dense()[lag == bands - 1] > 0)

    def test_some_columns_are_columns_of_the_matrix(self) -> None:
        indices = [self.steps - 1, 0, self.steps // 2, 0]
        some = self.bound().columns(self.steps, indices)
        np.testing.assert_array_equal(some, self.dense()[:, indices])

    @pytest.mark.parametrize("offset", [-1, 0])
    def test_refuses_columns_that_do_not_exist(self, offset: int) -> None:
        with pytest.raises(ValueError, match="columns"):
            self.bound().columns(self.steps, [offset if offset < 0 else self.steps])

    def test_apply_is_the_matrix_product(self) -> None:
        rng = np.random.default_rng(0)
        for shape in ((self.steps,), (self.steps, 1), (self.steps, 5)):
            x = rng.normal(size=shape)
            product = self.bound().apply(x)
            assert product.shape == shape
            np.testing.assert_allclose(product, self.dense() @ x, rtol=1e-12, atol=1e-12)

    def test_column_norms_also_at_the_end(self) -> None:
        norms = self.bound().column_norms(self.steps)
        assert norms.shape == (self.steps,)
        np.testing.assert_allclose(norms, np.linalg.norm(self.dense(), axis=0), rtol=1e-12)

    def test_rmse_is_that_of_the_dense_inverse(self) -> None:
        sums = np.tril(np.ones((self.steps, self.steps)))
        error = np.linalg.norm(sums @ np.linalg.inv(self.dense())) / np.sqrt(self.steps)
        assert self.bound().rmse(self.steps) == pytest.approx(error, rel=1e-10)

    # -- sensitivity -----------------------------------------------------------------------------

    def worst_pattern(self, max_participations: int, min_sep: int) -> float:
        """max ‖C x‖₂ over every pattern, by enumeration."""
        dense = self.dense()
        worst = 0.0
        for count in range(1, min(max_participations, self.steps) + 1):
            for chosen in itertools.combinations(range(self.steps), count):
                if all(gap >= min_sep for gap in np.diff(chosen)):
                    worst = max(worst, float(np.linalg.norm(dense[:, chosen].sum(axis=1))))
        return worst

    @pytest.mark.parametrize("max_participations", [1, 2, 3, 100])
    @pytest.mark.parametrize("min_sep", [1, 2, 3, 4, 7, 100])
    def test_sensitivity_against_all_patterns(self, max_participations: int, min_sep: int) -> None:
        worst = self.worst_pattern(max_participations, min_sep)
        claimed = self.bound().sensitivity(
            steps=self.steps, max_participations=max_participations, min_sep=min_sep
        )
        if self.expect_exact(max_participations, min_sep):
            assert claimed == pytest.approx(worst, rel=1e-12)
        else:
            assert claimed >= worst * (1 - 1e-12)

    @pytest.mark.parametrize("value", [0, -1, 1.5])
    @pytest.mark.parametrize("name", ["max_participations", "min_sep"])
    def test_sensitivity_refuses_what_is_no_schedule(self, name: str, value: int) -> None:
        schedule = {"max_participations": 2, "min_sep": 2, name: value}
        with pytest.raises(ValueError, match=name):
            self.bound().sensitivity(steps=self.steps, **schedule)
