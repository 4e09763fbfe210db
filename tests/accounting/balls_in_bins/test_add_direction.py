"""Add-direction Rényi divergences of one pick, against closed forms, quadrature and simulation."""

import math

import numpy as np
import pytest

from dptrain.accounting.balls_in_bins.add_direction import add_orders


@pytest.mark.parametrize(("bins", "ratio"), [(1, 0.5), (1, 1.0), (2, 0.8), (10, 1.0), (400, 2.0)])
def test_add_moments_are_above_the_truth_and_near_it(bins, ratio):
    """t = 1 in closed form, t = 2 by quadrature over the plane, more by simulation."""
    found = add_orders(bins, ratio, 8)
    order = np.arange(2, 6)
    if bins == 1:
        truth = order * ratio**2 / 2
    elif bins == 2:
        z = np.linspace(-14, 14, 1401)
        density = np.exp(-(z**2) / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
        x = np.exp(ratio * z - ratio**2 / 2)
        mean = (x[:, None] + x) / 2
        truth = [math.log(density @ mean ** -(a - 1.0) @ density) / (a - 1) for a in order]
    else:
        rng = np.random.default_rng(bins)
        a = np.exp(ratio * rng.standard_normal((200_000 // bins * 4, bins)) - ratio**2 / 2)
        for at in order:
            terms = a.mean(axis=1) ** -(at - 1.0)
            error = 6 * terms.std() / math.sqrt(terms.size)
            value = math.exp((at - 1) * found[at])
            assert terms.mean() - error <= value <= (terms.mean() + error) * (1 + 1e-3)
        return
    assert (found[2:6] >= np.multiply(truth, 1 - 1e-12)).all()
    # Beyond, the bound on the tail of the integral is felt where t is 1 or 2.
    assert (found[2:5] <= np.multiply(truth, 1 + 2e-3)[:3]).all()
