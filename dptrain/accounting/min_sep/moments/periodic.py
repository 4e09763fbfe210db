"""log E_Q[(P/Q)^α], α = 2 and 3, where an example takes part at every b-th step from a random one.

The program over ages has b states or more for each of n steps, though nothing is random but the
first participation. Sums over pairs and triples of the b first steps need neither.
"""

from __future__ import annotations

import math

import numpy as np

from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.core import Array, checks

ORDERS = (2, 3)
EXACT = 2  # the order whose sum is the moment itself; that of the other is a bound
_LARGEST_EXPONENT = 300.0
_MOST_ENTRIES = 1 << 25  # of the table of overlaps, 8 bytes each
_UNIT = 2.0**-53


def covers(law: MinSepLaw, order: int) -> bool:
    """True if a law is periodic, with so few bands that no three bins meet around the ring."""
    width = 3 * law.bands - 2
    return (
        law.probability == 1.0
        and law.warm_start
        and order in ORDERS
        and width <= law.min_sep <= law.steps
        and width * law.min_sep <= _MOST_ENTRIES
    )


def ring_overlaps(law: MinSepLaw) -> Array:
    """<m_i, m_{(i+d) mod b}> for d = 0..bands-1, rounded up: shape (b, bands).

    m_i is the sum of the columns i, i+b, i+2b, … of C.
    """
    c, n, b, bands = law.coefficients, law.steps, law.min_sep, law.bands
    found = np.zeros((b, bands))
    first = np.arange(b)
    for d in range(bands):
        sums = np.concatenate([[0.0], np.cumsum(c[d:] * c[: bands - d])])
        for start in range(d, n, b):
            rows_left = n - (start + first)  # of the later column of the two
            found[:, d] += sums[np.clip(rows_left, 0, bands - d)]
    return found * (1.0 + (2 * bands + n // b + 8) * _UNIT)


def log_moment(law: MinSepLaw, sigma: float, order: int) -> float:
    """log E_Q[(P/Q)^α] of a law that is covered, from above; ∞ where it does not fit float64.

    With f_ij = e^{<m_i, m_j>/σ²} - 1, S the sum of all of them, F_i that of row i and T that of
    f_ij f_jk f_ik over all triples, it is 1 + S/b² for α = 2 and 1 + 3 S/b² + 3 Σ_i F_i²/b³ + T/b³
    for α = 3. T is bounded by the largest f at every distance
    (docs/theory/min-sep.md#thm-periodic-moments; ``test_periodic_moments_by_all_tuples_of_bins``).
    """
    checks.invariant(
        covers(law, order), "the moment is of a law or an order that the closed form does not cover"
    )
    b, bands = law.min_sep, law.bands
    near = ring_overlaps(law) / sigma**2 * (1.0 + 2.0 * _UNIT)
    top = float(near.max())
    if 3.0 * top > _LARGEST_EXPONENT:
        return math.inf
    ahead = np.expm1(near)
    total = 2.0 * float(ahead.sum()) - float(ahead[:, 0].sum())
    value = total / b**2
    if order == 3:
        rows = ahead.sum(axis=1)
        for d in range(1, bands):
            rows += np.roll(ahead[:, d], d)
        largest = ahead.max(axis=0)
        both = np.concatenate([largest[:0:-1], largest])  # distances -(bands-1)..bands-1
        # Σ over two distances of f_d f_e f_{d-e}: the middle of a convolution, against f.
        pairs = np.convolve(both, both)[bands - 1 : 3 * bands - 2]
        value = 3.0 * value + 3.0 * float((rows**2).sum()) / b**3 + float(pairs @ both) / b**2
    # Sums of positive numbers, each a product of three exponentials at most.
    error = 2.0 * (b * (2 * bands - 1) + 16.0 * (top + 4.0)) * _UNIT
    return math.log1p(value * (1.0 + error)) * (1.0 + 4.0 * _UNIT)
