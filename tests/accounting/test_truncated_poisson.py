"""Truncated Poisson against the theorem's pair, its limits and others' accountants."""

import math
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant
from scipy.special import ndtr

from dptrain.accounting.pld import Composition
from dptrain.accounting.poisson_pld import PoissonPLD, SubsampledGaussianCurve
from dptrain.accounting.shifted_mixtures import ShiftedMixtures, public_mixture
from dptrain.accounting.truncated_poisson import (
    Branches,
    TruncatedPoissonCurve,
    TruncatedPoissonPLD,
)
from dptrain.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, Poisson
from dptrain.sampling.truncated_poisson import TruncatedPoisson
from dptrain.strategies import BandMF, Dense, Identity
from dptrain.testing import AccountantContract


def curve(size, p, largest, steps=1, sensitivity=1.0):
    return TruncatedPoissonCurve(
        probability=p,
        dataset_size=size,
        max_batch_size=largest,
        steps=steps,
        sensitivity=sensitivity,
    )


def mechanism(size, p, largest, steps, sigma, strategy=None):
    scheme = TruncatedPoisson(probability=p, dataset_size=size, steps=steps, max_batch_size=largest)
    return MatrixMechanism(scheme=scheme, strategy=strategy or Identity(), noise_multiplier=sigma)


class TestContract(AccountantContract):
    def accountant(self):
        return TruncatedPoissonPLD()

    def mechanism(self):
        return mechanism(200, 0.2, 52, 10, 2.0)

    def refused_mechanism(self):
        return mechanism(200, 0.2, 52, 10, 2.0, BandMF(bands=2))


# --- the pair, from Theorem 3.3 as it is printed: sums over s, not the shorter form -------------


def exact_branches(size, p, largest):
    """Pr[Bin(N-1, p) < B], its complement, and p Σ_{s≥B} Pr[s | s ≥ B] B/(s+1), as fractions."""
    p = Fraction(p)
    law = [math.comb(size - 1, s) * p**s * (1 - p) ** (size - 1 - s) for s in range(size)]
    full = sum(law[largest:])
    kept = p * sum(w * Fraction(largest, s + 1) for s, w in enumerate(law) if s >= largest) / full
    return 1 - full, full, kept


def pair(size, p, largest):
    """(weight, q, right, left) of each r: means of the shifted parts of P and of Q."""
    room, full, kept = map(float, exact_branches(size, p, largest))
    return [(room, p, 1.0, 0.0), (full, kept, 2.0, -1.0)]


def log_mix(x, q, shift, sigma):
    """log of ((1-q) N(0, σ²) + q N(shift, σ²))/N(0, σ²)."""
    exponent = (2 * shift * x - shift**2) / (2 * sigma**2)
    return np.logaddexp(np.log1p(-q), np.log(q) + exponent) if q < 1 else exponent


def pair_delta(epsilons, branches, sigma, remove):
    """Σ_r w_r ∫(P_r - e^ε Q_r)_+ : each loss grows with x, so the regions are half lines."""
    epsilons = np.asarray(epsilons, float)
    total = np.zeros_like(epsilons)
    for weight, q, right, left in branches:
        low = np.full(epsilons.shape, -1e4 * sigma)
        high = -low
        level = epsilons if remove else -epsilons
        for _ in range(90):
            x = (low + high) / 2
            below = log_mix(x, q, right, sigma) - log_mix(x, q, left, sigma) < level
            low, high = np.where(below, x, low), np.where(below, high, x)
        sign = 1 if remove else -1
        p_mass = (1 - q) * ndtr(-sign * x / sigma) + q * ndtr(-sign * (x - right) / sigma)
        q_mass = (1 - q) * ndtr(-sign * x / sigma) + q * ndtr(-sign * (x - left) / sigma)
        if not remove:
            p_mass, q_mass = q_mass, p_mass
        total += weight * (p_mass - np.exp(epsilons) * q_mass)
    return total


