"""Geometric sums against sums term by term and against 60-digit arithmetic."""

from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from dptrain.strategies.blt.geometric_sums import geometric, geometric_moments, weighted_geometric

DISTANCES = [0.0, 1e-12, 4.9e-8, 5.1e-8, 1e-4, 4.9e-4, 5.1e-4, 0.01, 0.3, 0.49, 0.51, 1.0, 1.9]


def exact_by_terms(q, n):
    """G, G', H, H' as fractions, term by term."""
    r = 1 - Fraction(q)
    powers = [Fraction(1)]
    for _ in range(n):
        powers.append(powers[-1] * r)
    return (
        sum(powers[t] for t in range(n)),
        -sum(t * powers[t - 1] for t in range(1, n)),
        sum((n - t) * powers[t] for t in range(n)),
        -sum((n - t) * t * powers[t - 1] for t in range(1, n)),
    )


def exact_by_formula(q, n):
    """The same by the textbook quotients, whose cancellation 60 digits can bear."""
    with localcontext() as context:
        context.prec = 60
        q, r = Decimal(q), 1 - Decimal(q)
        g = (1 - r**n) / q
        slope = (n * r ** (n - 1) - g) / q
        h = (n - r * g) / q
        return g, slope, h, (g - r * slope - h) / q


def check(q, n, expected):
    found = (*geometric(q, n), *weighted_geometric(q, n))
    for value, truth in zip(found, expected, strict=True):
        assert float(value) == pytest.approx(float(truth), rel=1e-12, abs=0)


@pytest.mark.parametrize("q", DISTANCES)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 10, 60])
def test_against_every_term(q, n):
    check(q, n, exact_by_terms(q, n))


@pytest.mark.parametrize("q", DISTANCES[1:])
@pytest.mark.parametrize("n", [1000, 10**7])
def test_against_many_digits(q, n):
    check(q, n, exact_by_formula(q, n))


@pytest.mark.parametrize("q", [-1e-12, -1e-3, -0.0083, -0.0084, -0.3, 2.0, 2.3])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 10, 60])
def test_growing_terms(q, n):
    check(q, n, exact_by_terms(q, n))


def test_long_sums_of_equal_terms():
    n = 10**7
    check(0.0, n, (n, -n * (n - 1) // 2, n * (n + 1) // 2, -(n - 1) * n * (n + 1) // 6))


def test_broadcasts():
    value, slope = geometric(np.array([[0.1], [0.2]]), np.array([1, 2, 3]))
    assert value.shape == slope.shape == (2, 3)
    np.testing.assert_allclose(value, [[1, 1.9, 2.71], [1, 1.8, 2.44]], rtol=1e-14)


@pytest.mark.parametrize("m", [0, 1, 7, 1000, 1001, 5041, 12345])
def test_moments_in_blocks_against_the_definition(m):
    q = np.array([1.0, 0.3, 1e-3, 1e-6])
    value, slope = geometric(q, np.arange(1, m + 1)[:, None])
    moments = geometric_moments(q, m)
    np.testing.assert_allclose(moments.total, value.sum(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.total_slope, slope.sum(axis=0), rtol=1e-12)
    product = np.einsum("kj,kl->jl", value, value)
    np.testing.assert_allclose(moments.product, product, rtol=1e-12)
    product_slope = np.einsum("kj,kl->jl", slope, value)
    np.testing.assert_allclose(moments.product_slope, product_slope, rtol=1e-12)
