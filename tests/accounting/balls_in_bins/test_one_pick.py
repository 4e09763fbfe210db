"""The PLD of one pick per epoch: between bounds from below, quadrature, limits and simulation."""

import functools
import itertools
import math

import numpy as np
import pytest
from scipy.special import logsumexp, ndtr

from dptrain.accounting.balls_in_bins.lognormal_means import (
    LogMean,
    lognormal,
    mean_of_lognormals,
    mixed,
)
from dptrain.accounting.balls_in_bins.one_pick import AllocationCurve, AllocationPLD
from dptrain.accounting.balls_in_bins.renyi import BallsInBinsRenyi
from dptrain.accounting.dispatch import account
from dptrain.accounting.losses import gaussian
from dptrain.accounting.unamplified import UnsampledGaussian
from dptrain.core.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep, Poisson, RandomAllocation
from dptrain.strategies import BSR, BandMF, Dense, Identity
from dptrain.testing import AccountantContract
from tests.oracles.allocation_lower import deltas_from_below, epsilons_from_below, law_from_below


def fresh(*, bins, epochs, sigma, participations=1, strategy=None):
    scheme = RandomAllocation(
        steps_per_epoch=bins, participations=participations, epochs=epochs, dataset_size=5_000
    )
    return MatrixMechanism(scheme=scheme, strategy=strategy or Identity(), noise_multiplier=sigma)


def kept(*, bins, epochs, sigma, strategy=None):
    scheme = BallsInBins(bins=bins, epochs=epochs, dataset_size=5_000)
    return MatrixMechanism(scheme=scheme, strategy=strategy or Identity(), noise_multiplier=sigma)


def equal(bins, epochs=1):
    return AllocationCurve(((((1.0, bins),), epochs),))


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


class TestRandomAllocation(AccountantContract):
    def accountant(self):
        return AllocationPLD()

    def mechanism(self):
        return fresh(bins=10, epochs=3, sigma=1.5)

    def refused_mechanism(self):
        return fresh(bins=20, epochs=3, sigma=1.5, strategy=BSR(bands=2))


class TestSeveralPicks(TestRandomAllocation):
    def mechanism(self):
        return fresh(bins=10, epochs=2, sigma=1.5, participations=3)


class TestBallsInBins(AccountantContract):
    def accountant(self):
        return AllocationPLD()

    def mechanism(self):
        return kept(bins=8, epochs=3, sigma=1.5)

    def refused_mechanism(self):
        return kept(bins=12, epochs=3, sigma=1.5, strategy=BSR(bands=2))


# The published brackets of Feldman & Shenfeld at δ = 1e-5, and the cell of the bound from below.
@pytest.mark.sample(every=9)
@pytest.mark.parametrize(
    ("sigma", "bracket", "spacing"),
    [(1.0, (0.6176, 0.6239), 0.01), (2.0, (0.1712, 0.1750), 0.005), (0.6, (3.4303, 3.4320), 0.02)],
)
def test_is_within_the_published_brackets_and_within_our_own(sigma, bracket, spacing):
    found = equal(100).epsilons(sigma, 1e-5)
    assert bracket[0] <= found[0] <= bracket[1]
    least = epsilons_from_below(law_from_below([(1 / sigma, 100)], spacing), 1e-5)
    for upper, lower in zip(found, least, strict=True):
        assert lower <= upper <= lower * (1 + 1.5e-3)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    "groups", [[(0.7, 3)], [(1.3, 7)], [(0.5, 2), (1.0, 3)], [(0.1, 4), (1.5, 1)], [(0.2, 33)]]
)
def test_lies_just_above_a_bound_from_below(groups):
    spacing = 0.01 * max(ratio for ratio, _ in groups)
    law = law_from_below(groups, spacing)
    curve = AllocationCurve(((tuple(groups), 1),))
    scale = curve.epsilons(1.0, 1e-6)
    grid = max(scale) * np.array([0.0, 0.2, 0.5, 0.8])
    found = np.transpose(curve.delta(1.0, grid))
    least = np.array([deltas_from_below(law, epsilon) for epsilon in grid])
    # What the two grids differ by, at values of δ from 1 to 1e-6 (below, 0 is a fine lower bound).
    assert (found >= least).all()
    assert (found <= least * (1 + 1e-2) + 1e-7).all()


