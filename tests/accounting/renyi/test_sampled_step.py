"""ρ of one sampled step against 40 digits of quadrature and the library's series; conversions."""

import functools
import itertools
import math

import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from dptrain.accounting.renyi.conversion import epsilon_at_order, largest_divergence
from dptrain.accounting.renyi.sampled_step import RELATIVE_PAD, step_divergence
from dptrain.contrib.individual.norm_grid import NormGrid


def divergences(order, probability, shift):
    """R_α of (P, Q) and of (Q, P) to 40 digits, P = (1-q) N(0,1) + q N(m,1), Q = N(0,1).

    By the trapezoidal rule on the whole line. A step h adds about e^{-2πd/h} for an integrand that
    is analytic within d of the line; the logarithm's branch points lie at π/m.
    """
    with mpmath.workdps(45):
        a, q, m = (mpmath.mpf(v) for v in (order, probability, shift))
        step = mpmath.mpf(1) / max(8, math.ceil(5 * shift))
        add = remove = mpmath.mpf(0)
        for k in range(math.floor(-24 / step), math.ceil((a * m + 24) / step) + 1):
            x = k * step
            log_ratio = mpmath.log(1 - q + q * mpmath.exp(m * x - m**2 / 2))
            add += mpmath.exp((1 - a) * log_ratio - x * x / 2)
            remove += mpmath.exp(a * log_ratio - x * x / 2)
        scale = step / mpmath.sqrt(2 * mpmath.pi)
        return [mpmath.log(scale * total) / (a - 1) for total in (remove, add)]


def adaptive_quadrature(order, probability, shift, *, remove):
    """The same by the library's quadrature, a hundred times slower."""
    with mpmath.workdps(40):
        a, q, m = (mpmath.mpf(v) for v in (order, probability, shift))
        power = a if remove else 1 - a

        def density(x):
            return mpmath.npdf(x) * (1 - q + q * mpmath.exp(m * x - m**2 / 2)) ** power

        around = range(-24, 25, 4)
        points = sorted({mpmath.mpf(k) for k in around} | {a * m + k for k in around})
        return mpmath.log(mpmath.quad(density, points)) / (a - 1)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("order", "probability", "shift"), [(1.5, 1e-6, 1e-4), (2.7, 0.5, 5.0)])
def test_the_trapezoids_are_the_integral(order, probability, shift):
    found = divergences(order, probability, shift)
    for value, remove in zip(found, (True, False), strict=True):
        expected = adaptive_quadrature(order, probability, shift, remove=remove)
        assert abs(value / expected - 1) < mpmath.mpf(10) ** -15


@pytest.mark.parametrize("shift", [1e-8, 1e-3, 0.4, 5.0])
@pytest.mark.parametrize("probability", [1e-6, 0.3, 1.0])
def test_the_trapezoids_are_the_closed_form_at_order_2(probability, shift):
    with mpmath.workdps(60):
        exact = mpmath.log1p(mpmath.mpf(probability) ** 2 * mpmath.expm1(mpmath.mpf(shift) ** 2))
    assert abs(divergences(2, probability, shift)[0] / exact - 1) < mpmath.mpf(10) ** -14


CASES = [
    *itertools.product((1.001, 1.5, 2.7), (1e-3, 0.5), (0.01, 1)),
    (33.3, 1e-3, 0.01),
    (2, 1e-6, 1e-8),
    (1.1, 0.1, 1e-4),
    (32, 1e-6, 1.0),
    (8, 0.99, 5.0),
    (2.7, 0.5, 5.0),
]


@pytest.mark.parametrize(("order", "probability", "shift"), CASES)
def test_is_the_larger_direction_to_twelve_digits(order, probability, shift):
    remove, add = divergences(order, probability, shift)
    assert add <= remove * (1 + mpmath.mpf(10) ** -9)
    got = float(step_divergence(1.0, order=order, probability=probability, sigma=1 / shift))
    assert abs(got / float(remove) - 1 - RELATIVE_PAD) < 2e-12


@pytest.mark.slow
def test_is_the_larger_direction_on_a_dense_set():
    orders, rates = (1.001, 1.5, 2.7, 33.3), (1e-6, 1e-3, 0.1, 0.99)
    for case in itertools.product(orders, rates, (1e-4, 0.3, 2)):
        test_is_the_larger_direction_to_twelve_digits(*case)


