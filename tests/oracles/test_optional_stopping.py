"""The worst stopping rule, where it is known in closed form."""

from __future__ import annotations

import math

import pytest
from scipy.special import ndtr

from tests.oracles.optional_stopping import worst_delta


def gaussian_delta(epsilon: float, mu: float) -> float:
    return ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("shifts", [(0.5,), (0.5,) * 6, (0.2, 1.0, 0.4)])
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_of_one_epsilon_whatever_the_number_no_rule_gains_anything(shifts, epsilon):
    """(1 - e^(ε-L))_+ is convex in e^-L, a martingale: the best rule makes all releases."""
    truth = gaussian_delta(epsilon, math.hypot(*shifts))
    least, most = worst_delta(shifts, [epsilon] * len(shifts), spacing=1e-3)
    assert least <= truth * (1 + 1e-12)
    assert truth <= most * (1 + 1e-12)
    assert most - least < 0.05 * truth + 1e-12


def test_nothing_is_gained_by_a_release_after_which_nothing_is_said():
    shifts = (0.5, 0.5)
    least, most = worst_delta(shifts, [2.0, math.inf])
    assert least <= gaussian_delta(2.0, 0.5) <= most
    assert most == pytest.approx(gaussian_delta(2.0, 0.5), rel=0.02)


def test_two_looks_gain_something():
    """Whoever looks at the first one does better than both who do not."""
    least, _ = worst_delta((1.0, 1.0), [1.0, 4.0])
    assert least > max(gaussian_delta(1.0, 1.0), gaussian_delta(4.0, math.sqrt(2.0)))
