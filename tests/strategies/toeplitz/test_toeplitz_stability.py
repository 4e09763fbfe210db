"""Refusing a C^-1 that blows up."""

import numpy as np
import pytest
from scipy.linalg import toeplitz

from dptrain.strategies.toeplitz.toeplitz import check_stable, check_stable_filter


def test_accepts_inverses_that_stay_in_range():
    check_stable("C", np.array([1.0]))
    check_stable("C", np.array([2.0, -1.0, -0.25]))
    check_stable("C", 0.5 * (-1.0) ** np.arange(1000))
    check_stable("C", np.array([1e-9, 1e-3]))  # growth counts, not size: exactly 10^6


def test_names_the_first_step_out_of_range():
    # C = 1 + 2x has C^-1 = Σ (-2)^t x^t, and 2^20 = 1048576 is the first power above 10^6.
    with pytest.raises(ValueError, match=r"C\^-1 of Mine diverges: at step 20 .*-?1\.05e\+06"):
        check_stable("Mine", (-2.0) ** np.arange(40))
    check_stable("Mine", (-2.0) ** np.arange(20))
    # The ratio to g_0 decides: here it is 2^20 as well.
    with pytest.raises(ValueError, match="at step 20 "):
        check_stable("Mine", 1e-8 * (-2.0) ** np.arange(40))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_refuses_what_is_not_finite(bad):
    with pytest.raises(ValueError, match="at step 2 "):
        check_stable("C", np.array([1.0, 0.5, bad, 0.0]))
    with pytest.raises(ValueError, match="at step 0 "):
        check_stable("C", np.array([bad, 0.5]))


def test_filters_that_fall_stay_in_range():
    # What the shortcut claims, for random falling coefficients: |g_t| <= g_0.
    rng = np.random.default_rng(0)
    for bands in (1, 2, 5, 40):
        for _ in range(20):
            c = np.sort(rng.uniform(0, 1, bands))[::-1]
            g = np.linalg.inv(np.tril(toeplitz(np.pad(c, (0, 200 - bands)))))[:, 0]
            assert np.abs(g).max() <= g[0] * (1 + 1e-9)
            check_stable_filter("C", c, 10**9)  # no n steps are run


def test_filters_that_rise_are_run():
    check_stable_filter("C", [1.0, 0.5, 0.6], 1000)
    check_stable_filter("C", [1.0, 2.0], 20)
    with pytest.raises(ValueError, match="at step 20 "):
        check_stable_filter("C", [1.0, 2.0], 21)
    with pytest.raises(ValueError, match="at step 20 "):
        check_stable_filter("C", [1.0, -2.0], 21)  # falls, but below zero