def by_quadrature(ratios, epsilon):
    """δ(ε) in both directions: two variables on a grid of normals, the last in closed form."""
    *outer, last = ratios
    z = np.linspace(-13.0, 13.0, 1301)
    density = np.exp(-(z**2) / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    total, weight = np.zeros(1), np.ones(1)
    for ratio in outer:
        total = np.add.outer(total, np.exp(ratio * z - ratio**2 / 2)).ravel()
        weight = np.multiply.outer(weight, density).ravel()

    def call(strike):  # E[(e^{rZ - r²/2} - K)_+]
        safe = np.maximum(strike, 1e-300)
        d = np.log(safe) / last + last / 2
        return np.where(strike > 0, ndtr(last - d) - safe * ndtr(-d), 1.0 - strike)

    def put(strike):
        safe = np.maximum(strike, 1e-300)
        d = np.log(safe) / last + last / 2
        return np.where(strike > 0, safe * ndtr(d) - ndtr(d - last), 0.0)

    t = len(ratios)
    return (
        float(weight @ call(t * math.exp(epsilon) - total)) / t,
        float(weight @ put(t * math.exp(-epsilon) - total)) / t * math.exp(epsilon),
    )


@pytest.mark.parametrize("ratios", [(0.8,), (0.8, 0.8), (1.4, 0.6), (1.0, 1.0, 1.0)])
def test_equals_quadrature(ratios):
    norms, counts = np.unique(ratios, return_counts=True)
    curve = AllocationCurve(((tuple(zip(norms.tolist(), counts.tolist(), strict=True)), 1),))
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        found = np.ravel(curve.delta(1.0, np.array([epsilon])))
        truth = np.array(by_quadrature(ratios, epsilon))
        assert (found >= truth * (1 - 1e-9)).all()
        assert (found <= truth * (1 + 1e-3)).all()


@pytest.mark.parametrize("epochs", [1, 5])
@pytest.mark.parametrize("sigma", [0.7, 3.0, 1e4])
def test_one_step_an_epoch_is_the_gaussian(epochs, sigma):
    curve, mu = equal(1, epochs), math.sqrt(epochs) / sigma
    grid = mu * np.array([0.0, 0.3, 1.0, 4.0])
    for found in curve.delta(sigma, grid):
        np.testing.assert_allclose(found, gaussian.delta(grid, mu), rtol=1e-3)
    for delta in (1e-2 * mu, 1e-6 * mu):
        truth = gaussian.epsilon(delta, mu)
        assert equal(1, epochs).epsilon(sigma, delta) == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize(
    ("bins", "epochs", "sigma"), [(10, 2, 1.0), (4, 3, 0.7), (20, 3, 0.5), (2, 2, 1.5)]
)
def test_agrees_with_simulation(bins, epochs, sigma):
    grid = np.array([0.0, 0.2, 0.7, 2.0])
    samples = 60_000
    lower = simulated_delta(
        bins=bins, epochs=epochs, sigma=sigma, epsilon=grid, samples=samples, seed=bins
    )
    for found, least in zip(equal(bins, epochs).delta(sigma, grid), lower, strict=True):
        assert (found >= least).all()
        # ``least`` is the mean less six standard errors, each at most √(mean/samples).
        assert (found <= least + 12 * np.sqrt(found / samples)).all()


@functools.cache
def small_law():
    return mean_of_lognormals(((0.9, 5),))


@pytest.mark.slow
def test_mass_and_mean_are_kept():
    """E_Q[P/Q] = 1, after every step, up to the padding of 1e-12 a variable."""
    single = lognormal(0.9, 0.02)
    for law, count in (
        (single, 1),
        (mixed(single, single, 0.5), 2),
        (mixed(single, single, 0.5, 2), 2),
        (mixed(mixed(single, single, 0.5), single, 2 / 3), 3),
        (single.refined(3), 1),
        (small_law(), 5),
        (mean_of_lognormals(((1e-6, 6),)), 6),
        (mean_of_lognormals(((15.0, 6),)), 6),
        (mean_of_lognormals(((0.4, 61), (2.0, 13))), 74),
    ):
        assert 1.0 <= law.mean <= 1.0 + 2e-12 * count
        assert 1.0 <= law.mass.sum() + law.zero <= 1.0 + 2e-12 * count
        assert 0.0 < law.infinity < 1e-34
        assert 0.0 < law.zero < 1e-33


@pytest.mark.parametrize("weight", [0.5, 0.3, 0.9])
@pytest.mark.parametrize("refine", [1, 2])
@pytest.mark.parametrize("spacing", [0.3, 0.01])
def test_mixing_spreads_every_pair(weight, refine, spacing):
    """Against all pairs of points, by the integrals of hinges, which span the convex order."""
    rng = np.random.default_rng(3)
    laws = [
        LogMean(spacing, low, rng.dirichlet(np.ones(size)) * 0.9, 0.1, 0.2)
        for low, size in ((-30, 70), (-8, 55))
    ]
    values = [np.append(np.exp(law.logs), 0.0) for law in laws]
    masses = [np.append(law.mass, law.zero) for law in laws]
    pairs = np.add.outer(weight * values[0], (1 - weight) * values[1]).ravel()
    mass = np.outer(*masses).ravel()
    for first, second, total in (
        (laws[0], laws[1], (pairs, mass)),
        (
            laws[0],
            laws[0],
            (
                np.add.outer(weight * values[0], (1 - weight) * values[0]).ravel(),
                np.outer(masses[0], masses[0]).ravel(),
            ),
        ),
    ):
        law = mixed(first, second, weight, refine)
        assert law.spacing == spacing / refine
        points, spread = np.append(np.exp(law.logs), 0.0), np.append(law.mass, law.zero)
        assert spread.sum() == pytest.approx(1.0, rel=1e-12)
        assert law.infinity == pytest.approx(0.2, rel=1e-12)
        assert spread @ points == pytest.approx(total[0] @ total[1], rel=1e-12)
        for strike in np.exp(np.linspace(-10.0, 12.0, 60)) * (spacing if spacing < 0.1 else 1.0):
            truth = total[1] @ np.maximum(total[0] - strike, 0.0)
            found = spread @ np.maximum(points - strike, 0.0)
            assert found >= truth * (1 - 1e-12) - 1e-15
            # A split adds at most a cell, (e^h - 1) of the strike, to a hinge; one with 0 at most
            # the lowest point.
            assert found <= truth + strike * math.expm1(2 * spacing) + 0.2 * points[0]


@pytest.mark.slow
def test_composition_of_the_law_equals_all_pairs():
    """Two epochs: δ of the sum of losses, over all pairs of grid points."""
    law = mean_of_lognormals(((0.5, 2),))
    logs, mass = law.logs, law.mass
    curve = AllocationCurve(((((0.5, 2),), 2),))
    for epsilon in (0.0, 0.4, 1.5):
        remove = add = 0.0
        for log, weight in zip(logs, mass, strict=True):
            total = log + logs
            remove += weight * float(mass @ np.maximum(np.exp(total) - math.exp(epsilon), 0.0))
            add += weight * float(mass @ np.maximum(1.0 - np.exp(epsilon + total), 0.0))
        found = np.ravel(curve.delta(1.0, np.array([epsilon])))
        np.testing.assert_allclose(found, (remove, add), rtol=1e-6)


def test_kept_bins_only_scale_the_noise():
    once = AllocationPLD().guarantee(kept(bins=30, epochs=1, sigma=1.0), delta=1e-6)
    often = AllocationPLD().guarantee(kept(bins=30, epochs=4, sigma=2.0), delta=1e-6)
    assert often.epsilon == pytest.approx(once.epsilon, rel=1e-9)
    new = AllocationPLD().guarantee(fresh(bins=30, epochs=1, sigma=1.0), delta=1e-6)
    assert new.epsilon == once.epsilon


def test_a_scaled_strategy_scales_the_noise():
    strategy = BandMF(bands=1, coefficients=(3.0,))
    scaled, plain = (
        AllocationPLD().guarantee(mechanism, delta=1e-5).epsilon
        for mechanism in (
            fresh(bins=30, epochs=2, sigma=6.0, strategy=strategy),
            fresh(bins=30, epochs=2, sigma=2.0),
        )
    )
    assert scaled == pytest.approx(plain, rel=1e-9)


def test_unequal_bins():
    """A periodic run that stops within an epoch: some bins have a participation more."""
    scheme = MinSep(probability=1.0, min_sep=8, dataset_size=1000, steps=20, warm_start=True)
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=2.0)
    curve = AllocationPLD().curve(mechanism)
    assert curve.blocks == ((((math.sqrt(2.0), 4), (math.sqrt(3.0), 4)), 1),)
    found = AllocationPLD().guarantee(mechanism, delta=1e-5).epsilon
    ends = [
        AllocationPLD().guarantee(kept(bins=8, epochs=e, sigma=2.0), delta=1e-5).epsilon
        for e in (2, 3)
    ]
    assert ends[0] < found < ends[1]
    diagonal = Dense(matrix=np.diag([1.0, 2.0, 1.0, 2.0, 1.0, 2.0]))
    assert AllocationPLD().curve(kept(bins=3, epochs=2, sigma=1.0, strategy=diagonal)).blocks == (
        (((math.sqrt(5.0), 3),), 1),
    )


