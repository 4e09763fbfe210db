"""k picks out of t steps: against enumeration of all subsets, quadrature, and known ends."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.special import ndtr

from dptrain.accounting import account, accountants_for, calibrate
from dptrain.accounting.balls_in_bins.one_pick import AllocationPLD
from dptrain.accounting.balls_in_bins.subset_means import (
    _logarithmic,
    _plain,
    log_subset_means,
    means_by_numpy,
    rounding,
)
from dptrain.accounting.losses import gaussian
from dptrain.contrib.accountants.several_picks import SubsetLosses
from dptrain.contrib.accountants.several_picks_importance import AllocationImportance
from dptrain.contrib.accountants.several_picks_terms import RoundedTilt, TailMixture
from dptrain.core.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Poisson, RandomAllocation
from dptrain.strategies import BandMF, Identity
from dptrain.testing import AccountantContract
from tests.helpers.plain_means import means


def made(*, bins, picks, epochs=1, sigma, strategy=None, size=5_000) -> MatrixMechanism:
    scheme = RandomAllocation(
        steps_per_epoch=bins, participations=picks, epochs=epochs, dataset_size=size
    )
    return MatrixMechanism(scheme=scheme, strategy=strategy or Identity(), noise_multiplier=sigma)


class TestAllocationImportance(AccountantContract):
    """Seeds are fixed: what passes once passes always."""

    simulated = True
    delta = 1e-4

    def accountant(self):
        return AllocationImportance(seed=11, progress=False, max_samples=60_000)

    def mechanism(self):
        return made(bins=6, picks=3, sigma=1.5)

    def refused_mechanism(self):
        return made(bins=6, picks=1, sigma=1.5)


def over_all_subsets(numbers, picks):
    """The mean of the products, by enumeration."""
    subsets = itertools.combinations(range(len(numbers)), picks)
    return np.mean([numbers[list(each)].prod(axis=0) for each in subsets], axis=0)


@pytest.mark.parametrize(
    ("count", "picks"), [(1, 1), (5, 1), (5, 2), (6, 3), (6, 5), (7, 7), (9, 6)]
)
@pytest.mark.parametrize("spread", [1e-3, 1.0, 20.0])
def test_means_equal_the_enumeration(count, picks, spread) -> None:
    logs = spread * np.random.default_rng(count + picks).standard_normal((count, 40))
    truth = np.log(over_all_subsets(np.exp(logs), picks))
    bound = rounding(count, picks, float(np.abs(logs).max()))
    assert bound < 1e-9
    np.testing.assert_allclose(log_subset_means(logs, picks), truth, rtol=1e-13, atol=bound)


@pytest.mark.parametrize(("count", "picks"), [(3, 1), (40, 5), (33, 33), (200, 40)])
def test_three_ways_to_compute_a_mean_agree(count, picks) -> None:
    logs = 0.8 * np.random.default_rng(count).standard_normal((count, 37))
    bound = rounding(count, picks, float(np.abs(logs).max()))
    plain = np.log(means_by_numpy(np.exp(logs), picks))
    np.testing.assert_allclose(_plain(logs, picks), plain, rtol=0, atol=bound)
    np.testing.assert_allclose(_logarithmic(logs, picks), plain, rtol=0, atol=bound)


def test_numbers_too_far_apart_for_doubles() -> None:
    """One number of e^500 among ones of e^-500: two picks are its product with one of those."""
    logs = np.full((6, 3), -500.0)
    logs[2] = 500.0
    logs[:, 2] = 1.0  # a sample that is not extreme stands beside those that are
    found = log_subset_means(logs, 2)
    # 5 of the 15 pairs hold it; the other ten are negligible.
    np.testing.assert_allclose(found[:2], math.log(5 / 15), atol=1e-9)
    assert found[2] == pytest.approx(2.0, abs=1e-12)
    # Three picks: 10 of 20 triples hold it.
    np.testing.assert_allclose(log_subset_means(logs[:, :2], 3), math.log(0.5) - 500.0, atol=1e-9)


def by_quadrature(bins, picks, sigma, epsilon):
    """δ (remove, add) at ε of one epoch, by a grid over all but the last coordinate.

    Given the others, e_k is linear in the last number w: a + b·w, and both expectations of its
    positive parts have a closed form.
    """
    z = np.linspace(-10.0, 10.0, 1201)
    density = np.exp(-(z**2) / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    ratio = 1.0 / sigma
    number = np.exp(ratio * z - ratio**2 / 2)
    mesh = np.meshgrid(*[number] * (bins - 1), indexing="ij")
    weight = np.ones(mesh[0].shape)
    for axis in range(bins - 1):
        shape = [1] * (bins - 1)
        shape[axis] = -1
        weight = weight * density.reshape(shape)
    subsets = math.comb(bins, picks)

    def elementary(order):
        each = itertools.combinations(mesh, order)
        return sum((np.prod(chosen, axis=0) for chosen in each), np.zeros(weight.shape))

    without = elementary(picks) / subsets
    slope = (elementary(picks - 1) if picks > 1 else np.ones(weight.shape)) / subsets
    scale = math.exp(epsilon)

    def excess(level):  # E[(b w - level)_+]
        safe = np.maximum(level / slope, 1e-300)
        d = np.log(safe) / ratio + ratio / 2
        return np.where(level > 0, slope * ndtr(ratio - d) - level * ndtr(-d), slope - level)

    remove = float((weight * excess(scale - without)).sum())
    # (1 - e^ε A)_+ = e^ε (e^{-ε} - A)_+ and (x)_+ = (-x)_+ + x.
    level = math.exp(-epsilon) - without
    add = scale * float((weight * (excess(level) + level - slope)).sum())
    return remove, add


TINY = [(2, 1, 1.0), (2, 2, 0.9), (3, 1, 0.8), (3, 2, 0.7), (3, 2, 1.3), (3, 3, 1.0)]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("bins", "picks", "sigma"), TINY)
def test_blocks_are_never_below_the_quadrature(bins, picks, sigma) -> None:
    for epsilon in (0.0, 0.5, 1.5):
        truth = by_quadrature(bins, picks, sigma, epsilon)
        curve = AllocationPLD().curve(made(bins=bins, picks=picks, sigma=sigma))
        for found, least in zip(curve.delta(sigma, np.array([epsilon])), truth, strict=True):
            assert found[0] >= least * (1 - 1e-6)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("bins", "picks", "sigma"), TINY)
def test_losses_have_the_mean_of_the_quadrature(bins, picks, sigma) -> None:
    losses = SubsetLosses.of(made(bins=bins, picks=picks, sigma=sigma))
    drawn = losses.draw([sigma], "both", np.random.default_rng(7), 200_000)[:, 0]
    for epsilon in (0.0, 0.5, 1.5):
        for side, truth in enumerate(by_quadrature(bins, picks, sigma, epsilon)):
            terms = np.maximum(-np.expm1(epsilon - drawn[side]), 0.0)
            assert abs(terms.mean() - truth) < 6 * terms.std() / math.sqrt(terms.size) + 1e-7


def test_losses_of_several_sigmas_are_those_of_each() -> None:
    losses = SubsetLosses(7, 3, 2, 1.5)
    together = losses.draw([1.0, 2.0], "both", np.random.default_rng(1), 50)
    for at, sigma in enumerate((1.0, 2.0)):
        for side, direction in enumerate(("remove", "add")):
            alone = losses.draw([sigma], direction, np.random.default_rng(1), 50)
            np.testing.assert_array_equal(together[side, at], alone[0])
    assert np.isinf(losses.draw([0.05], "both", np.random.default_rng(1), 5)).all()


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(
    ("bins", "picks", "epochs", "sigma", "epsilon"),
    [(3, 2, 1, 0.7, 4.0), (3, 2, 1, 1.3, 2.0), (3, 1, 1, 1.0, 2.0), (3, 3, 1, 1.0, 5.0)],
)
def test_terms_stay_below_their_ceiling_and_have_the_true_mean(
    bins, picks, epochs, sigma, epsilon
) -> None:
    mechanism = made(bins=bins, picks=picks, epochs=epochs, sigma=sigma)
    bounds = AllocationImportance().law(mechanism)
    truth = by_quadrature(bins, picks, sigma, epsilon)[0]
    at = bounds._tilted.at(sigma)
    for terms in (at.remove(epsilon), at.of(epsilon, 1.0, 0.3), at.of(epsilon, 3.0, 0.1)):
        drawn = terms.draw(np.random.default_rng(3), 100_000)
        assert (drawn >= 0.0).all()
        assert drawn.max() <= terms.ceiling
        assert abs(drawn.mean() - truth) < 6 * drawn.std() / math.sqrt(drawn.size) + 1e-7
    assert at.remove(epsilon).ceiling < 0.3


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(
    ("bins", "picks", "epochs", "sigma", "epsilon"),
    [(8, 3, 2, 1.5, 2.0), (6, 4, 3, 3.0, 1.0), (40, 5, 1, 1.0, 2.0), (5, 5, 2, 3.0, 2.0)],
)
def test_terms_agree_with_plain_losses(bins, picks, epochs, sigma, epsilon) -> None:
    bounds = AllocationImportance().law(made(bins=bins, picks=picks, epochs=epochs, sigma=sigma))
    terms = bounds.terms(sigma)(epsilon)["remove"]
    drawn = terms.draw(np.random.default_rng(3), 60_000)
    assert drawn.max() <= terms.ceiling < 0.9
    losses = SubsetLosses(bins, picks, epochs, 1.0)
    plain = losses.draw([sigma], "remove", np.random.default_rng(4), 200_000)[0]
    stick = np.maximum(-np.expm1(epsilon - plain), 0.0)
    error = math.hypot(drawn.std() / math.sqrt(drawn.size), stick.std() / math.sqrt(stick.size))
    assert stick.mean() > 12 * stick.std() / math.sqrt(stick.size)  # there is something to see
    assert abs(drawn.mean() - stick.mean()) < 6 * error + 1e-7


@pytest.mark.parametrize("shift", [0.0, 1.2])
def test_the_mixture_is_the_tilted_normal(shift) -> None:
    """Shares of cells and the total weight against a sum over a fine grid."""
    steps = RoundedTilt.of(1.2, 1.5, 0.4)
    mixture = TailMixture(steps, shift)
    y = np.linspace(-12.0, 14.0, 2_000_001)
    weight = np.exp(steps.log_h(y) - (y - shift) ** 2 / 2) * (y[1] - y[0]) / math.sqrt(2 * math.pi)
    assert math.exp(mixture.log_total) == pytest.approx(weight.sum(), rel=1e-4)
    rng = np.random.default_rng(2)
    normals = rng.standard_normal((20, 10_000))
    mixture.replace_some(normals, rng)
    edges = shift + np.array([-8.0, -1.0, 0.0, 0.7, 1.5, 2.5, 9.0])
    found = np.histogram(normals + shift, edges)[0] / normals.size
    truth = np.histogram(y, edges, weights=weight / weight.sum())[0]
    assert (np.abs(found - truth) < 6 * np.sqrt(truth / normals.size)).all()
    beyond = mixture.beyond_top(rng, 1000) + shift
    assert (beyond >= steps.top - 1e-9).all()


def test_steps_lie_above_the_exponential_and_near_it() -> None:
    ratio, log_cap, rate = 0.8, 2.0, 0.5
    y = np.linspace(-6.0, 8.0, 5001)
    capped = rate * np.minimum(np.exp(ratio * y - ratio**2 / 2), math.exp(log_cap))
    found = RoundedTilt.of(ratio, log_cap, rate).log_h(y)
    # A step is .4 % of w; below the first one h is constant.
    assert (found >= capped * (1 - 2e-9)).all()
    assert (found <= capped * 1.00401 + rate * math.exp(-4.0)).all()


@pytest.mark.parametrize("sigma", [1.5, 3.0])
def test_all_steps_are_the_gaussian(sigma) -> None:
    """k = t: nothing is random. The certified ε lies between the truth and the bound by blocks."""
    mechanism = made(bins=4, picks=4, sigma=sigma)
    truth = gaussian.epsilon(1e-5, 2.0 / sigma)
    found = AllocationImportance(seed=1, progress=False).guarantee(mechanism, delta=1e-5)
    assert truth * (1 - 1e-9) <= found.epsilon <= truth * (1 + 1e-3)
    losses = SubsetLosses(4, 4, 1, 1.0).draw([sigma], "remove", np.random.default_rng(0), 100_000)
    assert abs(losses.mean() - 2.0 / sigma**2) < 6 * (2.0 / sigma) / math.sqrt(losses.size)


def test_one_pick_is_the_exact_law() -> None:
    mechanism = made(bins=20, picks=1, sigma=1.0)
    exact = AllocationPLD().profile(mechanism, [0.0, 0.5, 1.0])
    estimate = means(SubsetLosses.of(mechanism), 1.0, [0.0, 0.5, 1.0], samples=300_000, seed=5)
    # The exact account is rounded up by some 1e-4 of ε.
    assert (np.abs(estimate.remove - exact.remove) < 6 * estimate.remove_error + 2e-4).all()
    assert (np.abs(estimate.add - exact.add) < 6 * estimate.add_error + 2e-4).all()
    assert "allocation-pld" in AllocationImportance().refusal(mechanism)


def test_certified_epsilon_is_between_the_truth_and_the_blocks() -> None:
    """Here blocks cost 5 % of ε. The truth at the certified ε is found by another sampler."""
    mechanism = made(bins=100, picks=10, sigma=1.0)
    blocks = AllocationPLD().guarantee(mechanism, delta=1e-4).epsilon
    found = AllocationImportance(seed=2, progress=False, max_samples=60_000).guarantee(
        mechanism, delta=1e-4
    )
    assert found.kind is Kind.CONFIDENCE
    assert found.epsilon <= blocks / 1.01
    value, error = shifted_estimate(100, 10, 1.0, found.epsilon, draws=30_000)
    assert value - 6 * error < 1e-4
    deeper, error = shifted_estimate(100, 10, 1.0, found.epsilon / 1.06, draws=30_000)
    assert deeper + 6 * error > 1e-4


def shifted_estimate(bins, picks, sigma, epsilon, *, draws):
    """δ_remove and its standard error, from picks whose mean is shifted further, by hand."""
    rng, ratio = np.random.default_rng(8), 1.0 / sigma
    y = rng.standard_normal((bins, draws))
    y[:picks] += ratio
    moved = rng.random((picks, draws)) < 0.2  # each picked step is shifted by 1.5 or not
    y[:picks] += 1.5 * moved
    over = y[:picks] - ratio
    density = np.log(0.8 + 0.2 * np.exp(1.5 * over - 1.5**2 / 2)).sum(axis=0)
    numbers = np.exp(ratio * y - ratio**2 / 2)
    elementary = np.zeros((picks + 1, draws))
    elementary[0] = 1.0
    for each in numbers:
        elementary[1:] += each * elementary[:-1]
    loss = np.log(elementary[picks]) - math.log(math.comb(bins, picks))
    terms = np.maximum(-np.expm1(epsilon - loss), 0.0) * np.exp(-density)
    return terms.mean(), terms.std() / math.sqrt(draws)


@pytest.mark.slow
def test_calibration_leaves_a_certificate_that_is_found_again(tmp_path) -> None:
    scheme = made(bins=24, picks=6, sigma=1.0).scheme
    member = AllocationImportance(cache=tmp_path, seed=4, max_samples=40_000, progress=False)
    found = calibrate(
        scheme=scheme, strategy=Identity(), epsilon=6.0, delta=1e-4, accountant=member
    )
    blocks = calibrate(scheme=scheme, strategy=Identity(), epsilon=6.0, delta=1e-4)
    assert blocks.guarantee.accountant == "allocation-pld"
    assert found.guarantee.kind is Kind.VERIFIED
    assert found.mechanism.noise_multiplier < blocks.mechanism.noise_multiplier
    assert found.guarantee.delta == 1e-4
    (certificate,) = list(tmp_path.iterdir())
    written = certificate.read_bytes()
    other = AllocationImportance(
        cache=tmp_path, seed=5, max_samples=40_000, progress=False, recheck=True
    )
    again = calibrate(scheme=scheme, strategy=Identity(), epsilon=6.0, delta=1e-4, accountant=other)
    assert again.mechanism == found.mechanism
    assert certificate.read_bytes() == written


def test_blocks_answer_by_themselves_and_samples_by_name() -> None:
    mechanism = made(bins=20, picks=4, sigma=1.0)
    reasons = {each.name: each.reason for each in accountants_for(mechanism)}
    assert reasons["allocation-pld"] is None
    assert "allocation-pld" in reasons["allocation-importance"]
    assert account(mechanism, delta=1e-5).accountant == "allocation-pld"
    assert AllocationImportance().refusal(mechanism) is None
    other = MatrixMechanism(
        scheme=Poisson(probability=0.1, dataset_size=100, steps=10),
        strategy=Identity(),
        noise_multiplier=1.0,
    )
    assert AllocationImportance().refusal(other) == "it needs RandomAllocation"


def test_a_scaled_strategy_scales_the_noise() -> None:
    strategy = BandMF(bands=1, coefficients=(3.0,))
    scaled = AllocationImportance().law(made(bins=9, picks=2, sigma=3.0, strategy=strategy))
    plain = AllocationImportance().law(made(bins=9, picks=2, sigma=1.0))
    first, second = (law.terms(sigma)(2.0) for law, sigma in ((scaled, 3.0), (plain, 1.0)))
    for direction in ("remove", "add"):
        assert first[direction].ceiling == pytest.approx(second[direction].ceiling, rel=1e-9)
