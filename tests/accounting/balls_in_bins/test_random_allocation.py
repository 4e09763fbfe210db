"""Random allocation against balls-in-bins, closed forms, brackets of the truth and simulation."""

import math

import numpy as np
import pytest
from scipy.special import logsumexp

from dptrain.accounting.balls_in_bins.add_direction import add_orders
from dptrain.accounting.balls_in_bins.random_allocation import (
    RandomAllocationCurve,
    RandomAllocationRenyi,
)
from dptrain.accounting.balls_in_bins.renyi import BallsInBinsRenyi
from dptrain.accounting.losses import gaussian
from dptrain.accounting.renyi.chords import epsilon_from_renyi
from dptrain.accounting.unamplified import UnsampledGaussian
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, RandomAllocation
from dptrain.strategies import BSR, BandMF, Dense, Identity
from dptrain.testing import AccountantContract
from tests.oracles import enumeration as oracle


def made(*, bins, epochs, sigma, participations=1, strategy=None):
    scheme = RandomAllocation(
        steps_per_epoch=bins,
        participations=participations,
        epochs=epochs,
        dataset_size=5_000,
    )
    return MatrixMechanism(scheme=scheme, strategy=strategy or Identity(), noise_multiplier=sigma)


def curve_of(mechanism):
    return RandomAllocationRenyi().curve(mechanism)


class TestRandomAllocation(AccountantContract):
    def accountant(self):
        return RandomAllocationRenyi()

    def mechanism(self):
        return made(bins=20, epochs=3, sigma=1.5)

    def refused_mechanism(self):
        return made(bins=20, epochs=3, sigma=1.5, participations=2)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("bins", "sigma"), [(2, 0.7), (10, 1.0), (100, 2.0), (30, 0.4)])
def test_one_epoch_is_balls_in_bins(bins, sigma):
    here = made(bins=bins, epochs=1, sigma=sigma)
    there = MatrixMechanism(
        scheme=BallsInBins(bins=bins, epochs=1, dataset_size=5_000),
        strategy=Identity(),
        noise_multiplier=sigma,
    )
    for delta in (1e-4, 1e-5, 1e-10):
        found, expected = (
            accountant.guarantee(mechanism, delta=delta).epsilon
            for accountant, mechanism in (
                (RandomAllocationRenyi(), here),
                (BallsInBinsRenyi(), there),
            )
        )
        assert found == pytest.approx(expected, rel=1e-7)
    grid = [0.0, 0.1, 0.5, 2.0]
    found, expected = (
        accountant.profile(mechanism, grid)
        for accountant, mechanism in ((RandomAllocationRenyi(), here), (BallsInBinsRenyi(), there))
    )
    np.testing.assert_allclose(found.remove, expected.remove, rtol=1e-7, atol=1e-300)
    np.testing.assert_allclose(found.add, expected.add, rtol=1e-7, atol=1e-300)


@pytest.mark.parametrize(
    ("sigma", "truth", "most"), [(1.0, 0.6176, 1.3), (2.0, 0.1712, 0.4), (0.6, 3.4303, 4.3)]
)
def test_is_above_the_known_brackets(sigma, truth, most):
    """The truth at δ = 1e-5, t = 100 is at least ``truth``; ``most`` guards against looseness."""
    shown = RandomAllocationRenyi().guarantee(made(bins=100, epochs=1, sigma=sigma), delta=1e-5)
    assert truth <= shown.epsilon <= most


@pytest.mark.parametrize(("bins", "epochs", "sigma"), [(1, 4, 1.0), (3, 2, 0.6), (100, 7, 2.0)])
def test_order_two_in_closed_form(bins, epochs, sigma):
    # E_Q[(P/Q)²] = t^-2 Σ_ij e^{δ_ij/σ²} = 1 + (e^{1/σ²} - 1)/t in each epoch.
    expected = epochs * math.log1p(math.expm1(1 / sigma**2) / bins)
    orders = curve_of(made(bins=bins, epochs=epochs, sigma=sigma)).orders(sigma, lambda _: (0.0, 2))
    assert expected <= orders.divergence[2] <= expected * (1 + 1e-9) + 1e-8 * epochs


