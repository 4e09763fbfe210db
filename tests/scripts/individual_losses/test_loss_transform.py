"""Transforms of one step's loss against closed forms and dense integrals."""

import itertools
import math

import numpy as np
import pytest

from scripts.paper.individual_losses.loss_transform import TiltedLosses, log_ratio

SHIFTS = np.array([1e-3, 0.05, 0.5, 1.0, 2.5])


@pytest.mark.parametrize("probability", [1e-4, 0.01, 0.5])
@pytest.mark.parametrize("order", [2, 3, 5])
def test_integer_moments_are_binomial_sums(probability, order):
    # E_Q[(dP/dQ)^k] = Σ_j C(k, j) (1-q)^{k-j} q^j e^{j(j-1)a²/2}.
    found = TiltedLosses(SHIFTS, probability=probability, tilt=order - 1.0, remove=True)
    q = probability
    for shift, value in zip(SHIFTS, found.cumulant, strict=True):
        terms = [
            math.comb(order, j)
            * (1 - q) ** (order - j)
            * q**j
            * math.exp(j * (j - 1) * shift**2 / 2)
            for j in range(order + 1)
        ]
        assert value == pytest.approx(math.log(math.fsum(terms)), rel=1e-12, abs=1e-15)


def dense(shift, probability, tilt, remove, omega):
    """E_λ[e^{iωL}] and log E[e^{λL}] by a very fine sum (trapezoids of what is analytic)."""
    power = 1.0 + tilt if remove else -tilt
    far = power * shift
    x = np.linspace(min(far, 0.0) - 14, max(far, 0.0) + 14, 40_001)
    ratio = log_ratio(x, np.array(shift), probability)
    log_density = power * ratio - 0.5 * x * x - 0.5 * math.log(2 * math.pi)
    top = log_density.max()
    weights = np.exp(log_density - top)
    losses = ratio if remove else -ratio
    total = weights.sum()
    turned = np.array([np.sum(weights * np.exp(1j * w * losses)) / total for w in omega])
    return turned, top + math.log(total * (x[-1] - x[0]) / (x.size - 1))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize(("probability", "tilt"), [(0.01, 3.7), (1e-3, 12.0), (0.5, 0.2)])
def test_transforms_equal_dense_integrals(probability, tilt, remove):
    found = TiltedLosses(SHIFTS, probability=probability, tilt=tilt, remove=remove)
    count = 40
    # The last scale is beyond what the nodes can follow: the reported errors must say so.
    for j, scale in ((0, 3.0), (2, 3.0), (2, 30.0), (4, 3.0), (4, 3000.0)):
        step = scale / count / np.sqrt(found.variance[j])
        omega = step * np.arange(count + 1)
        logs, errors = found.log_transform(step, count)
        if scale < 100:
            assert errors[j] < 1e-7
        exact, cumulant = dense(SHIFTS[j], probability, tilt, remove, omega)
        assert found.cumulant[j] == pytest.approx(cumulant, abs=found.error[j] + 1e-13)
        ours = np.exp(logs[j] + 1j * omega * found.mean[j])
        gap = np.abs(ours - exact)
        assert gap.max() <= errors[j] + 1e-12 * (1 + omega[-1] * np.abs(found.mean[j]))


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize(("probability", "tilt"), [(0.01, 3.7), (1e-3, 12.0), (0.3, 0.2)])
def test_envelope_is_above_the_transform(probability, tilt, remove):
    found = TiltedLosses(SHIFTS, probability=probability, tilt=tilt, remove=remove)
    for scale in (0.1, 1.0, 5.0):
        step = scale / 20 / np.sqrt(np.median(found.variance))
        logs, _ = found.log_transform(step, 200)
        edges = np.array([1, 3, 10, 30, 70, 130, 200])
        bounds = found.log_envelope(step * (edges[:-1] + 1), step * edges[1:])
        for block, (low, high) in enumerate(itertools.pairwise(edges)):
            size = logs.real[:, low + 1 : high + 1].max(axis=1)
            assert np.all(size <= bounds[:, block] + 1e-12)
    # It is not vacuous: half of the exponent of the variance, for small frequencies.
    low = np.array([0.1, 0.3]) / np.sqrt(found.variance.max())
    bounds = found.log_envelope(low, 1.001 * low)
    # The rare large losses are not in the intervals, so this is about the small norms.
    assert np.all(bounds[:2] < -0.2 * found.variance[:2, None] * low**2)
