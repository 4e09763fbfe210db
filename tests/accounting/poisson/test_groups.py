"""Groups and last iterates against closed forms, quadrature and published numbers."""

import numpy as np
import pytest
from scipy.integrate import trapezoid
from scipy.stats import binom, norm

from dptrain.accounting.losses import gaussian
from dptrain.accounting.poisson.groups import group_curve, last_iterate_curve
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep, Poisson
from dptrain.strategies import BSR, Dense, Identity


def mechanism(*, steps, probability, sigma=1.0, strategy=None, size=10**6):
    scheme = Poisson(probability=probability, dataset_size=size, steps=steps)
    return MatrixMechanism(scheme=scheme, strategy=strategy or Identity(), noise_multiplier=sigma)


def one_step_delta(trials, p, scale, epsilon, *, remove):
    """∫ (P - e^ε Q)_+ or ∫ (Q - e^ε P)_+, P = Bin(trials, p) + scale·z, Q = scale·z."""
    counts = np.arange(trials + 1)
    weights = binom.pmf(counts, trials, p)
    x = np.linspace(-12 * scale, trials + 12 * scale, 400_001)
    q = norm.pdf(x, scale=scale)
    mixed = sum(w * norm.pdf(x, loc=m, scale=scale) for w, m in zip(weights, counts, strict=True))
    gap = mixed - np.exp(epsilon) * q if remove else q - np.exp(epsilon) * mixed
    return float(trapezoid(np.maximum(gap, 0.0), x))


def test_published_numbers():
    # Choquette-Choo et al. 2024, App. F: composition .806, last iterate .291 (add only).
    run = mechanism(steps=128, probability=1 / 128)
    assert group_curve(run, group_size=1).epsilon(1.0, 1e-6) == pytest.approx(0.806, abs=2e-3)
    curve = last_iterate_curve(run)
    assert curve.epsilon(1.0, 1e-6) == pytest.approx(0.4199, abs=2e-4)
    remove, add = curve.delta(1.0, np.array([0.2905, 0.2912, 0.4195, 0.4203]))
    assert add[0] > 1e-6 > add[1]
    assert remove[2] > 1e-6 > remove[3]


@pytest.mark.parametrize("p", [0.01, 0.3])
def test_group_of_one_is_poisson(p):
    run = mechanism(steps=50, probability=p, sigma=1.5)
    exact = PoissonPLD().guarantee(run, delta=1e-7).epsilon
    assert group_curve(run, group_size=1).epsilon(1.5, 1e-7) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("k", [1, 3])
def test_certain_participation_is_a_gaussian(k):
    run = mechanism(steps=9, probability=1.0, sigma=5.0)
    exact = gaussian.epsilon(1e-7, 3.0 * k / 5.0)
    for curve in (group_curve(run, group_size=k), last_iterate_curve(run, group_size=k)):
        found = curve.epsilon(5.0, 1e-7)
        assert exact * (1 - 1e-9) <= found <= exact * (1 + 2e-3)


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize(("k", "p", "sigma"), [(2, 0.2, 1.0), (5, 0.05, 2.0)])
def test_one_step_by_quadrature(remove, k, p, sigma):
    curve = group_curve(mechanism(steps=1, probability=p), group_size=k)
    epsilons = np.array([0.0, 0.1, 0.5])
    claims = curve.delta(sigma, epsilons)[0 if remove else 1]
    for epsilon, claim in zip(epsilons, claims, strict=True):
        exact = one_step_delta(k, p, sigma, epsilon, remove=remove)
        assert exact * (1 - 1e-7) - 1e-12 <= claim <= exact * (1 + 1e-3) + 1e-9


def test_last_iterate_by_quadrature():
    curve = last_iterate_curve(mechanism(steps=6, probability=0.2))
    for remove in (True, False):
        claim = curve.delta(1.5, np.array([0.4]))[0 if remove else 1][0]
        exact = one_step_delta(6, 0.2, 1.5 * np.sqrt(6), 0.4, remove=remove)
        assert claim == pytest.approx(exact, rel=1e-3)
        assert claim >= exact * (1 - 1e-7)


def test_beats_the_black_box_and_grows_with_the_group():
    run = mechanism(steps=100, probability=0.01, sigma=1.0)
    found = [group_curve(run, group_size=k).epsilon(1.0, 1e-6) for k in (1, 2, 4)]
    assert found[0] < found[1] < found[2]
    # (kε, k e^{kε} δ) of a group of k, from (ε, δ) for one.
    one = group_curve(run, group_size=1)
    epsilon = 4 * one.epsilon(1.0, 1e-6 / (4 * np.exp(4 * found[0])))
    assert found[2] < epsilon


def test_refusals_name_the_remedy():
    scheme = BallsInBins(bins=3, epochs=2, dataset_size=10)
    run = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
    with pytest.raises(ValueError, match="Poisson"):
        group_curve(run, group_size=2)
    with pytest.raises(ValueError, match="Identity"):
        group_curve(mechanism(steps=4, probability=0.1, strategy=BSR(bands=2)), group_size=2)
    varying = Dense(matrix=np.diag([1.0, 2.0]))
    with pytest.raises(ValueError, match="Identity"):
        group_curve(mechanism(steps=2, probability=0.1, strategy=varying), group_size=2)
    with pytest.raises(ValueError, match="group_size=0"):
        group_curve(mechanism(steps=4, probability=0.1), group_size=0)
    with pytest.raises(ValueError, match="at most"):
        last_iterate_curve(mechanism(steps=4, probability=0.1, size=5), group_size=6)
    sparse = MinSep(probability=0.1, min_sep=1, dataset_size=10, steps=4)
    run = MatrixMechanism(scheme=sparse, strategy=Identity(), noise_multiplier=1.0)
    assert group_curve(run, group_size=2).epsilon(1.0, 1e-3) > 0