@pytest.mark.parametrize(("bins", "epochs"), [(2, 3), (3, 2)])
def test_moments_of_all_picks(bins, epochs):
    """The law of all E picks at once, expanded over multisets of patterns."""
    patterns = np.zeros((bins**epochs, bins * epochs))
    for row, picks in enumerate(np.ndindex(*(bins,) * epochs)):
        for epoch, pick in enumerate(picks):
            patterns[row, epoch * bins + pick] = 1.0
    law = oracle.Law(patterns, np.full(len(patterns), 1 / len(patterns)))
    sigma, c = 0.8, 1.7
    strategy = BandMF(bands=1, coefficients=(c,))
    curve = curve_of(made(bins=bins, epochs=epochs, sigma=sigma, strategy=strategy))
    orders = curve.orders(sigma, lambda _: (0.0, 2))
    for order in (2, 3, 4):
        exact = oracle.renyi_moment(law, c * np.eye(bins * epochs), sigma, order) / (order - 1)
        assert orders.divergence[order] == pytest.approx(exact, rel=1e-7)


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


def test_gaussian_loss_proves_more_than_its_divergence():
    """Converting Lemma 3.4, times E, proves no more than the Gaussian loss itself."""
    bins, epochs, sigma, delta = 50, 4, 1.2, 1e-6
    curve = curve_of(made(bins=bins, epochs=epochs, sigma=sigma))
    alpha = np.arange(2.0, 600.0)
    divergence = epochs * (1 / (2 * sigma**2) + (alpha - 1) / (2 * bins * sigma**2))
    converted, _ = epsilon_from_renyi(np.concatenate(([np.inf, np.inf], divergence)), delta)
    at = np.array([converted])
    assert curve.log_delta_add(sigma, at)[0] < math.log(delta)


@pytest.mark.parametrize("epochs", [1, 5])
def test_one_step_an_epoch_is_the_gaussian(epochs):
    sigma = 2.0
    mechanism = made(bins=1, epochs=epochs, sigma=sigma)
    mu = math.sqrt(epochs) / sigma
    grid = np.array([0.0, 0.3, 1.0, 4.0])
    found = RandomAllocationRenyi().profile(mechanism, grid)
    expected = gaussian.delta(grid, mu)
    np.testing.assert_allclose(found.remove, expected, rtol=1e-7)
    np.testing.assert_allclose(found.add, expected, rtol=1e-7)
    shown = RandomAllocationRenyi().guarantee(mechanism, delta=1e-6)
    assert shown.epsilon == pytest.approx(gaussian.epsilon(1e-6, mu), rel=1e-7)


def simulated_delta(*, bins, epochs, sigma, epsilon, samples, seed):
    """δ(ε) in both directions less six standard errors, from the exact loss of all epochs."""
    rng = np.random.default_rng(seed)
    result = []
    for direction in ("remove", "add"):
        y = sigma * rng.standard_normal((samples, epochs, bins))
        if direction == "remove":
            picks = rng.integers(bins, size=(samples, epochs, 1))
            np.put_along_axis(y, picks, np.take_along_axis(y, picks, axis=2) + 1.0, axis=2)
        loss = (logsumexp((y - 0.5) / sigma**2, axis=2) - math.log(bins)).sum(axis=1)
        loss = loss if direction == "remove" else -loss
        terms = -np.expm1(np.minimum(epsilon[:, None] - loss, 0.0))
        mean, error = terms.mean(axis=1), terms.std(axis=1) / math.sqrt(samples)
        assert mean[0] > 50 * error[0]  # the comparison means something
        result.append(mean - 6 * error)
    return result


