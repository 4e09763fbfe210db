"""The Gaussian trade-off against 80-digit arithmetic."""

import math

import mpmath
import numpy as np
import pytest

from dptrain.accounting.losses import gaussian

MUS = [1e-6, 9e-6, 1.1e-5, 1e-3, 0.1, 1.0, 3.0, 30.0, 1000.0]
EPSILONS = [0.0, 1e-4, 0.1, 1.0, 5.0, 100.0, 1000.0]


def exact_log_delta(epsilon: float, mu: float) -> float:
    with mpmath.workdps(900):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)

        def cdf(x):
            return mpmath.erfc(-x / mpmath.sqrt(2)) / 2

        value = cdf(-e / m + m / 2) - mpmath.exp(e) * cdf(-e / m - m / 2)
        return float(mpmath.log(value)) if value > 0 else -math.inf


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_log_delta_is_exact_and_rounded_up(mu, epsilon):
    if epsilon / mu > 45.0:
        pytest.skip("δ is below 1e-300")
    exact = exact_log_delta(epsilon, mu)
    found = float(gaussian.log_delta(epsilon, mu))
    assert exact <= found <= exact + 2 * gaussian.DELTA_PAD


def test_reaches_1e_300_and_epsilon_1000():
    mu = gaussian.largest_mu(1000.0, 1e-300)
    assert exact_log_delta(1000.0, mu) <= math.log(1e-300)
    assert exact_log_delta(1000.0, mu * (1 + 1e-8)) > math.log(1e-300)


def test_tiny_deltas_are_still_bounded_from_above():
    # Far beyond 1e-300 the value may be loose but must stay an upper bound.
    assert gaussian.log_delta(1.0, 1e-3) >= exact_log_delta(1.0, 1e-3)
    assert gaussian.log_delta(10.0, 0.05) >= exact_log_delta(10.0, 0.05)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("mu", [1e-3, 0.5, 4.0, 40.0])
@pytest.mark.parametrize("delta", [1e-300, 1e-12, 1e-5, 0.3])
def test_epsilon_inverts_delta_on_the_safe_side(mu, delta):
    epsilon = gaussian.epsilon(delta, mu)
    assert exact_log_delta(epsilon, mu) <= math.log(delta)
    if epsilon > 0:
        assert exact_log_delta(epsilon * (1 - 1e-6), mu) > math.log(delta)


def test_limits():
    np.testing.assert_array_equal(gaussian.delta([0.0, 1.0], [0.0, np.inf]), [0.0, 1.0])
    assert gaussian.epsilon(1e-5, 0.0) == 0.0
    assert gaussian.epsilon(1e-5, math.inf) == math.inf


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("start", "width"), [(-40.0, 0.5), (-1.0, 0.2), (3.0, 2.0), (20.0, 0.01)])
def test_log_excess_is_the_expectation_it_names(start, width):
    # E[(1 - e^{-ξ(Z - a)})_+] by quadrature in pieces at 30 digits.
    with mpmath.workdps(30):
        fine, rest = [0.05 * i for i in range(40)], [2 + 0.5 * i for i in range(56)]
        points = [max(start, -12) + x for x in fine + rest]
        expected = mpmath.quad(
            lambda z: (1 - mpmath.exp(-width * (z - start))) * mpmath.npdf(z), points
        )
        expected = float(mpmath.log(expected))
    assert float(gaussian.log_excess(start, width)) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-12])
def test_many_epsilons_at_once_are_those_of_one_at_a_time(delta):
    mu = np.array([[0.0, 1e-6, 1e-3], [0.7, 30.0, math.inf]])
    one_at_a_time = [[gaussian.epsilon(delta, each) for each in row] for row in mu]
    many = gaussian.epsilons(delta, mu)
    np.testing.assert_allclose(many, one_at_a_time, rtol=1e-11, atol=0)
    finite = np.isfinite(many) & (many > 0)
    assert (gaussian.log_delta(many[finite], mu[finite]) <= math.log(delta)).all()


def test_many_epsilons_refuse_a_delta_out_of_range():
    with pytest.raises(ValueError, match="delta=1"):
        gaussian.epsilons(1.0, [0.5])
