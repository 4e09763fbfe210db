import warnings

import numpy as np
import pytest

from dptrain.accounting import Profile, account, accountants_for, calibrate, profile
from dptrain.accounting.unamplified import UnsampledGaussian
from dptrain.core.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep, Poisson
from dptrain.strategies import BSR, Identity

POISSON = Poisson(probability=0.02, dataset_size=2000, steps=100)
BINS = BallsInBins(bins=10, epochs=2, dataset_size=2000)


def mechanism(scheme=POISSON, strategy=None, sigma=1.0):
    return MatrixMechanism(scheme=scheme, strategy=strategy or Identity(), noise_multiplier=sigma)


def test_chooses_by_the_pair():
    assert account(mechanism(), delta=1e-5).accountant == "poisson-pld"
    assert account(mechanism(), delta=1e-5).kind is Kind.EXACT
    found = account(mechanism(BINS, BSR(bands=2), 2.0), delta=1e-5)
    # Samples better what is proven, and answer where nothing is exact.
    assert (found.accountant, found.kind) == ("balls-in-bins-importance", Kind.CONFIDENCE)
    rare = MinSep(probability=0.1, min_sep=4, dataset_size=2000, steps=40)
    members = {a.name: a.reason for a in accountants_for(mechanism(rare, BSR(bands=2)))}
    assert members["min-sep-importance"] is None
    assert "Poisson" in members["poisson-pld"]


def test_tightest_of_two_wins():
    both = MinSep(probability=1.0, min_sep=1, dataset_size=2000, steps=5)
    assert sum(a.reason is None for a in accountants_for(mechanism(both))) >= 2
    found = account(mechanism(both, sigma=3.0), delta=1e-5)
    options = [
        account(mechanism(both, sigma=3.0), delta=1e-5, accountant=name).epsilon
        for name in ("poisson-pld", "balls-in-bins-renyi")
    ]
    assert found.epsilon <= min(options) * (1 + 1e-5)  # an exact one is asked alone: its grid


def test_unknown_pair_raises_and_lists_what_is_supported():
    scheme = Poisson(probability=0.02, dataset_size=2000, steps=100, max_batch_size=60)
    pair = mechanism(scheme, BSR(bands=3))
    with pytest.raises(ValueError, match="Poisson with strategy BSR") as caught:
        account(pair, delta=1e-5)
    message = str(caught.value)
    for part in ("--support", "poisson-pld: it needs", "gaussian", "balls-in-bins-renyi: "):
        assert part in message
    with pytest.raises(ValueError, match="no accountant covers"):
        calibrate(scheme=scheme, strategy=BSR(bands=3), epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="no accountant covers"):
        profile(pair)
    assert account(pair, delta=1e-5, accountant="gaussian").epsilon > 0


def test_gaussian_is_offered_by_name_and_is_never_tighter_here():
    for item in (mechanism(), mechanism(BINS, BSR(bands=2), 2.0)):
        plain = account(item, delta=1e-5, accountant="gaussian")
        assert plain.kind is Kind.UPPER_BOUND
        assert plain.epsilon >= account(item, delta=1e-5).epsilon
    by_object = account(mechanism(), delta=1e-5, accountant=UnsampledGaussian())
    assert by_object == account(mechanism(), delta=1e-5, accountant="gaussian")
    with pytest.raises(ValueError, match=r"did you mean gaussian\?"):
        account(mechanism(), delta=1e-5, accountant="gausian")
    with pytest.raises(ValueError, match="does not cover"):
        account(mechanism(BINS), delta=1e-5, accountant="poisson-pld")


def test_exactly_one_of_delta_and_epsilon():
    for options in ({}, {"delta": 1e-5, "epsilon": 1.0}):
        with pytest.raises(ValueError, match="exactly one"):
            account(mechanism(), **options)


def test_delta_at_epsilon_is_the_inverse():
    shown = account(mechanism(), delta=1e-6)
    back = account(mechanism(), epsilon=shown.epsilon)
    assert back.epsilon == shown.epsilon
    assert back.delta == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize("scheme", [POISSON, BINS])
def test_no_noise(scheme):
    silent = mechanism(scheme, sigma=0.0)
    assert account(silent, delta=1e-5).epsilon == np.inf
    assert account(silent, epsilon=3.0).delta == 1.0
    np.testing.assert_array_equal(profile(silent).delta, 1.0)


@pytest.mark.slow
def test_default_profile_covers_the_interesting_range():
    found = profile(mechanism(BINS, BSR(bands=2), 2.0))
    assert isinstance(found, Profile)
    assert found.epsilon[0] == 0.0
    assert found.delta[0] > 1e-2
    assert found.delta[-1] <= 1e-12


@pytest.mark.sample(every=5)
@pytest.mark.parametrize(("scheme", "epsilon"), [(POISSON, 8.0), (BINS, 0.5)])
def test_calibrates_to_the_target(scheme, epsilon):
    found = calibrate(scheme=scheme, strategy=Identity(), epsilon=epsilon, delta=1e-5)
    assert found.guarantee.epsilon <= epsilon
    assert found.guarantee.mechanism_hash == found.mechanism.hash
    assert account(found.mechanism, delta=1e-5) == found.guarantee
    louder = found.mechanism.with_noise(found.mechanism.noise_multiplier * (1 - 2e-4))
    assert account(louder, delta=1e-5).epsilon > epsilon


@pytest.mark.slow
def test_bad_targets():
    for epsilon in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="epsilon"):
            calibrate(scheme=POISSON, strategy=Identity(), epsilon=epsilon, delta=1e-5)
    for delta in (0.0, 1.0, 2.0, float("nan")):
        with pytest.raises(ValueError, match="delta"):
            calibrate(scheme=POISSON, strategy=Identity(), epsilon=1.0, delta=delta)
    with pytest.warns(UserWarning, match=r"1/N = 0.0005"):
        calibrate(scheme=POISSON, strategy=Identity(), epsilon=1.0, delta=1e-3)


def test_unreachable_target_says_what_is_reachable():
    with pytest.raises(ValueError, match=r"σ = 1e\+06 gives ε = .*larger epsilon"):
        calibrate(
            scheme=POISSON, strategy=Identity(), epsilon=1e-12, delta=1e-12, accountant="gaussian"
        )


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("scheme", [POISSON, BINS], ids=["one accountant", "several"])
def test_who_asks_is_warned_of_a_large_delta_once(scheme):
    for ask in (
        lambda: account(mechanism(scheme), delta=0.1),
        lambda: calibrate(scheme=scheme, strategy=Identity(), epsilon=1.0, delta=0.1),
    ):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ask()
        assert [(each.category, each.filename) for each in told] == [(UserWarning, __file__)]
