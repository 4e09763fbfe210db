"""Which coefficients make the regular pattern the worst one, against all patterns."""

import dataclasses
import itertools

import numpy as np
import pytest
from scipy.linalg import toeplitz

from dptrain.strategies.toeplitz.toeplitz import BandedToeplitz, envelope


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Given(BandedToeplitz):
    """Any coefficients, also such that C^-1 blows up."""

    coefficients: tuple[float, ...]

    def bind(self, steps):
        return self

    def first_column(self, steps):
        return np.array(self.coefficients[:steps])


def worst(c, n, m, b):
    """max ‖C x‖₂ over every pattern, by enumeration."""
    dense = np.tril(toeplitz(np.pad(c, (0, n - len(c)))))
    patterns = (
        chosen
        for count in range(1, m + 1)
        for chosen in itertools.combinations(range(n), count)
        if all(gap >= b for gap in np.diff(chosen))
    )
    return max(np.linalg.norm(dense[:, chosen].sum(axis=1)) for chosen in patterns)


def claim(c, n, m, b):
    bound = _Given(coefficients=tuple(c))
    schedule = {"steps": n, "max_participations": m, "min_sep": b}
    return bound.sensitivity(**schedule), bound.sensitivity_is_exact(**schedule)


@pytest.mark.parametrize("seed", range(12))
def test_order_matters_from_min_sep_on_only(seed):
    # Anything goes before lag b: rising, zero, large.
    rng = np.random.default_rng(seed)
    n, m, b = 11, int(rng.integers(2, 5)), int(rng.integers(1, 6))
    c = rng.uniform(0, 1, size=n) ** 2
    c[0] += 0.01
    c[b:] = np.sort(c[b:])[::-1]
    value, exact = claim(c, n, m, b)
    assert exact
    assert value == pytest.approx(worst(c, n, m, b), rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_never_below_the_worst_pattern(seed):
    rng = np.random.default_rng(100 + seed)
    n, m, b = 11, int(rng.integers(2, 5)), int(rng.integers(1, 6))
    c = rng.uniform(0, 1, size=int(rng.integers(2, n + 1))) ** 3 + 1e-3
    value, exact = claim(c, n, m, b)
    reached = worst(c, n, m, b)
    assert value >= reached * (1 - 1e-12)
    if exact:
        assert value <= reached * (1 + 1e-12)


def test_rising_at_min_sep_is_not_exact():
    # The rise from lag b to lag b+1 is what a pattern with a gap of b+1 uses.
    c = np.array([1.0, 0.1, 0.2, 0.5])
    value, exact = claim(c, 8, 2, 2)
    assert not exact
    assert value >= worst(c, 8, 2, 2) > np.sqrt(2 * (c @ c) + 2 * (c[2] + 0.1 * 0.5))
    assert claim(c, 8, 2, 3)[1]


@pytest.mark.parametrize("wiggle", [1e-17, 1e-16, 1e-15])
def test_rises_by_rounding_stay_exact(wiggle):
    c = 0.5 * np.ones(9)
    c[0] = 1.0
    c[2::2] += wiggle
    value, exact = claim(c, 9, 3, 2)
    assert exact
    assert value >= worst(c, 9, 3, 2) * (1 - 1e-15)
    assert value == pytest.approx(worst(c, 9, 3, 2), rel=1e-12)


def test_rises_beyond_rounding_are_bounds():
    c = 0.5 * np.ones(9)
    c[3::2] += 1e-9
    value, exact = claim(c, 9, 3, 2)
    assert not exact
    assert value >= worst(c, 9, 3, 2)


def test_envelope():
    c = np.array([1.0, 3.0, 0.0, 2.0, 1.0])
    np.testing.assert_array_equal(envelope(c, 1), [1, 3, 2, 2, 1])
    np.testing.assert_array_equal(envelope(c, 3), c)
    np.testing.assert_array_equal(envelope(c, 9), c)