@pytest.mark.parametrize("order", [2, 7, 64, 256])
@pytest.mark.parametrize("probability", [1e-4, 0.02, 0.7, 1.0])
def test_agrees_with_the_librarys_sums(order, probability):
    """At integers; its series for other orders takes all terms as positive and is far above."""
    ratios = np.array([0.1, 0.37, 1.0])
    for sigma in (0.6, 1.0, 4.0):
        got = step_divergence(ratios, order=order, probability=probability, sigma=sigma)
        for ratio, value in zip(ratios, got, strict=True):
            accountant = RdpAccountant([order])
            event = dp_event.GaussianDpEvent(sigma / ratio)
            if probability < 1:
                event = dp_event.PoissonSampledDpEvent(probability, event)
            accountant.compose(event)
            # The library adds up 1 + (what is wanted), which costs small ones their digits.
            assert value == pytest.approx(float(accountant.rdp[0]), rel=1e-6, abs=1e-12)


def test_full_batches_are_gaussian():
    got = step_divergence([0.0, 0.5, 1.0], order=21, probability=1.0, sigma=100.0)
    expected = 21 * np.array([0.0, 0.25, 1.0]) / (2 * 100.0**2)
    assert got == pytest.approx(expected, rel=2e-9)
    assert (got[1:] > expected[1:]).all()


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("sigma", [1e-3, 0.05, 0.1001, 1.0, 1e4])
@pytest.mark.parametrize("order", [1.1, 16.0, 1024.0])
def test_never_decreases_in_the_norm_and_never_exceeds_the_unsampled_step(sigma, order):
    values = NormGrid().values
    sampled = step_divergence(values, order=order, probability=0.01, sigma=sigma)
    whole = step_divergence(values, order=order, probability=1.0, sigma=sigma)
    assert sampled[0] == 0.0
    assert (np.diff(sampled) > 0).all()
    assert (sampled <= whole).all()


@pytest.mark.parametrize("order", [2.5, 200.0])
def test_where_the_bound_takes_over_it_is_above_the_integral(order):
    """q^α e^{α(α-1)m²/2} is the highest bump of the integral, and nearly all of it."""
    q, shift = 0.01, 12.0
    bump = (order * math.log(q) + 0.5 * order * (order - 1) * shift**2) / (order - 1)
    got = float(step_divergence(1.0, order=order, probability=q, sigma=1 / shift))
    assert bump < got < 1.05 * bump


def test_shape_order_and_repeated_values():
    f = functools.partial(step_divergence, order=3.0, probability=0.1, sigma=1.0)
    got = f([[1.0, 0.2], [0.2, 0.0]])
    assert got.shape == (2, 2)
    assert got[0, 1] == got[1, 0] == f(0.2)
    assert f([]).shape == (0,)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"order": 1.0}, "order=1.0"),
        ({"order": math.nan}, "order"),
        ({"order": 1e5}, "order"),
        ({"probability": 0.0}, "probability"),
        ({"probability": 1.1}, "probability"),
        ({"sigma": 0.0}, "sigma"),
        ({"sigma": math.inf}, "sigma"),
        ({"ratios": [0.5, 1.5]}, "ratios"),
        ({"ratios": [-0.1]}, "ratios"),
        ({"ratios": [math.nan]}, "ratios"),
    ],
)
def test_bad_values_are_refused(changed, match):
    values = {"ratios": [0.5], "order": 2.0, "probability": 0.1, "sigma": 1.0, **changed}
    with pytest.raises(ValueError, match=match):
        step_divergence(values.pop("ratios"), **values)


@pytest.mark.parametrize("order", [1.1, 2.0, 21.0, 300.5])
@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_conversion_is_proposition_12_and_its_inverse_is_on_the_safe_side(order, delta):
    with mpmath.workdps(40):
        a, d = mpmath.mpf(order), mpmath.mpf(delta)
        offset = (mpmath.log((1 - 1 / a) ** a / (a - 1)) - mpmath.log(d)) / (a - 1)
        for epsilon in (0.1, 2.0, 200.0):
            budget = largest_divergence(epsilon, order=order, delta=delta)
            exact = mpmath.mpf(epsilon) - offset
            assert budget <= exact
            assert abs(budget - exact) < 1e-11 * max(abs(exact), epsilon)
            if budget > 0:
                again = float(epsilon_at_order(budget, order=order, delta=delta))
                assert budget + offset <= again <= epsilon


def test_nothing_spent_is_epsilon_0_and_epsilon_is_never_negative():
    got = epsilon_at_order([0.0, 1e-9, 1.0], order=900.0, delta=0.5)
    assert got.tolist()[:2] == [0.0, 0.0]
    assert got[2] > 0.9


@pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
def test_conversion_refuses_what_is_no_delta(delta):
    with pytest.raises(ValueError, match="delta"):
        epsilon_at_order(1.0, order=2.0, delta=delta)
    with pytest.raises(ValueError, match="order"):
        largest_divergence(1.0, order=1.0, delta=1e-5)
