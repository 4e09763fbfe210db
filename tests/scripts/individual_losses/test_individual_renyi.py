"""Individual ε by Rényi divergences against closed forms, dp_accounting and the PLD accountant."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import RDPAccountant

from dptrain.accounting.renyi.conversion import conversion_term
from dptrain.accounting.renyi.sampled_step import LARGEST_ORDER, step_divergence
from dptrain.contrib.individual.norm_grid import NormGrid
from scripts.paper.individual_losses.pld import IndividualPLD
from scripts.paper.individual_losses.renyi import ORDERS, IndividualRenyi

COARSE = NormGrid(smallest=0.02, ratio=1.25)


def histories(examples, steps, grid, *, seed):
    """Random histories of Dirichlet-distributed norms, from concentrated to spread."""
    rng = np.random.default_rng(seed)
    spread = rng.dirichlet(np.full(len(grid.values), 0.05), size=examples)
    return np.array([rng.multinomial(steps, shares) for shares in spread], dtype=np.uint32)


def homogeneous(steps, grid):
    """One row for each positive norm of the grid."""
    return np.uint32(steps) * np.eye(len(grid.values), dtype=np.uint32)[1:]


@pytest.mark.slow
@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("probability", "sigma", "steps"), [(0.01, 1.0, 3000), (0.3, 5.0, 200)])
def test_is_never_below_the_pld_and_never_above_the_worst_case(probability, sigma, steps):
    given = {"probability": probability, "noise_multiplier": sigma, "grid": COARSE}
    counts = histories(15, steps, COARSE, seed=1)
    for delta in (1e-3, 1e-6, 1e-10):
        renyi = IndividualRenyi(**given).epsilon(counts, delta)
        assert np.all(renyi >= IndividualPLD(**given).epsilon(counts, delta))
        worst = IndividualRenyi(**given).epsilon(homogeneous(steps, COARSE)[-1:], delta)
        assert np.all(renyi <= worst)


def test_without_sampling_it_is_the_closed_form():
    sigma, delta = 30.0, 1e-6
    counts = histories(30, 500, COARSE, seed=2)
    found = IndividualRenyi(probability=1.0, noise_multiplier=sigma, grid=COARSE)
    half_mu2 = counts @ COARSE.values**2 / (2 * sigma**2)
    at = np.asarray(ORDERS)[:, None]
    bounds = at * half_mu2 + (conversion_term(at) - math.log(delta)) / (at - 1)
    assert found.epsilon(counts, delta) == pytest.approx(bounds.min(axis=0), rel=2e-9)
    assert np.all(found.epsilon(counts, delta) >= bounds.min(axis=0))


@pytest.mark.slow
@pytest.mark.parametrize("probability", [0.005, 1.0])
def test_the_best_real_order_is_hardly_better(probability):
    sigma, delta, steps = 2.0 if probability < 1 else 40.0, 1e-6, 10_000 if probability < 1 else 500
    counts = homogeneous(steps, COARSE)
    found = IndividualRenyi(probability=probability, noise_multiplier=sigma, grid=COARSE)
    dense = 1.0 + np.geomspace(0.1, LARGEST_ORDER - 1, 500)
    finest = IndividualRenyi(
        probability=probability, noise_multiplier=sigma, grid=COARSE, orders=dense.tolist()
    )
    assert np.all(found.epsilon(counts, delta) <= 1.002 * finest.epsilon(counts, delta))


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(
    ("probability", "sigma", "steps"), [(0.005, 2.0, 10_000), (0.1, 3.0, 300), (1.0, 20.0, 100)]
)
def test_agrees_with_dp_accounting_on_homogeneous_histories(probability, sigma, steps):
    delta, orders = 1e-6, [*RDPAccountant.DEFAULT_ALPHAS, 100.0, 256.0]
    found = IndividualRenyi(
        probability=probability, noise_multiplier=sigma, grid=COARSE, orders=orders
    ).epsilon(homogeneous(steps, COARSE), delta)
    for ratio, epsilon in zip(COARSE.values[1:].tolist(), found.tolist(), strict=True):
        step = dp_event.PoissonSampledDpEvent(probability, dp_event.GaussianDpEvent(sigma / ratio))
        accountant = RdpAccountant(orders).compose(step, steps)
        assert epsilon == pytest.approx(accountant.get_epsilon(delta), rel=1e-6)


def test_adds_up_the_divergences_of_a_mixed_history():
    probability, sigma, delta, order = 0.02, 1.5, 1e-5, 12.5
    counts = histories(5, 1000, COARSE, seed=3)
    found = IndividualRenyi(
        probability=probability, noise_multiplier=sigma, grid=COARSE, orders=[order]
    ).epsilon(counts, [delta] * 5)
    for row, epsilon in zip(counts, found, strict=True):
        total = math.fsum(
            int(n) * float(step_divergence(r, order=order, probability=probability, sigma=sigma))
            for n, r in zip(row, COARSE.values, strict=True)
        )
        term = math.log1p(-1 / order) * order - math.log(order - 1) - math.log(delta)
        assert epsilon == pytest.approx(total + term / (order - 1), rel=1e-9)


@pytest.mark.slow
def test_delta_may_differ_and_columns_may_be_asked_for_one_by_one():
    found = IndividualRenyi(probability=0.02, noise_multiplier=1.5, grid=COARSE)
    counts, deltas = histories(6, 500, COARSE, seed=4), np.geomspace(1e-9, 1e-3, 6)
    alone = [float(found.epsilon(counts[i : i + 1], deltas[i])[0]) for i in range(6)]
    assert found.epsilon(counts, deltas) == pytest.approx(alone, rel=1e-12)


def test_nothing_spent_is_zero():
    found = IndividualRenyi(probability=0.02, noise_multiplier=1.5, grid=COARSE)
    counts = np.zeros((2, len(COARSE.values)), np.uint32)
    counts[1, 0] = 1000
    assert found.epsilon(counts, 1e-6).tolist() == [0.0, 0.0]
    assert found.epsilon(counts[:0], 1e-6).shape == (0,)


def test_refuses_what_the_pld_accountant_refuses():
    given = {"probability": 0.02, "noise_multiplier": 1.5, "grid": COARSE}
    counts = np.zeros((2, len(COARSE.values)), np.int64)
    for accountant in (IndividualRenyi(**given), IndividualPLD(**given)):
        with pytest.raises(ValueError, match="counts has shape"):
            accountant.epsilon(counts[:, 1:], 1e-6)
        with pytest.raises(TypeError, match="integers"):
            accountant.epsilon(counts.astype(float), 1e-6)
        with pytest.raises(ValueError, match="must not be negative"):
            accountant.epsilon(counts - 1, 1e-6)
        with pytest.raises(ValueError, match="delta"):
            accountant.epsilon(counts, 0.0)
        with pytest.raises(ValueError, match="delta has shape"):
            accountant.epsilon(counts, [1e-6] * 3)
    for bad in ({"probability": 0.0}, {"noise_multiplier": 0.0}, {"orders": []}, {"orders": [1.0]}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            IndividualRenyi(**{**given, **bad})
