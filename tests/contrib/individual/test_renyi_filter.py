"""The Rényi filter: known step counts, refusals, and whole runs under Poisson sampling."""

import math

import numpy as np
import pytest

from dptrain import (
    BallsInBins,
    BandMF,
    CyclicPoisson,
    MatrixMechanism,
    MinSep,
    Poisson,
    account,
)
from dptrain.accounting.renyi.sampled_step import step_divergence
from dptrain.core.guarantee import Kind
from dptrain.individual import IndividualFilter, RenyiFilter
from dptrain.strategies import Identity

DELTA = 1e-5


def renyi(epsilon=4.0, delta=DELTA, max_steps=1000, **options):
    return RenyiFilter(target_epsilon=epsilon, target_delta=delta, max_steps=max_steps, **options)


def poisson(q=0.3, size=24, steps=10, sigma=2.0):
    scheme = Poisson(probability=q, dataset_size=size, steps=steps)
    return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)


# Known numbers ----------------------------------------------------------------------------------


def best_at_integer_orders(epsilon, delta, sigma, orders):
    """⌊max_α B_α 2σ²/α⌋ by the textbook formulas (Canonne et al., Prop. 12; Mironov 2017)."""
    return math.floor(
        max(
            (epsilon + (math.log(delta * (a - 1)) - a * math.log1p(-1 / a)) / (a - 1))
            * 2 * sigma**2 / a
            for a in orders
        )
    )  # fmt: skip


@pytest.mark.parametrize("personal", [None, 1.0])
def test_405_full_norm_steps_are_admitted_and_not_one_more(personal):
    mechanism = poisson(q=1.0, size=2, steps=500, sigma=100.0)
    individual = renyi(0.8, personal_clipping=personal)
    assert best_at_integer_orders(0.8, DELTA, 100.0, range(2, 33)) == 405
    assert individual.full_norm_steps(mechanism) == 405
    record = individual.record(mechanism)
    for step in range(500):
        shares = record.admit(step=step, part=0, indices=np.arange(2), ratios=np.ones(2))
        record.commit(step, 1)
        assert shares.tolist() == ([1.0, 1.0] if step < 405 else [0.0, 0.0])
    assert record.active_counts == [2] * 405 + [0] * 95
    assert record.epsilons(DELTA).max() <= record.epsilon_bound(DELTA) <= 0.8


def test_finer_orders_admit_no_406th_step():
    mechanism = poisson(q=1.0, size=2, steps=405, sigma=100.0)
    for order in np.arange(20.0, 23.0, 0.01):
        assert renyi(0.8, order=float(order)).full_norm_steps(mechanism) <= 405


@pytest.mark.parametrize(
    ("epsilon", "q", "sigma"), [(0.1, 0.05, 10.0), (1.0, 0.02, 1.5), (8.0, 0.01, 0.6), (30, 0.5, 1)]
)
def test_the_chosen_order_is_nearly_the_best(epsilon, q, sigma):
    mechanism = poisson(q=q, sigma=sigma, steps=1)
    chosen = renyi(epsilon)
    order = chosen.order_for(mechanism)
    assert renyi(epsilon, order=order).full_norm_steps(mechanism) == chosen.full_norm_steps(
        mechanism
    )

    def steps(a):
        budget = chosen.budget_at(a)
        return budget / float(step_divergence(1.0, order=a, probability=q, sigma=sigma))

    best = max(
        steps(order * factor) for factor in np.arange(0.8, 1.25, 0.002) if order * factor > 1
    )
    assert steps(order) > 0.99 * best


