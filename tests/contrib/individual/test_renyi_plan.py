"""A filtered run keeps the bound of its plan too, although the filter's state is hidden."""

import itertools

import numpy as np
import pytest

from dptrain import MatrixMechanism, Poisson
from dptrain.accounting import Profile, profile
from dptrain.strategies import Identity
from tests.helpers.hidden_coins import HiddenRun, record_of

STEPS, EPSILONS = 2, (0.2, 0.6, 1.2)


def run_of(ratios, q, sigma):
    return HiddenRun(
        probability=q,
        sigma=sigma,
        steps=STEPS,
        ratios=ratios,
        edges=(-1.0, 0.0, 0.5, 1.0, 2.0),
        nodes=40,
    )


def plan_of(q, sigma) -> Profile:
    scheme = Poisson(probability=q, dataset_size=1, steps=STEPS)
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)
    return profile(mechanism, EPSILONS)


@pytest.mark.parametrize(("q", "sigma"), [(0.3, 1.0), (0.7, 1.3)])
def test_full_norms_without_a_filter_are_the_plan(q, sigma):
    """The brute force and the accountant agree, or the comparison below would say nothing."""
    plan = plan_of(q, sigma)
    found = [
        run_of(lambda history: (1.0,), q, sigma).hockey_sticks(
            record_of(1e9, q=q, sigma=sigma), epsilon
        )
        for epsilon in EPSILONS
    ]
    remove, add = np.transpose(found)
    np.testing.assert_allclose(remove, plan.remove, rtol=5e-3, atol=2e-5)
    np.testing.assert_allclose(add, plan.add, rtol=5e-3, atol=2e-5)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("personal", [None, 1.0, 1.5])
@pytest.mark.parametrize(("q", "sigma"), [(0.3, 1.0), (0.7, 1.3)])
def test_no_adaptive_filtered_run_exceeds_the_plan(q, sigma, personal):
    plan, rng = plan_of(q, sigma), np.random.default_rng(3)
    for _ in range(6):
        table = {
            history: tuple(rng.choice([0.0, 0.4, 0.8, 1.0], size=2))
            for length in range(STEPS)
            for history in itertools.product(range(6), repeat=length)
        }
        run = run_of(table.__getitem__, q, sigma)
        budget = float(rng.uniform(0.3, 2.5))
        for k, epsilon in enumerate(EPSILONS):
            record = record_of(budget, q=q, sigma=sigma, personal=personal)
            remove, add = run.hockey_sticks(record, epsilon)
            assert remove <= plan.remove[k] * 1.005 + 2e-5
            assert add <= plan.add[k] * 1.005 + 2e-5
