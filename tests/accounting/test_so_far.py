"""ε of the steps that have run: against other libraries, brute force, and the plan."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant
from scipy.optimize import brentq
from scipy.stats import norm

from dptrain import (
    BLT,
    BallsInBins,
    BandMF,
    ColumnNormalizedBandMF,
    CyclicPoisson,
    Identity,
    MatrixMechanism,
    MinSep,
    Poisson,
    Shuffled,
    Tree,
    account,
)
from dptrain.accounting import SoFar, epsilon_so_far, priced_steps

DELTA = 1e-5


def planned(scheme, strategy, sigma, **more):
    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)
    return mechanism, account(mechanism, delta=DELTA, **more)


@pytest.mark.parametrize(
    ("steps", "of", "place"), [(0, 100, 0), (1, 100, 5), (5, 100, 5), (6, 100, 10), (99, 100, 100)]
)
def test_places_are_twentieths_of_the_plan_rounded_up(steps, of, place):
    assert priced_steps(steps, of) == place


@pytest.mark.parametrize("of", [1, 3, 19, 20, 21, 333, 10_007])
def test_no_place_is_before_its_step_and_there_are_twenty_at_most(of):
    places = [priced_steps(steps, of) for steps in range(of + 1)]
    assert all(step <= place <= of for step, place in enumerate(places))
    assert places == sorted(places)
    assert places[0] == 0
    assert places[-1] == of
    assert len(set(places)) <= 21


@pytest.mark.slow
def test_the_cost_of_poisson_steps_is_that_of_dp_accounting():
    p, sigma, n = 0.02, 0.9, 200
    mechanism, plan = planned(Poisson(probability=p, dataset_size=5000, steps=n), Identity(), sigma)
    for steps, place in ((1, 10), (10, 10), (93, 100), (200, 200)):
        other = pld_privacy_accountant.PLDAccountant(value_discretization_interval=1e-4)
        step = dp_event.PoissonSampledDpEvent(p, dp_event.GaussianDpEvent(sigma))
        other.compose(dp_event.SelfComposedDpEvent(step, place))
        found = epsilon_so_far(mechanism, steps, planned=plan)
        assert found == pytest.approx(other.get_epsilon(DELTA), rel=2e-3), steps


def gaussian_epsilon(mu):
    """ε of μ-GDP at δ, from the definition."""

    def gap(eps):
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu) - DELTA

    return brentq(gap, 0, 500)


def test_whole_epochs_against_every_pattern():
    """Batches in a fixed order: the sensitivity of the epochs so far, of the leading block of C."""
    bins, epochs, sigma = 4, 5, 8.0
    scheme = Shuffled(batch_size=5, dataset_size=20, epochs=epochs, reshuffle=True)
    mechanism, plan = planned(scheme, BandMF(bands=3), sigma)
    n = bins * epochs
    dense = mechanism.strategy.columns(n, np.arange(n))
    for steps in (1, 4, 5, 8, 13):
        seen = -(-steps // bins)
        block = dense[: seen * bins, : seen * bins]
        worst = 0.0
        for picks in itertools.product(range(bins), repeat=seen):
            x = np.zeros(seen * bins)
            x[[epoch * bins + pick for epoch, pick in enumerate(picks)]] = 1
            worst = max(worst, float(np.linalg.norm(block @ x)))
        found = epsilon_so_far(mechanism, steps, planned=plan)
        assert found is not None
        # Never less than what the worst pattern needs; more only as patterns that cannot be count.
        assert found >= gaussian_epsilon(worst / sigma) * (1 - 1e-9)
        assert found < plan.epsilon


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "strategy"),
    [
        (Poisson(probability=0.05, dataset_size=1000, steps=60), Identity()),
        (CyclicPoisson(probability=0.2, cycle=4, dataset_size=1000, steps=60), BandMF(bands=4)),
        (BallsInBins(bins=10, epochs=6, dataset_size=1000), Identity()),
        (Shuffled(batch_size=100, dataset_size=1000, epochs=6), BLT(buffers=2)),
    ],
)
def test_it_grows_up_to_the_plan(scheme, strategy):
    mechanism, plan = planned(scheme, strategy, 2.0)
    found = [epsilon_so_far(mechanism, steps, planned=plan) for steps in range(scheme.steps + 1)]
    assert found[0] == 0.0
    assert found[-1] == plan.epsilon
    known = [value for value in found if value is not None]
    assert len(known) > scheme.steps // 2
    assert known == sorted(known)
    assert all(value <= plan.epsilon for value in known)
    assert found[1] < plan.epsilon / 1.5


def test_what_begins_otherwise_than_the_plan_has_no_cost_of_its_own():
    """Columns normalized for n steps, or nodes of a tree, are not those of a shorter run."""
    scheme = Shuffled(batch_size=25, dataset_size=100, epochs=4)
    for strategy in (ColumnNormalizedBandMF(bands=3), Tree()):
        mechanism, plan = planned(scheme, strategy, 5.0)
        assert mechanism.prefix(5) is None
        assert epsilon_so_far(mechanism, 5, planned=plan) is None


def test_nothing_is_simulated_for_it(monkeypatch):
    from dptrain.accounting.simulation import SimulatedAccountant

    scheme = MinSep(probability=0.05, min_sep=4, dataset_size=1000, steps=40)
    mechanism = MatrixMechanism(scheme=scheme, strategy=BandMF(bands=4), noise_multiplier=2.0)
    plan = account(mechanism, delta=DELTA, accountant="gaussian")
    monkeypatch.setattr(SimulatedAccountant, "guarantee", None)  # would raise
    found = epsilon_so_far(mechanism, 4, planned=plan)
    # One participation at most: |c| = 1 by construction, nothing amplifies it here.
    norm_of_c = float(np.linalg.norm(mechanism.strategy.columns(40, [0])))
    assert found == pytest.approx(gaussian_epsilon(norm_of_c / 2.0), rel=1e-6)


def test_no_noise_is_infinite():
    mechanism, plan = planned(Poisson(probability=0.1, dataset_size=100, steps=10), Identity(), 0.0)
    assert plan.epsilon == math.inf
    assert epsilon_so_far(mechanism, 3, planned=plan) is None
    assert epsilon_so_far(mechanism, 10, planned=plan) == math.inf


def test_arguments_are_checked():
    mechanism, plan = planned(Poisson(probability=0.1, dataset_size=100, steps=10), Identity(), 1.0)
    for steps in (-1, 11):
        with pytest.raises(ValueError, match="steps"):
            epsilon_so_far(mechanism, steps, planned=plan)
    with pytest.raises(TypeError, match="planned"):
        epsilon_so_far(mechanism, 1, planned=8.0)
    with pytest.raises(TypeError, match="mechanism"):
        epsilon_so_far("mechanism", 1, planned=plan)


def test_in_words():
    words = {"steps": 5, "steps_planned": 10}
    assert str(SoFar(**words, epsilon=1.234, planned=8.0)) == "ε 1.23 so far, 8 planned"
    assert str(SoFar(**words, epsilon=None, planned=8.0)) == "ε 8 planned"
    assert SoFar(**words, epsilon=None, planned=8.0).figures == {"epsilon_planned": 8.0}
    assert SoFar(**words, epsilon=None, planned=None).figures == {}
