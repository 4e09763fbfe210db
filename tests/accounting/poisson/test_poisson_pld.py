"""Poisson PLD against quadrature, the Gaussian limit and dp_accounting's accountants."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant, privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant

from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.composition import Composition
from dptrain.accounting.losses.subsampled_gaussian import subsampled_gaussian
from dptrain.accounting.poisson.curves import SubsampledGaussianCurve
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.core.guarantee import Adjacency, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep, Poisson
from dptrain.strategies import BandMF, Dense, Identity
from dptrain.testing import AccountantContract


def compose(probability, sigma, count, remove):
    single = subsampled_gaussian(probability=probability, sigma=sigma, count=count, remove=remove)
    return Composition(single, count)


def loss_at(x, p, sigma):
    return mpmath.log(1 - p + p * mpmath.exp((2 * x - 1) / (2 * sigma**2)))


def one_step_delta(epsilon, p, sigma, remove):
    """δ by the closed form: the loss is monotone in x, so the region is a half line."""
    with mpmath.workdps(40):
        p, sigma, sign = mpmath.mpf(p), mpmath.mpf(sigma), 1 if remove else -1
        inner = (mpmath.exp(sign * epsilon) - (1 - p)) / p
        if inner <= 0:
            return 0.0
        x = sigma**2 * mpmath.log(inner) + mpmath.mpf(1) / 2
        # Remove: x to the right of the point; add: to the left.
        q = mpmath.ncdf(-sign * x / sigma)
        moved = mpmath.ncdf(-sign * (x - 1) / sigma)
        upper, lower = (1 - p) * q + p * moved, q
        if not remove:
            upper, lower = lower, upper
        return float(upper - mpmath.exp(epsilon) * lower)


def two_step_delta(epsilon, p, sigma, remove):
    """δ of two steps: trapezoids over the first step's x of the closed form for the second.

    The integrand is smooth and falls like a Gaussian: at a tenth of σ trapezoids have all digits.
    """
    with mpmath.workdps(25):

        def integrand(x):
            loss = loss_at(x, p, sigma)
            density = mpmath.npdf(x, 0, sigma)
            if remove:
                density = (1 - p) * density + p * mpmath.npdf(x, 1, sigma)
            left = epsilon - (loss if remove else -loss)
            return density * signed_delta(left)

        def signed_delta(e):
            sign = 1 if remove else -1
            inner = (mpmath.exp(sign * e) - (1 - p)) / p
            if inner <= 0:
                # Every x (remove) or none (add) has a loss above e.
                return 1 - mpmath.exp(e) if remove else mpmath.mpf(0)
            x = sigma**2 * mpmath.log(inner) + mpmath.mpf(1) / 2
            q, moved = mpmath.ncdf(-sign * x / sigma), mpmath.ncdf(-sign * (x - 1) / sigma)
            mix = (1 - p) * q + p * moved
            return mix - mpmath.exp(e) * q if remove else q - mpmath.exp(e) * mix

        step = mpmath.mpf(sigma) / 10
        return float(step * mpmath.fsum(integrand(step * i) for i in range(-120, 141)))


@pytest.mark.parametrize(("p", "sigma"), [(0.5, 1.0), (0.01, 0.7), (0.2, 3.0)])
@pytest.mark.parametrize("remove", [True, False])
def test_one_step_matches_the_closed_form(p, sigma, remove):
    composition = compose(p, sigma, 1, remove)
    for delta in (1e-2, 1e-5, 1e-8, 1e-12):
        epsilon = composition.epsilon(delta)
        if epsilon == 0.0:
            assert one_step_delta(0.0, p, sigma, remove) <= delta
            assert composition.delta(0.0) <= delta
            continue
        assert one_step_delta(epsilon, p, sigma, remove) <= delta * (1 + 1e-9)
        assert one_step_delta(epsilon - 3e-4, p, sigma, remove) >= delta
        assert composition.delta(epsilon) == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize("remove", [True, False])
def test_two_steps_match_quadrature(remove):
    p, sigma = 0.3, 1.5
    composition = compose(p, sigma, 2, remove)
    for epsilon in (0.1, 0.5, composition.epsilon(1e-12)):
        exact = two_step_delta(epsilon, p, sigma, remove)
        assert exact * (1 - 1e-9) <= float(composition.delta(epsilon)) <= exact * 1.005


@pytest.mark.parametrize("count", [1, 30, 4000])
def test_without_subsampling_it_is_the_gaussian(count):
    mu = 0.8
    for remove in (True, False):
        composition = compose(1.0, math.sqrt(count) / mu, count, remove)
        for delta in (0.2, 1e-5, 1e-12, 1e-30):
            exact = gaussian.epsilon(delta, mu)
            assert exact - 1e-9 <= composition.epsilon(delta) <= exact * (1 + 1e-5) + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "sigma", "steps"), [(0.01, 1.0, 1000), (0.1, 2.0, 100), (0.001, 0.5, 500)]
)
def test_agrees_with_dp_accounting(p, sigma, steps):
    # dp_accounting's PLD is pessimistic too (grid 1e-4): ours may be below it, by little.
    event = dp_event.SelfComposedDpEvent(
        dp_event.PoissonSampledDpEvent(p, dp_event.GaussianDpEvent(sigma)), steps
    )
    theirs = pld_privacy_accountant.PLDAccountant().compose(event)
    curve = SubsampledGaussianCurve(p, steps, 1.0)
    for delta in (1e-4, 1e-7):
        other = theirs.get_epsilon(delta)
        assert curve.epsilon(sigma, delta) == pytest.approx(other, rel=1e-3)
    rdp = rdp_privacy_accountant.RdpAccountant().compose(event)
    assert curve.epsilon(sigma, 1e-5) < rdp.get_epsilon(1e-5)
    optimistic = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=p, pessimistic_estimate=False, use_connect_dots=False
    ).self_compose(steps)
    assert curve.epsilon(sigma, 1e-5) >= optimistic.get_epsilon_for_delta(1e-5)


@pytest.mark.slow
def test_rare_large_losses_fit_into_memory():
    # Nearly every step loses nothing: a window sized by the standard deviation is 1e9 cells wide.
    p, sigma, steps, delta = 1e-6, 0.3, 1000, 1e-7
    ours = SubsampledGaussianCurve(p, steps, 1.0).epsilon(sigma, delta)
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=p, value_discretization_interval=1e-4
    ).self_compose(steps)
    assert one_step_delta(ours, p, sigma, remove=True) <= delta
    assert ours == pytest.approx(theirs.get_epsilon_for_delta(delta), rel=1e-3)


def test_both_directions_are_reported_and_differ():
    remove, add = SubsampledGaussianCurve(0.1, 50, 1.0).delta(1.0, np.array([0.5, 2.0]))
    assert (add < remove).all()


def test_min_sep_of_one_is_poisson_and_scale_does_not_matter():
    poisson = Poisson(probability=0.05, dataset_size=1000, steps=60)
    rare = MinSep(probability=0.05, min_sep=1, dataset_size=1000, steps=60, warm_start=False)
    answers = [
        PoissonPLD()
        .guarantee(
            MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.1), delta=1e-6
        )
        .epsilon
        for scheme, strategy in [(poisson, Identity()), (rare, Identity())]
    ]
    assert answers[0] == answers[1]
    one_band = MatrixMechanism(scheme=poisson, strategy=BandMF(bands=1), noise_multiplier=1.1)
    # A diagonal c_0·I with noise σ is the identity with noise σ/c_0.
    c0 = float(one_band.strategy.column_norms(60)[0])
    scaled = PoissonPLD().guarantee(one_band.with_noise(1.1 * c0), delta=1e-6).epsilon
    assert scaled == pytest.approx(answers[0], rel=1e-6)


def test_refuses_other_pairs_by_reason():
    bins = BallsInBins(bins=10, epochs=2, dataset_size=100)
    refused = MatrixMechanism(scheme=bins, strategy=Identity(), noise_multiplier=1.0)
    assert "Poisson" in (PoissonPLD().refusal(refused) or "")


def test_a_curve_of_cut_batches_is_refused_by_itself_too():
    """Nothing but the accountant stands between the theorem and a scheme that it is not about."""
    scheme = MinSep(probability=0.1, min_sep=1, dataset_size=100, steps=10, max_batch_size=12)
    cut = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"poisson-pld: .*max_batch_size"):
        PoissonPLD().curve(cut)


def test_refuses_noise_that_varies_from_step_to_step():
    # Its own composition would be tighter; calling the largest column's "exact" would be wrong.
    poisson = Poisson(probability=0.1, dataset_size=100, steps=2)
    for diagonal, refused in ((np.diag([1.0, 0.5]), True), (np.diag([0.5, 0.5]), False)):
        strategy = Dense(matrix=diagonal)
        mechanism = MatrixMechanism(scheme=poisson, strategy=strategy, noise_multiplier=1.0)
        assert ("diagonal" in (PoissonPLD().refusal(mechanism) or "")) == refused


# --- other adjacencies -------------------------------------------------------------------------


class TestContractOfAddRemove(AccountantContract):
    def accountant(self):
        return PoissonPLD(adjacency=Adjacency.ADD_REMOVE)

    nominal_size: int | None = 900

    def mechanism(self):
        return poisson_of(0.02, 300, 1.0, nominal_size=self.nominal_size)

    def refused_mechanism(self):
        return poisson_of(0.02, 300, 1.0, BandMF(bands=2), nominal_size=self.nominal_size)


class TestContractOfReplaceOne(TestContractOfAddRemove):
    nominal_size = None  # the number of examples is public

    def accountant(self):
        return PoissonPLD(adjacency=Adjacency.REPLACE_ONE)


def poisson_of(p, steps, sigma, strategy=None, nominal_size=None):
    scheme = Poisson(probability=p, dataset_size=1000, steps=steps, nominal_size=nominal_size)
    return MatrixMechanism(scheme=scheme, strategy=strategy or Identity(), noise_multiplier=sigma)


@pytest.mark.sample(every=13)
@pytest.mark.parametrize(
    ("p", "steps", "sigma"), [(0.01, 300, 0.8), (0.3, 20, 3.0), (1.0, 5, 4.0), (1e-3, 1000, 0.6)]
)
def test_replace_one_agrees_with_dp_accounting(p, steps, sigma):
    single = privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        sampling_prob=p,
        value_discretization_interval=1e-4,
        neighboring_relation=privacy_loss_distribution.NeighborRel.REPLACE_ONE,
    )
    theirs = single.self_compose(steps)
    member = PoissonPLD(adjacency=Adjacency.REPLACE_ONE)
    for delta in (1e-3, 1e-7):
        found = member.guarantee(poisson_of(p, steps, sigma), delta=delta).epsilon
        assert found == pytest.approx(theirs.get_epsilon_for_delta(delta), rel=2e-3)
    found = member.profile(poisson_of(p, steps, sigma), [0.5, 1.0])
    np.testing.assert_array_equal(found.remove, found.add)


@pytest.mark.parametrize(("p", "sigma"), [(0.2, 0.7), (0.9, 2.0)])
def test_replace_one_of_one_step_by_integration(p, sigma):
    x = np.arange(-1 - 12 * sigma, 1 + 12 * sigma, sigma * 1e-4)
    cell = 1e-4 / math.sqrt(2 * math.pi)
    plain = np.exp(-0.5 * (x / sigma) ** 2)
    dense = [(1 - p) * plain + p * np.exp(-0.5 * ((x - m) / sigma) ** 2) for m in (1.0, -1.0)]
    epsilons = np.array([0.0, 0.3, 1.0, 2.0])
    exact = [cell * np.maximum(dense[0] - np.exp(e) * dense[1], 0.0).sum() for e in epsilons]
    found = PoissonPLD(adjacency=Adjacency.REPLACE_ONE).profile(poisson_of(p, 1, sigma), epsilons)
    for direction in (found.remove, found.add):
        assert (direction >= np.array(exact) * (1 - 1e-6)).all()
        np.testing.assert_allclose(direction, exact, rtol=1e-3)


def test_add_remove_is_zero_out_with_settings_that_do_not_read_the_number():
    public = poisson_of(0.02, 50, 1.0)
    private = poisson_of(0.02, 50, 1.0, nominal_size=900)
    found = PoissonPLD(adjacency=Adjacency.ADD_REMOVE).guarantee(private, delta=1e-6)
    assert found.epsilon == PoissonPLD().guarantee(public, delta=1e-6).epsilon
    assert found.adjacency is Adjacency.ADD_REMOVE
    assert found.kind is Kind.EXACT
    assert any("every setting stays" in note for note in found.notes)