@pytest.mark.slow
def test_more_costs_and_less_pays():
    sigmas = [equal(9, 4).epsilons(s, 1e-5) for s in (0.4, 0.5, 1.0, 2.0, 8.0)]
    bins = [equal(b, 4).epsilons(1.0, 1e-5) for b in (1, 2, 7, 8, 20, 50)]
    epochs = [equal(9, e).epsilons(1.0, 1e-5) for e in (16, 4, 2, 1)]
    for falling in (sigmas, bins, epochs):
        assert (np.diff(falling, axis=0) < 0).all()


@pytest.mark.sample(every=16)
@pytest.mark.parametrize(
    ("bins", "epochs", "sigma"),
    [(3, 1, 0.01), (12, 10, 0.1), (3, 1, 0.5), (12, 10, 5.0), (3, 1, 1e3), (12, 10, 1e6)],
)
def test_never_worse_than_the_other_bounds(bins, epochs, sigma):
    mechanism = fresh(bins=bins, epochs=epochs, sigma=sigma)
    delta = min(1e-6, 1e-4 / sigma)
    found = AllocationPLD().guarantee(mechanism, delta=delta).epsilon
    # A bound may coincide with the truth; the grid's error is far less than 1e-3.
    limit = UnsampledGaussian().guarantee(mechanism, delta=delta).epsilon
    assert found <= limit * (1 + 1e-3) + 1e-9
    together = kept(bins=bins, epochs=epochs, sigma=sigma)
    found = AllocationPLD().guarantee(together, delta=delta).epsilon
    assert found <= BallsInBinsRenyi().guarantee(together, delta=delta).epsilon * (1 + 1e-3) + 1e-9


