"""Conditional composition against simulation, limits and exact posteriors."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import expit, logsumexp, ndtr

from dptrain.accounting.balls_in_bins.conditional_composition import (
    ConditionalComposition,
    ConditionalCompositionCurve,
    bin_means,
)
from dptrain.accounting.balls_in_bins.posterior_hazards import (
    event_count,
    hazard_log_odds,
    lower_quantiles,
    mixture_weights,
    steps,
)
from dptrain.accounting.balls_in_bins.renyi import BallsInBinsRenyi
from dptrain.accounting.losses import gaussian
from dptrain.accounting.renyi.gram import gram_matrix
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep, Poisson
from dptrain.strategies import BSR, Identity, SquareRoot
from dptrain.testing import AccountantContract
from scripts.paper.paper_budget import paper_budget_epsilon


def mechanism(strategy, bins, epochs, sigma):
    scheme = BallsInBins(bins=bins, epochs=epochs, dataset_size=10_000)
    return MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)


class TestBandedContract(AccountantContract):
    # δ_E is a power of two: the profile may find a better one than the guarantee's fixed rule.
    tolerance = 0.1

    def accountant(self):
        return ConditionalComposition()

    def mechanism(self):
        return mechanism(BSR(bands=2), 3, 2, 3.0)

    def refused_mechanism(self):
        scheme = Poisson(probability=0.1, dataset_size=100, steps=4)
        return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)


def random_means(rng):
    """Sparse, dense, and with many ties, in turn."""
    bins, length = int(rng.integers(1, 7)), int(rng.integers(1, 9))
    means = rng.random((bins, length))
    shape = int(rng.integers(3))
    if shape == 0:
        means *= rng.random(means.shape) < 0.5
    elif shape == 1:
        means = np.round(2 * means) / 2
    means[rng.integers(bins)] += 0.1
    return means


def log_likelihoods(y, means, sigma):
    """log N(y; m_i)/N(y; 0), shape (samples, b)."""
    return (y @ means.T - (means**2).sum(axis=1) / 2) / sigma**2


def draw(rng, means, sigma, count, *, remove):
    y = sigma * rng.standard_normal((count, means.shape[1]))
    return y + means[rng.integers(0, len(means), count)] if remove else y


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))])
def test_no_bound_lies_below_the_simulated_truth(seed):
    # 20 mechanisms a seed, 80 in all, both directions.
    rng = np.random.default_rng(seed)
    for _ in range(20):
        means, sigma, count = random_means(rng), float(np.exp(rng.uniform(-0.5, 1.5))), 40_000
        curve, grid = ConditionalCompositionCurve(means), np.array([0.0, 0.3, 1.0, 3.0])
        for remove in (True, False):
            y = draw(rng, means, sigma, count, remove=remove)
            loss = logsumexp(log_likelihoods(y, means, sigma), axis=1) - math.log(len(means))
            loss = loss if remove else -loss
            power = int(rng.choice([3, 8]))
            total = curve.composition(sigma, power, remove=remove).delta(grid)
            total = total + (2.0**-power if curve.events else 0.0)
            for at, claimed in zip(grid, total, strict=True):
                excess = -np.expm1(np.minimum(at - loss, 0.0))
                least = excess.mean() - 6.0 * excess.std() / math.sqrt(count)
                assert claimed >= least, (means, sigma, remove, at)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("failure", [0.3, 0.02])
def test_each_hazard_exceeds_its_bound_no_more_often_than_stated(failure, remove):
    rng, count, checked = np.random.default_rng(11), 20_000, 0
    allowed = failure + 6.0 * math.sqrt(failure / count)
    for _ in range(12):
        means, sigma = random_means(rng), float(np.exp(rng.uniform(-0.7, 0.7)))
        y = draw(rng, means, sigma, count, remove=remove)
        for n, step in enumerate(steps(means)):
            past = log_likelihoods(y[:, :n], means[:, :n], sigma)
            bounds = hazard_log_odds(step, sigma=sigma, failure=failure, remove=remove)
            for row, bound, equal, other in zip(
                step.rows, bounds, step.equal, step.other, strict=True
            ):
                log_odds = past[:, row] - logsumexp(past[:, equal | other], axis=1)
                assert (log_odds > bound + 1e-9).mean() <= allowed
                if not other.any():
                    np.testing.assert_allclose(log_odds, bound, atol=1e-9)
                checked += 1
    assert checked > 100


def test_quantiles_are_tight_for_two_bins():
    # L is exactly normal: N(±D/2, D) for distance D of the means, a mixture of both under remove.
    means, sigma, failure = np.array([[1.0, 0.0], [0.0, 1.0]]), 1.0, 1e-6
    walk = steps(means)
    next(walk)
    last = next(walk)
    assert last.rows.tolist() == [1]
    add = lower_quantiles(last, sigma=sigma, failure=failure, remove=False)
    # Past: μ_1 = 1, μ_2 = 0: L = y - 1/2.
    assert add[0] == pytest.approx(-0.5 - 4.753424, abs=1e-4)
    remove = lower_quantiles(last, sigma=sigma, failure=failure, remove=True)
    exact = brentq(lambda t: (ndtr(t + 0.5) + ndtr(t - 0.5)) / 2 - failure, -9.0, 0.0, xtol=1e-12)
    assert exact - 1e-4 <= remove[0] <= exact


@pytest.mark.parametrize("remove", [True, False])
def test_weights_dominate_the_posterior_whatever_the_order_of_ties(remove):
    # Where all hazards hold, the mass at and above every level is no more than claimed.
    rng, failure, count = np.random.default_rng(12), 1e-3, 4000
    for _ in range(10):
        means, sigma = random_means(rng), 1.0
        y = draw(rng, means, sigma, count, remove=remove)
        bad = np.zeros(count, bool)
        for n, step in enumerate(steps(means)):
            past = log_likelihoods(y[:, :n], means[:, :n], sigma)
            posterior = np.exp(past - logsumexp(past, axis=1, keepdims=True))
            bounds = hazard_log_odds(step, sigma=sigma, failure=failure, remove=remove)
            weights = mixture_weights(bounds)
            assert weights.sum() == pytest.approx(1.0, abs=1e-14)
            here = np.zeros(count, bool)
            for row, bound, lower in zip(step.rows, bounds, step.equal | step.other, strict=True):
                here |= past[:, row] - logsumexp(past[:, lower], axis=1) > bound
            bad |= here
            for level in np.unique(step.means):
                claimed = weights[1:][step.means[step.rows] >= level].sum()
                if level > step.means.min():
                    above = posterior[:, step.means >= level].sum(axis=1)
                    assert (above[~here] <= claimed + 1e-9).all()
        events = event_count(means)
        assert bad.mean() <= events * failure + 6 * math.sqrt(events * failure / count)


def test_one_bin_is_the_gaussian():
    made = mechanism(BSR(bands=3), 1, 4, 3.0)
    found = ConditionalComposition().guarantee(made, delta=1e-5).epsilon
    mu = math.sqrt(float(gram_matrix(made.strategy, steps=4, bins=1)[0, 0])) / 3.0
    # Half of δ is kept for hazards that one bin does not have.
    assert ConditionalComposition().curve(made).events == 0
    exact = gaussian.epsilon(1e-5, mu)
    assert exact <= found <= exact * (1 + 2e-4)


def test_one_step_needs_no_event():
    curve = ConditionalCompositionCurve(np.array([[0.0], [0.4], [1.0]]))
    assert curve.events == 0
    # The mixture itself, hence its exact δ: total variation at ε = 0 by the half line x > root.
    x = np.linspace(-12.0, 13.0, 400_001)
    q = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    p = q * np.mean([np.exp(x * m - m * m / 2) for m in (0.0, 0.4, 1.0)], axis=0)
    exact = float(np.maximum(p - q, 0.0).sum() * (x[1] - x[0]))
    for delta in curve.delta(1.0, np.array([0.0])):
        assert float(delta[0]) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize(("bands", "bins", "epochs"), [(1, 10, 1), (4, 10, 2), (10, 10, 1)])
def test_events_are_counted_above_the_least_level_only(bands, bins, epochs):
    strategy = BSR(bands=bands) if bands > 1 else Identity()
    means = bin_means(strategy.bind(bins * epochs), steps=bins * epochs, bins=bins)
    counts = [int(step.uncertain.sum()) for step in steps(means)]
    # Step 1 finds all bins alike; each step moves as many bins as there are bands.
    assert counts[0] == 0
    assert max(counts) == min(bands, bins - 1)
    assert event_count(means) == sum(counts)


def test_means_have_the_gram_matrix_of_the_scheme():
    strategy = SquareRoot().bind(12)
    means = bin_means(strategy, steps=12, bins=4)
    np.testing.assert_allclose(means @ means.T, gram_matrix(strategy, steps=12, bins=4), atol=1e-12)
    for n, step in enumerate(steps(means)):
        np.testing.assert_allclose(step.gram, means[:, :n] @ means[:, :n].T, atol=1e-12)


@pytest.mark.slow
def test_much_noise_beats_renyi_and_little_noise_does_not():
    made = mechanism(BSR(bands=4), 50, 1, 10.0)
    ours = ConditionalComposition().guarantee(made, delta=1e-5).epsilon
    assert ours < BallsInBinsRenyi().guarantee(made, delta=1e-5).epsilon


def test_independent_noise_is_close_to_poisson_with_inflated_rate():
    # C = I, one epoch: each step's mixture is (1-p, p) with p ≤ the bound of a likelihood ratio.
    means = np.eye(20)
    for remove in (True, False):
        for n, step in enumerate(steps(means)):
            bound = hazard_log_odds(step, sigma=2.0, failure=1e-8, remove=remove)
            # The past can at most show that bins before n were not taken: 1/(b - n) from above.
            assert 1 / 20 - 1e-12 <= expit(bound[0]) <= 1 / (20 - n) + 1e-12


def test_min_sep_that_always_takes_part_is_the_same():
    bins = mechanism(BSR(bands=2), 5, 2, 3.0)
    scheme = MinSep(probability=1.0, min_sep=5, steps=10, dataset_size=10_000, warm_start=True)
    rare = MatrixMechanism(scheme=scheme, strategy=BSR(bands=2), noise_multiplier=3.0)
    one, other = (ConditionalComposition().guarantee(m, delta=1e-5).epsilon for m in (bins, rare))
    assert one == other


def test_the_papers_budget_is_a_figure_not_a_guarantee():
    # One epoch: its union bound over all b-1 bins a step is looser than the level count.
    made = mechanism(BSR(bands=3), 8, 1, 4.0)
    ours = ConditionalComposition().guarantee(made, delta=1e-5).epsilon
    assert paper_budget_epsilon(made, delta=1e-5) >= ours * 0.98
    with pytest.raises(ValueError, match="noise"):
        paper_budget_epsilon(made.with_noise(0.0), delta=1e-5)
    with pytest.raises(ValueError, match="BallsInBins"):
        paper_budget_epsilon(TestBandedContract().refused_mechanism(), delta=1e-5)
