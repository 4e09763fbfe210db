"""Normals whose product with one direction is given, and the losses that compiled code draws."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest

from dptrain.accounting.min_sep import engine_compiled as compiled
from dptrain.accounting.min_sep.curve import MinSepRenyiCurve
from dptrain.accounting.min_sep.importance_terms import TiltedMinSep
from dptrain.accounting.min_sep.recursion import log_ratio
from dptrain.accounting.poisson import PoissonPLD
from tests.accounting.min_sep.moments.test_tilted import AS_MIN_SEP, KNOWN, LONG, SIGMA
from tests.accounting.min_sep.test_engine_compiled_replayed import compiled_normals

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
DIRECTIONS = {
    "even": np.ones(7),
    "uneven": np.array([0.1, 2.0, 0.3, 1e-9, 5.0]),
    "late": np.array([0.0, 0.0, 1.0, 0.0, 2.0]),
    "one row": np.array([3.0]),
}


def held(free: np.ndarray, unit: np.ndarray, along: np.ndarray) -> np.ndarray:
    """What the kernel does to free normals, row by row from the last, in numpy."""
    rows = compiled.held_rows(unit)
    left, found = along.copy(), np.empty_like(free)
    for i in range(unit.size - 1, -1, -1):
        found[i] = rows[1, i] * left + rows[2, i] * free[i]
        left -= unit[i] * found[i]
    return found


@pytest.mark.parametrize("name", sorted(DIRECTIONS))
def test_a_direction_can_be_held(name: str) -> None:
    """The map is linear: I - uu^T is the covariance of N(0, I) given <u, z>, and u g its mean."""
    unit = DIRECTIONS[name] / np.linalg.norm(DIRECTIONS[name])
    n = unit.size
    matrix = held(np.eye(n), unit, np.zeros(n))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(n) - np.outer(unit, unit), atol=1e-14)
    mean = held(np.zeros((n, 1)), unit, np.array([1.5]))[:, 0]
    np.testing.assert_allclose(mean, 1.5 * unit, atol=1e-14)


@needs_numba
@pytest.mark.parametrize("name", sorted(LONG))
def test_held_losses_are_those_of_the_noise_drawn(name: str) -> None:
    law, lanes = LONG[name], 128
    unit = np.linspace(0.5, 2.0, law.steps)
    unit /= np.linalg.norm(unit)
    along = np.linspace(-6.0, 6.0, lanes)
    losses = compiled.losses_along(law, SIGMA, unit, np.random.default_rng(5), along)
    noise = compiled.generators(np.random.default_rng(5), 1, lanes)[0]
    z = held(compiled_normals(law, noise[0]), unit, along)
    np.testing.assert_allclose(unit @ z, along, atol=1e-12)
    exact = -log_ratio(law, SIGMA, SIGMA * z)
    error = compiled.held_error(unit)
    bound = compiled.rounding_bound(law, SIGMA, held=error)
    reference = 1e-15 * law.steps * (1.0 + np.abs(exact))
    assert (losses >= exact - reference).all()
    assert (losses <= exact + 2.0 * bound + reference).all()
    assert error < 1e-9


@needs_numba
def test_terms_of_the_add_direction_average_to_a_known_delta() -> None:
    epsilon = 0.5
    known = float(PoissonPLD().profile(KNOWN, [epsilon]).add[0])
    terms = TiltedMinSep(MinSepRenyiCurve(AS_MIN_SEP), 1.2).add(epsilon)
    rng = np.random.default_rng(9)
    drawn = np.concatenate([terms.draw(rng, 4096) for _ in range(10)])
    assert drawn.min() >= 0.0
    assert drawn.max() <= terms.ceiling
    error = drawn.std() / math.sqrt(drawn.size)
    assert error < 0.05 * known
    assert abs(drawn.mean() - known) <= 6 * error + 1e-4 * known  # 6 sigma and the PLD's grid


@needs_numba
def test_what_lies_outside_of_the_proof_counts_as_a_loss_of_infinity() -> None:
    law = LONG["settled"]
    unit, beyond = np.zeros(law.steps), 1.01 * compiled.LARGEST_HELD
    unit[0] = 1.0  # z_0 is what is asked for
    along = np.array([0.0, beyond])
    losses = compiled.losses_along(law, SIGMA, unit, np.random.default_rng(1), along)
    assert np.isfinite(losses[0])
    assert losses[1] == math.inf