def test_too_little_noise_is_an_upper_bound_only():
    mechanism = fresh(bins=10, epochs=1, sigma=0.01)
    shown = AllocationPLD().guarantee(mechanism, delta=1e-6)
    assert shown.kind is Kind.UPPER_BOUND
    assert shown.epsilon == gaussian.epsilon(1e-6, 100.0)
    louder = AllocationPLD().guarantee(mechanism.with_noise(0.1), delta=1e-6)
    assert louder.kind is Kind.EXACT


def test_deep_tails_fall_to_what_is_cut_off():
    grid = np.array([1.0, 8.0, 14.0, 25.0])
    for found in equal(20, 3).delta(1.5, grid):
        assert (np.diff(np.log(found)) < -5).all() or found[-1] < 1e-33
        assert 0 < found[-1] < 1e-33


def test_refusals_name_the_remedy():
    accountant = AllocationPLD()
    poisson_like = MinSep(probability=0.5, min_sep=4, dataset_size=100, steps=12, warm_start=True)
    refused = {
        "bands=1": fresh(bins=20, epochs=2, sigma=1.0, strategy=BSR(bands=2)),
        "same noise at every step": fresh(
            bins=2, epochs=2, sigma=1.0, strategy=Dense(matrix=np.diag([1.0, 1.0, 1.0, 2.0]))
        ),
        "in 20 ways": kept(
            bins=20, epochs=1, sigma=1.0, strategy=Dense(matrix=np.diag(np.arange(1.0, 21.0)))
        ),
        "it needs RandomAllocation, BallsInBins": MatrixMechanism(
            scheme=poisson_like, strategy=Identity(), noise_multiplier=1.0
        ),
    }
    for words, mechanism in refused.items():
        assert words in accountant.refusal(mechanism)


def ratios_of_subsets(likelihoods, picks):
    """dP/dQ of a uniform k-subset: the mean over all subsets of the products of likelihoods."""
    subsets = itertools.combinations(range(likelihoods.shape[1]), picks)
    return np.mean([likelihoods[:, list(each)].prod(axis=1) for each in subsets], axis=0)