def test_guarantee_is_the_budgets_where_the_plan_is_larger():
    mechanism = poisson(steps=200)
    individual = renyi(2.0, delta=1e-3, max_steps=200)
    record = individual.record(mechanism)
    planned = account(mechanism, delta=1e-3)
    stated = individual.state(planned, record)
    assert planned.epsilon > 2.0 >= stated.epsilon > 1.999999
    assert stated.kind is Kind.UPPER_BOUND
    assert stated.accountant == "individual Rényi filter"
    assert "not drawn" in stated.notes[0]
    # At another δ, the same (α, B).
    assert record.epsilon_bound(1e-6) > 2.0
    loose = renyi(90.0, delta=1e-3, max_steps=200)
    assert loose.state(planned, loose.record(mechanism)).epsilon == planned.epsilon


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"order": 1.0}, ValueError, "order=1.0"),
        ({"order": 0}, ValueError, "order"),
        ({"order": math.nan}, ValueError, "order"),
        ({"order": math.inf}, ValueError, "order"),
        ({"order": "8"}, TypeError, "order"),
        ({"order": True}, TypeError, "order"),
        ({"order": 1.5}, ValueError, "no Rényi budget"),
        ({"epsilon": 1e-4}, ValueError, "no Rényi budget"),
        ({"personal_clipping": 0.99}, ValueError, "personal_clipping=0.99"),
        ({"personal_clipping": math.nan}, ValueError, "personal_clipping"),
        ({"personal_clipping": math.inf}, ValueError, "personal_clipping"),
        ({"personal_clipping": "1"}, TypeError, "personal_clipping"),
        ({"personal_clipping": True}, TypeError, "personal_clipping"),
        ({"max_steps": math.inf}, ValueError, "a bound on the number of steps"),
        ({"epsilon": 0.0}, ValueError, "epsilon"),
        ({"delta": 1.0}, ValueError, "delta"),
    ],
)
def test_bad_settings_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        renyi(**options)


@pytest.mark.parametrize("q", [0.3, 1.0])
def test_other_schemes_and_correlated_noise_are_refused(q):
    size, steps = 24, 8
    for scheme in (
        BallsInBins(bins=4, dataset_size=size, epochs=2),
        MinSep.for_batch_size(batch_size=2, dataset_size=size, min_sep=3, steps=steps),
        CyclicPoisson(probability=q, dataset_size=size, steps=steps, cycle=2),
    ):
        mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=2.0)
        with pytest.raises(ValueError, match=f"scheme={type(scheme).__name__}"):
            renyi().record(mechanism)
    cut = Poisson(probability=q, dataset_size=size, steps=steps, max_batch_size=24)
    mechanism = MatrixMechanism(scheme=cut, strategy=Identity(), noise_multiplier=2.0)
    with pytest.raises(
        ValueError, match="max_batch_size=24: individual filters are not proven for"
    ):
        renyi().record(mechanism)
    scheme = Poisson(probability=q, dataset_size=size, steps=steps)
    banded = MatrixMechanism(scheme=scheme, strategy=BandMF(bands=2), noise_multiplier=2.0)
    with pytest.raises(ValueError, match="strategy=BandMF"):
        renyi().record(banded)


def test_more_steps_no_noise_and_a_budget_below_one_step_are_refused():
    with pytest.raises(ValueError, match="max_steps=9"):
        renyi(max_steps=9).record(poisson(steps=10))
    with pytest.raises(ValueError, match="noise_multiplier=0"):
        renyi().record(poisson(sigma=0.0))
    with pytest.raises(ValueError, match="noise_multiplier"):
        renyi().full_norm_steps(poisson(sigma=1e-9))
    for individual, q in ((renyi(0.5), 0.3), (renyi(0.5, personal_clipping=1.0), 1.0)):
        with pytest.raises(ValueError, match="does not cover one step of the full norm"):
            individual.record(poisson(q=q, sigma=0.5))
    # Full batches: norms are known before the decision, and small ones may fit.
    record = renyi(0.5).record(poisson(q=1.0, sigma=0.5, size=2))
    shares = record.admit(step=0, part=0, indices=np.arange(2), ratios=np.array([1.0, 0.01]))
    assert shares.tolist() == [0.0, 1.0]


def test_is_written_and_read():
    individual = renyi(order=8, personal_clipping=2)
    assert RenyiFilter.from_dict(individual.to_dict()) == individual
    assert IndividualFilter.from_dict(renyi().to_dict()) == renyi()
    assert individual.to_dict()["order"] == 8.0
