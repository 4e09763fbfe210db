"""The contract that every strategy must fulfil; subclass it in a test module."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod

import numpy as np
import pytest

from dptrain.core import Array
from dptrain.strategies import Strategy, strategy_types
from dptrain.testing.requiring import require

_PRINT_HASHES = """
import importlib, json, sys
from dptrain.strategies import Strategy
for line in sys.stdin:
    module, value = json.loads(line)
    importlib.import_module(module)
    print(Strategy.from_dict(value).coefficient_hash, flush=True)
"""


@functools.cache
def _another_process() -> subprocess.Popen[str]:
    """A Python of its own that answers every [module, value] with a hash; starting it is slow."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), PYTHONHASHSEED="7")
    process = subprocess.Popen(
        [sys.executable, "-c", _PRINT_HASHES],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.kill)
    return process


@functools.cache
def _bound(strategy: Strategy, steps: int) -> Strategy:
    """Equal strategies bind to equal values, and to optimize one takes a while."""
    return strategy.bind(steps)


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
        """True if the sensitivity must be the maximum itself and not a bound on it."""
        return True

    def bound(self) -> Strategy:
        """The strategy of the checks, bound to ``steps``."""
        return _bound(self.make_strategy(), self.steps)

    def dense(self) -> Array:
        """C, shape (rows, steps)."""
        return self.bound().columns(self.steps, np.arange(self.steps))

    # -- the value -------------------------------------------------------------------------------

    def test_is_registered(self) -> None:
        kind = type(self.make_strategy())
        require(strategy_types().get(kind.__name__) is kind, "decorate it with @register_strategy")

    def test_json_round_trip(self) -> None:
        for strategy in (self.make_strategy(), self.bound()):
            again = Strategy.from_dict(json.loads(json.dumps(strategy.to_dict())))
            require(again == strategy)
            require(type(again) is type(strategy))
            require(hash(again) == hash(strategy))
            require(again.coefficient_hash == strategy.coefficient_hash)

    def test_read_back_value_is_the_same_matrix(self) -> None:
        again = Strategy.from_dict(json.loads(json.dumps(self.bound().to_dict()))).bind(self.steps)
        np.testing.assert_array_equal(
            again.columns(self.steps, np.arange(self.steps)), self.dense()
        )

    def test_equal_declarations_bind_to_equal_values(self) -> None:
        require(self.make_strategy() == self.make_strategy())
        one, other = (self.make_strategy().bind(self.steps) for _ in range(2))
        require(one == other)

    def test_hash_is_the_same_in_another_process(self) -> None:
        strategy = self.bound()
        process = _another_process()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([type(strategy).__module__, strategy.to_dict()]) + "\n")
        process.stdin.flush()
        printed = process.stdout.readline()
        require(printed.strip() == strategy.coefficient_hash)

    def test_is_immutable(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            self.bound().bands = 1

    def test_binding_again_returns_itself(self) -> None:
        bound = self.bound()
        require(bound.bind(self.steps) is bound)

    @pytest.mark.parametrize("steps", [0, -3, 2.0, True])
    def test_refuses_to_bind_to_what_is_no_number_of_steps(self, steps: int) -> None:
        with pytest.raises((TypeError, ValueError), match="steps"):
            self.make_strategy().bind(steps)

    # -- the matrix ------------------------------------------------------------------------------

    def test_a_prefix_is_the_leading_block(self) -> None:
        for steps in range(1, self.steps + 1):
            prefix = self.bound().prefix(steps)
            if prefix is None:
                continue
            require(prefix.bind(steps) == prefix)
            block = prefix.columns(steps, np.arange(steps))
            np.testing.assert_allclose(block, self.dense()[:steps, :steps], rtol=1e-12, atol=1e-15)

    @property
    def square(self) -> bool:
        """True if C is n×n; the rows of a tree are its nodes."""
        return self.bound().rows(self.steps) == self.steps

    def test_is_lower_triangular_non_negative_and_invertible(self) -> None:
        dense = self.dense()
        require(dense.shape == (self.bound().rows(self.steps), self.steps))
        require(dense.dtype == np.float64)
        require(np.all(np.isfinite(dense)))
        require(np.all(self.bound().magnitude().columns(self.steps, range(self.steps)) >= 0))
        # A row enters no later than those below it, and every column starts a new row: the release
        # of step t needs the gradients up to t only.
        first = [int(np.flatnonzero(column)[0]) for column in dense.T]
        require(np.all(np.diff(first) > 0))
        if self.square:
            require(np.all(np.triu(dense, 1) == 0))
            require(np.all(np.diag(dense) > 0))

    def test_magnitude_is_the_absolute_value(self) -> None:
        magnitude = self.bound().magnitude().columns(self.steps, range(self.steps))
        np.testing.assert_allclose(magnitude, np.abs(self.dense()), rtol=1e-14, atol=0)

    def test_bands_is_where_columns_become_orthogonal(self) -> None:
        dense = self.dense()
        bands = self.bound().bands
        lag = np.abs(np.subtract.outer(np.arange(self.steps), np.arange(self.steps)))
        gram = dense.T @ dense
        require(np.all(np.abs(gram[lag >= bands]) <= 1e-13 * gram.max()))
        require(np.any(np.abs(gram[lag == bands - 1]) > 0))
        if self.square:
            below = np.subtract.outer(np.arange(self.steps), np.arange(self.steps))
            require(np.all(dense[below >= bands] == 0))
            require(np.any(dense[below == bands - 1] != 0))

    def left_inverse(self) -> Array:
        """W, shape (steps, rows)."""
        return self.bound().solve(np.eye(self.bound().rows(self.steps)))

    def test_solve_is_a_left_inverse(self) -> None:
        w = self.left_inverse()
        require(w.shape == (self.steps, self.bound().rows(self.steps)))
        np.testing.assert_allclose(w @ self.dense(), np.eye(self.steps), atol=1e-10)
        if self.square:
            inverse = np.linalg.inv(self.dense())
            np.testing.assert_allclose(w, inverse, rtol=1e-9, atol=1e-10)

    def test_solve_takes_vectors_and_matrices(self) -> None:
        rng = np.random.default_rng(1)
        rows = self.bound().rows(self.steps)
        for shape in ((rows,), (rows, 1), (rows, 5)):
            z = rng.normal(size=shape)
            noise = self.bound().solve(z)
            require(noise.shape == (self.steps, *shape[1:]))
            np.testing.assert_allclose(noise, self.left_inverse() @ z, rtol=1e-9, atol=1e-10)

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
            require(product.shape == (len(self.dense()), *shape[1:]))
            np.testing.assert_allclose(product, self.dense() @ x, rtol=1e-12, atol=1e-12)

    def test_column_norms_also_at_the_end(self) -> None:
        norms = self.bound().column_norms(self.steps)
        require(norms.shape == (self.steps,))
        np.testing.assert_allclose(norms, np.linalg.norm(self.dense(), axis=0), rtol=1e-12)

    def test_errors_are_row_norms(self) -> None:
        sums = np.tril(np.ones((self.steps, self.steps)))
        rows = np.linalg.norm(sums @ self.left_inverse(), axis=1)
        bound = self.bound()
        np.testing.assert_allclose(bound.errors(self.steps), rows, rtol=1e-9)
        require(bound.rmse(self.steps) == pytest.approx(np.sqrt(np.mean(rows**2)), rel=1e-9))
        require(bound.max_error(self.steps) == pytest.approx(rows.max(), rel=1e-9))

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
        exact = self.bound().sensitivity_is_exact(
            steps=self.steps, max_participations=max_participations, min_sep=min_sep
        )
        if exact or self.expect_exact(max_participations, min_sep):
            require(claimed == pytest.approx(worst, rel=1e-12))
        else:
            require(claimed >= worst * (1 - 1e-12))

    @pytest.mark.parametrize("value", [0, -1, 1.5])
    @pytest.mark.parametrize("name", ["max_participations", "min_sep"])
    def test_sensitivity_refuses_what_is_no_schedule(self, name: str, value: int) -> None:
        schedule = {"max_participations": 2, "min_sep": 2, name: value}
        with pytest.raises((TypeError, ValueError), match=name):
            self.bound().sensitivity(steps=self.steps, **schedule)