def two_step_delta(epsilon, branches, sigma, remove):
    """The first step by quadrature, the second by the half lines."""
    nodes, weights = np.polynomial.legendre.leggauss(20)
    edges = sigma * np.linspace(-12, 12 + 2 / sigma, 60)
    x = (edges[:-1, None] + np.diff(edges)[:, None] * (nodes + 1) / 2).ravel()
    dx = (np.diff(edges)[:, None] * weights / 2).ravel()
    total = 0.0
    for weight, q, right, left in branches:
        log_p, log_q = log_mix(x, q, right, sigma), log_mix(x, q, left, sigma)
        base = np.exp(-0.5 * (x / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        density = base * np.exp(log_p if remove else log_q)
        loss = log_p - log_q if remove else log_q - log_p
        total += weight * float(
            dx @ (density * pair_delta(epsilon - loss, branches, sigma, remove))
        )
    return total


@pytest.mark.parametrize(
    ("size", "p", "largest"),
    [(2, 0.5, 1), (5, 0.3, 2), (40, 0.25, 17), (60, 0.9, 30), (50, 1.0, 7), (80, 0.01, 60)],
)
def test_branches_are_those_of_the_theorem_rounded_up(size, p, largest):
    found = Branches.of(dataset_size=size, probability=p, max_batch_size=largest)
    for value, exact in zip(
        (found.open, found.full, found.kept), exact_branches(size, p, largest), strict=True
    ):
        assert exact <= Fraction(value) <= exact * (1 + Fraction(1, 10**9)) + Fraction(1, 10**280)


def test_branches_survive_underflow():
    # Pr[Bin(N-1, p) >= B] is under 1e-308; q2 stays at its bound p·B/(B+1).
    found = Branches.of(dataset_size=10**6, probability=1e-6, max_batch_size=5000)
    assert 0 < found.full < 1e-280
    assert found.kept == pytest.approx(1e-6 * 5000 / 5001, rel=1e-9)
    assert found.open >= 1.0


CASES = [(30, 0.2, 8, 1.0), (30, 0.2, 8, 3.0), (20, 0.5, 5, 0.5), (200, 0.01, 4, 0.8)]


@pytest.mark.parametrize(("size", "p", "largest", "sigma"), CASES)
@pytest.mark.parametrize("remove", [True, False])
def test_one_step_is_the_pair_of_the_theorem(size, p, largest, sigma, remove):
    composed = curve(size, p, largest)._composition(sigma, remove=remove)
    single = composed._single
    top = composed.epsilon(1e-9)
    # On the grid of losses nothing is lost but rounding; between its points δ is convex.
    cells = np.unique(np.round(np.linspace(0.0, top, 15) / single.spacing))
    between = np.random.default_rng(1).uniform(0.0, top, 15)
    for epsilons, loss in ((single.spacing * cells, 1e-6), (between, 1e-3)):
        exact = pair_delta(epsilons, pair(size, p, largest), sigma, remove)
        excess = -np.expm1(np.minimum(epsilons[:, None] - single.losses, 0.0))
        summed = excess @ np.exp(single.log_mass) + single.infinity
        assert (summed >= exact * (1 - 1e-11)).all()
        np.testing.assert_allclose(summed, exact, rtol=loss)
        found = composed.delta(epsilons)
        assert (found >= exact * (1 - 1e-9)).all()
        np.testing.assert_allclose(found, exact, rtol=loss + 1e-5)


@pytest.mark.parametrize("remove", [True, False])
def test_two_steps_match_quadrature(remove):
    size, p, largest, sigma = 20, 0.3, 7, 1.5
    composed = curve(size, p, largest, steps=2)._composition(sigma, remove=remove)
    for epsilon in (0.0, 0.4, 1.5, composed.epsilon(1e-7)):
        exact = two_step_delta(epsilon, pair(size, p, largest), sigma, remove)
        assert exact * (1 - 1e-7) <= float(composed.delta(epsilon)) <= exact * 1.001


def test_probability_one_draws_batches_of_a_fixed_size():
    size, largest, sigma = 50, 7, 1.3
    found = curve(size, 1.0, largest).delta(sigma, np.array([0.0, 0.2, 1.0]))
    for direction, remove in zip(found, (True, False), strict=True):
        fixed = [(1.0, largest / size, 2.0, -1.0)]
        exact = pair_delta([0.0, 0.2, 1.0], fixed, sigma, remove)
        assert (direction >= exact * (1 - 1e-9)).all()
        np.testing.assert_allclose(direction, exact, rtol=1e-4)


# --- limits, and others' accountants -----------------------------------------------------------


def test_a_cap_of_the_whole_dataset_is_poisson():
    for largest in (100, 5000):
        capped = mechanism(100, 0.05, largest, 30, 1.1)
        poisson = MatrixMechanism(
            scheme=Poisson(probability=0.05, dataset_size=100, steps=30),
            strategy=Identity(),
            noise_multiplier=1.1,
        )
        ours = TruncatedPoissonPLD().guarantee(capped, delta=1e-6)
        assert ours.epsilon == PoissonPLD().guarantee(poisson, delta=1e-6).epsilon
        assert ours.kind is Kind.EXACT


def test_a_larger_cap_approaches_poisson_from_above():
    poisson = SubsampledGaussianCurve(0.05, 30, 1.0).epsilon(1.1, 1e-6)
    values = [curve(1000, 0.05, largest, steps=30).epsilon(1.1, 1e-6) for largest in (70, 90, 999)]
    assert values[0] > 1.1 * poisson
    assert values == sorted(values, reverse=True)
    for value in values[1:]:
        assert poisson * (1 - 1e-5) <= value <= poisson * (1 + 1e-3)


def test_published_example_and_dp_accounting():
    size, p, largest, sigma, steps, delta = 10_000, 0.01, 110, 1.0, 1000, 1e-5
    ours = curve(size, p, largest, steps=steps).epsilon(sigma, delta)
    assert ours == pytest.approx(7.43, abs=0.005)
    # Theirs uses the replace-one pair when the batch is full: valid for zero-out, looser.
    assert theirs(size, p, largest, sigma, steps).get_epsilon(delta) == pytest.approx(
        7.68, abs=0.01
    )


def theirs(size, p, largest, sigma, steps):
    event = dp_event.TruncatedSubsampledGaussianDpEvent(size, p, largest, sigma)
    return pld_privacy_accountant.PLDAccountant(value_discretization_interval=1e-3).compose(
        dp_event.SelfComposedDpEvent(event, steps)
    )


@pytest.mark.parametrize(
    ("size", "p", "largest", "sigma", "steps"),
    [(1000, 0.05, 60, 1.0, 20), (300, 0.3, 80, 3.0, 50), (100, 0.5, 60, 2.0, 5)],
)
def test_at_least_as_tight_as_dp_accounting(size, p, largest, sigma, steps):
    other, own = theirs(size, p, largest, sigma, steps), curve(size, p, largest, steps=steps)
    for delta in (1e-3, 1e-6):
        assert own.epsilon(sigma, delta) <= other.get_epsilon(delta)


# --- the pieces --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "sigma"), [(0.3, 1.0), (1e-6, 0.3), (0.9, 20.0), (1e-12, 1.0), (0.5, 1e3)]
)
def test_losses_are_inverted(q, sigma):
    law = ShiftedMixtures(q, sigma)
    bottom, top = law.loss(np.array(law.ends))
    losses = np.linspace(bottom, top, 3001)
    x = law.where_loss_is(losses)
    assert (np.diff(x) >= 0).all()
    np.testing.assert_allclose(law.loss(x), losses, rtol=1e-12, atol=1e-14 * (top - bottom))


def test_mixture_needs_one_grid():
    law = ShiftedMixtures(0.3, 1.0)
    parts = [(0.5, law.discretised(spacing=h, remove=True)) for h in (0.01, 0.02)]
    with pytest.raises(ValueError, match="spacing"):
        public_mixture(parts)
    both = public_mixture([parts[0], parts[0]])
    single = Composition(parts[0][1], 3).delta(0.5)
    assert Composition(both, 3).delta(0.5) == pytest.approx(single, rel=1e-12)


def test_sensitivity_scales_the_noise():
    assert curve(100, 0.1, 15, steps=5, sensitivity=0.5).epsilon(0.6, 1e-6) == pytest.approx(
        curve(100, 0.1, 15, steps=5).epsilon(1.2, 1e-6), rel=1e-9
    )


def test_refuses_by_reason_with_a_remedy():
    bins = BallsInBins(bins=10, epochs=2, dataset_size=100)
    other = MatrixMechanism(scheme=bins, strategy=Identity(), noise_multiplier=1.0)
    assert "TruncatedPoisson" in (TruncatedPoissonPLD().refusal(other) or "")
    banded = mechanism(100, 0.1, 15, 20, 1.0, BandMF(bands=2))
    assert "use bands=1" in (TruncatedPoissonPLD().refusal(banded) or "")
    for diagonal, refused in ((np.diag([1.0, 0.5]), True), (np.diag([0.5, 0.5]), False)):
        varied = mechanism(100, 0.1, 15, 2, 1.0, Dense(matrix=diagonal))
        assert ("Identity" in (TruncatedPoissonPLD().refusal(varied) or "")) == refused


def test_says_when_truncation_costs_privacy():
    for largest, told in ((15, True), (60, False)):
        shown = TruncatedPoissonPLD().guarantee(mechanism(100, 0.1, largest, 5, 1.5), delta=1e-6)
        assert any("max_batch_size" in note for note in shown.notes) == told