@pytest.mark.parametrize(
    ("bins", "epochs", "sigma"), [(10, 2, 1.0), (4, 3, 0.7), (20, 3, 0.5), (2, 2, 1.5)]
)
def test_is_above_the_simulated_truth(bins, epochs, sigma):
    """A bound at the truth itself would fail with probability 1e-9 a comparison."""
    grid = np.array([0.0, 0.2, 0.7, 2.0])
    found = RandomAllocationRenyi().profile(made(bins=bins, epochs=epochs, sigma=sigma), grid)
    remove, add = simulated_delta(
        bins=bins, epochs=epochs, sigma=sigma, epsilon=grid, samples=60_000, seed=bins
    )
    assert (found.remove >= remove).all()
    assert (found.add >= add).all()


def test_more_epochs_cost_and_more_noise_pays():
    def epsilon(epochs, sigma):
        mechanism = made(bins=50, epochs=epochs, sigma=sigma)
        return RandomAllocationRenyi().guarantee(mechanism, delta=1e-5).epsilon

    assert np.all(np.diff([epsilon(e, 1.0) for e in (1, 2, 4, 16)]) > 0)
    assert np.all(np.diff([epsilon(4, s) for s in (0.5, 1.0, 2.0, 8.0)]) < 0)


def test_new_picks_are_no_worse_than_kept_ones():
    """Two epochs with kept bins are one epoch at σ/√2: with new picks it must cost less here."""
    sigma = 1.0
    fresh = RandomAllocationRenyi().guarantee(made(bins=100, epochs=4, sigma=sigma), delta=1e-5)
    kept = BallsInBinsRenyi().guarantee(
        MatrixMechanism(
            scheme=BallsInBins(bins=100, epochs=4, dataset_size=5_000),
            strategy=Identity(),
            noise_multiplier=sigma,
        ),
        delta=1e-5,
    )
    assert fresh.epsilon < kept.epsilon


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("sigma", [0.05, 0.5, 5.0, 200.0])
@pytest.mark.parametrize(("bins", "epochs"), [(3, 1), (200, 10)])
def test_never_worse_than_without_amplification(bins, epochs, sigma):
    mechanism = made(bins=bins, epochs=epochs, sigma=sigma)
    found = RandomAllocationRenyi().guarantee(mechanism, delta=1e-6).epsilon
    plain = UnsampledGaussian().guarantee(mechanism, delta=1e-6).epsilon
    assert found <= plain * (1 + 1e-8)
    grid = plain * np.array([0.0, 0.5, 1.0])
    both = RandomAllocationRenyi().profile(mechanism, grid)
    assert (both.delta <= UnsampledGaussian().profile(mechanism, grid).delta * (1 + 1e-8)).all()


def test_a_scaled_strategy_scales_the_noise():
    scaled = BandMF(bands=1, coefficients=(3.0,))
    found = RandomAllocationRenyi().guarantee(
        made(bins=30, epochs=2, sigma=6.0, strategy=scaled), delta=1e-5
    )
    plain = RandomAllocationRenyi().guarantee(made(bins=30, epochs=2, sigma=2.0), delta=1e-5)
    assert found.epsilon == pytest.approx(plain.epsilon, rel=1e-9)


def test_moments_keep_their_digits_at_extreme_noise():
    for sigma in (1e-3, 1e6):
        divergence = (
            RandomAllocationCurve(1000, 5, 1.0).orders(sigma, lambda _: (0.0, 2)).divergence
        )
        assert np.isfinite(divergence[2:]).all()
        assert (np.diff((np.arange(2, divergence.size) - 1) * divergence[2:]) > -1e-9).all()


def test_refusals_name_the_remedy():
    accountant = RandomAllocationRenyi()
    refused = {
        "participations=1": made(bins=20, epochs=2, sigma=1.0, participations=3),
        "bands=1": made(bins=20, epochs=2, sigma=1.0, strategy=BSR(bands=2)),
        "same noise at every step": made(
            bins=2, epochs=2, sigma=1.0, strategy=Dense(matrix=np.diag([1.0, 1.0, 1.0, 2.0]))
        ),
        "it needs RandomAllocation": MatrixMechanism(
            scheme=BallsInBins(bins=20, epochs=2, dataset_size=5_000),
            strategy=Identity(),
            noise_multiplier=1.0,
        ),
    }
    for words, mechanism in refused.items():
        assert words in accountant.refusal(mechanism)