def ratios_of_blocks(likelihoods, sizes):
    """dP/dQ of one pick from each block."""
    pieces = np.split(likelihoods, np.cumsum(sizes)[:-1], axis=1)
    return np.prod([piece.mean(axis=1) for piece in pieces], axis=0)


def deltas_under_q(ratio, epsilon):
    """Means and standard errors of both directions' δ, from draws of dP/dQ under Q."""
    found = []
    for terms in (
        np.maximum(ratio[:, None] - np.exp(epsilon), 0.0),
        np.maximum(1.0 - np.exp(epsilon) * ratio[:, None], 0.0),
    ):
        found.append((terms.mean(axis=0), terms.std(axis=0) / math.sqrt(len(ratio))))
    return found


@pytest.mark.sample(every=5)
@pytest.mark.parametrize(
    ("steps", "picks", "epochs", "sigma"),
    [
        (3, 2, 1, 1.0),
        (4, 2, 1, 0.8),
        (5, 2, 1, 1.5),
        (5, 3, 2, 2.0),
        (6, 4, 1, 1.2),
        (7, 3, 1, 0.9),
    ],
)
def test_several_picks_lie_between_all_subsets_and_their_blocks(steps, picks, epochs, sigma):
    """No less than what all subsets lose, and just what the blocks of the theorem do."""
    rng = np.random.default_rng(100 * steps + picks)
    epsilon = np.array([0.0, 0.2, 0.7, 1.5])
    truth, blocks = np.ones(400_000), np.ones(400_000)
    sizes = [steps // picks + 1] * (steps % picks) + [steps // picks] * (picks - steps % picks)
    for _ in range(epochs):
        z = rng.standard_normal((truth.size, steps))
        likelihoods = np.exp(z / sigma - 0.5 / sigma**2)
        truth *= ratios_of_subsets(likelihoods, picks)
        blocks *= ratios_of_blocks(likelihoods, sizes)
    profile = AllocationPLD().profile(
        fresh(bins=steps, epochs=epochs, sigma=sigma, participations=picks), epsilon
    )
    assert profile.kind is Kind.UPPER_BOUND
    for found, (true, spread), (blocked, error) in zip(
        (profile.remove, profile.add),
        deltas_under_q(truth, epsilon),
        deltas_under_q(blocks, epsilon),
        strict=True,
    ):
        assert (true[:2] > 50 * spread[:2]).all()  # the comparison means something
        assert (found >= true - 6 * spread).all()
        np.testing.assert_array_less(np.abs(found - blocked), 6 * error + 1e-3 * blocked)


def test_several_picks_at_the_ends():
    # All steps: nothing is random.
    grid = np.array([0.0, 0.5, 3.0])
    for found in (
        AllocationPLD().curve(fresh(bins=6, epochs=2, sigma=1.0, participations=6)).delta(3.0, grid)
    ):
        np.testing.assert_allclose(found, gaussian.delta(grid, math.sqrt(12) / 3.0), rtol=1e-12)
    # k that divide t: k times as many epochs of t/k steps.
    some = AllocationPLD().guarantee(
        fresh(bins=12, epochs=2, sigma=1.0, participations=3), delta=1e-6
    )
    same = AllocationPLD().guarantee(fresh(bins=4, epochs=6, sigma=1.0), delta=1e-6)
    assert some.epsilon == same.epsilon
    # Between the neighbors that do divide.
    low, middle, high = (
        AllocationPLD()
        .guarantee(fresh(bins=bins, epochs=2, sigma=1.0, participations=3), delta=1e-6)
        .epsilon
        for bins in (15, 13, 12)
    )
    assert low < middle < high


def test_several_picks_are_far_below_no_amplification():
    """Poisson sampling at the same rate is no theorem's bound here, but what to expect."""
    mechanism = fresh(bins=100, epochs=5, sigma=1.5, participations=4)
    found = account(mechanism, delta=1e-6)
    poisson = MatrixMechanism(
        scheme=Poisson(probability=0.04, dataset_size=5_000, steps=500),
        strategy=Identity(),
        noise_multiplier=1.5,
    )
    assert found.accountant == "allocation-pld"
    assert found.epsilon < 1.05 * account(poisson, delta=1e-6).epsilon
    assert found.epsilon < 0.5 * UnsampledGaussian().guarantee(mechanism, delta=1e-6).epsilon
