"""Budgets, step counts and bookkeeping of the GDP filter, against known numbers and Alg. 1."""

import math
import warnings

import numpy as np
import pytest
import torch

from dptrain import MatrixMechanism, Poisson, account
from dptrain.accounting.losses import gaussian
from dptrain.core.guarantee import Kind
from dptrain.individual import GDPFilter, IndividualFilter
from dptrain.reporting.report import privacy_report
from dptrain.strategies import Identity
from tests.helpers.engine import images, small_net, train
from tests.helpers.individual_runs import filtered

DELTA = 1e-5
BUDGETS = {
    0.5: 0.142211,
    1.0: 0.268051,
    2.75: 0.665942,
    4.0: 0.924931,
    8.0: 1.666031,
    10.0: 2.000446,
}


def gdp(epsilon=1.0, delta=DELTA, max_steps=1000, **options):
    return GDPFilter(target_epsilon=epsilon, target_delta=delta, max_steps=max_steps, **options)


def full_batches(size, steps, sigma):
    scheme = Poisson(probability=1.0, dataset_size=size, steps=steps)
    return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)


@pytest.mark.parametrize(("epsilon", "budget"), BUDGETS.items())
def test_budgets_are_the_known_ones(epsilon, budget):
    assert gdp(epsilon).budget == pytest.approx(budget, abs=1e-6)


def drive(record, ratios):
    """One step in which every example has the norm ratio given; returns the shares."""
    size = record.size
    ratios = np.broadcast_to(np.asarray(ratios, float), (size,)).copy()
    shares = record.admit(step=record.steps, part=0, indices=np.arange(size), ratios=ratios)
    record.commit(record.steps, 1)
    return shares


def test_478_full_norm_steps_are_admitted_and_not_one_more():
    mechanism = full_batches(3, 600, 100.0)
    individual = gdp(0.8)
    record = individual.record(mechanism)
    admitted = [float(drive(record, 1.0)[0]) for _ in range(600)]
    assert admitted == [1.0] * 478 + [0.0] * 122
    assert individual.full_norm_steps(mechanism) == 478
    assert record.active_counts == [3] * 478 + [0] * 122
    # Only 0.3 of a full-norm step is left: a gradient that is small enough still fits.
    left = math.sqrt(individual.budget**2 * 100.0**2 - 478)
    assert drive(record, left * 1.0001)[0] == 0
    assert drive(record, left * 0.9999)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 10, 477, 100_000])
def test_calibrated_noise_admits_the_steps_it_was_asked_for(steps):
    individual = gdp(3.0, max_steps=200_000)
    mechanism = full_batches(1, steps, individual.noise_multiplier(steps))
    assert individual.full_norm_steps(mechanism) == steps
    record = individual.record(mechanism)
    assert all(drive(record, 1.0)[0] == 1 for _ in range(steps))
    assert drive(record, 1.0)[0] == 0
    with pytest.raises(ValueError, match="full_norm_steps=0"):
        individual.noise_multiplier(0)


@pytest.mark.parametrize("full_consumption", [False, True])
def test_random_histories_are_those_of_algorithm_1(full_consumption):
    """Norms below, at and above R, at random; shares and sums by an independent loop."""
    rng = np.random.default_rng(0)
    size, steps, sigma = 40, 60, 3.0
    individual = gdp(2.0, full_consumption=full_consumption)
    record = individual.record(full_batches(size, steps, sigma))
    squares = np.zeros(size)
    returned = 0
    out = np.zeros(size, bool)
    for _ in range(steps):
        ratios = np.minimum(rng.lognormal(-0.5, 1.0, size), 1.0)
        shares = drive(record, ratios)
        expected_shares = np.zeros(size)
        for i, ratio in enumerate(ratios):
            cost, left = (ratio / sigma) ** 2, record.budget**2 - squares[i]
            expected = 1.0 if cost <= left else 0.0
            if cost > left and full_consumption:
                expected = math.sqrt(max(left, 0.0) / cost)
            expected_shares[i] = expected
            squares[i] += shares[i] ** 2 * cost
            if 0 < shares[i] < 1:
                squares[i] = record.budget**2
            returned += bool(out[i] and shares[i])
            out[i] = shares[i] == 0
        np.testing.assert_allclose(shares, expected_shares, rtol=2e-6)
        assert (shares <= expected_shares).all()
        np.testing.assert_allclose(record.spent**2, squares, rtol=1e-12)
        assert (record.spent**2 <= record.budget**2 * (1 + 1e-15)).all()
    if full_consumption:
        assert (record.spent == record.budget).sum() > size / 2
        assert not record.active[record.spent == record.budget].any()
    else:
        assert returned > 0  # an example that was left out came back with a smaller gradient


def test_what_was_not_released_costs_nothing():
    record = gdp(2.0).record(full_batches(4, 10, 3.0))
    drive(record, 0.5)
    before = record.spent
    for _ in range(3):  # a step that is begun again and again
        for part in range(2):
            record.admit(step=1, part=part, indices=np.arange(2) + 2 * part, ratios=np.ones(2))
    np.testing.assert_array_equal(record.spent, before)
    assert record.steps == 1
    record.commit(1, 2)
    np.testing.assert_allclose(record.spent**2, before**2 + 1 / 9)


def test_parts_of_a_step_that_are_missing_are_noticed():
    record = gdp(2.0).record(full_batches(4, 10, 3.0))
    record.admit(step=0, part=0, indices=np.arange(2), ratios=np.ones(2))
    with pytest.raises(RuntimeError, match="not admitted"):
        record.commit(0, 2)
    with pytest.raises(RuntimeError, match="in order"):
        record.admit(step=1, part=0, indices=np.arange(2), ratios=np.ones(2))


def test_individual_epsilons_never_exceed_the_budget_and_meet_it_at_full_norm():
    individual = gdp(0.8)
    record = individual.record(full_batches(2, 478, 100.0))
    for _ in range(478):
        drive(record, [1.0, 0.3])
    found = record.epsilons(DELTA)
    assert found[0] == pytest.approx(gaussian.epsilon(DELTA, math.sqrt(478) / 100), rel=1e-9)
    assert found[1] == pytest.approx(gaussian.epsilon(DELTA, 0.3 * math.sqrt(478) / 100), rel=1e-9)
    assert found[1] < found[0] <= 0.8 * (1 + 1e-9)


def test_the_guarantee_is_the_budgets_unless_the_plans_is_smaller(tmp_path):
    data = images(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for steps, smaller in ((30, False), (1, True)):
            private = filtered(small_net(), data, gdp(2.0, 1e-3), steps=steps, sigma=2.0)
            plan = account(private.mechanism, delta=1e-3)
            train(private, batches=1)
            found = private.guarantee()
            assert found.delta == 1e-3
            assert found.steps_executed == 1
            if smaller:
                assert found.epsilon == plan.epsilon < 2.0
                assert found.accountant == plan.accountant
                assert "not the smaller bound" in str(found)
            else:
                assert plan.epsilon > 2.0
                assert found.epsilon == pytest.approx(2.0, rel=1e-9)
                assert found.accountant == "individual GDP filter"
                assert found.kind is Kind.UPPER_BOUND
                assert "its own budget" in str(found)
            for delta in (1e-2, 1e-6):
                bound = gaussian.epsilon(delta, gdp(2.0, 1e-3).budget)
                expected = min(bound, account(private.mechanism, delta=delta).epsilon)
                assert private.get_epsilon(delta) == expected
            paths = privacy_report(found, tmp_path / f"report{steps}")
            text = "".join(path.read_text() for path in paths)
            assert f"{found.epsilon:.6g}" in text


def test_a_coarse_noise_leaves_an_estimate():
    options = {"sigma": 2.0, "steps": 30, "noise_dtype": torch.bfloat16}
    private = filtered(small_net(), images(8), gdp(2.0, 1e-3), **options)
    kind = private.guarantee().kind
    # Independent noise has no buffers to be coarse, and says so by staying a proven bound.
    assert kind in (Kind.ESTIMATE, Kind.UPPER_BOUND)
    assert (kind is Kind.ESTIMATE) == bool(private.optimizer.noise.notes)


def test_a_filter_is_a_value():
    individual = gdp(2.0, full_consumption=True)
    assert IndividualFilter.from_dict(individual.to_dict()) == individual
    with pytest.raises(ValueError, match="max_step"):
        IndividualFilter.from_dict({"type": "GDPFilter", "max_step": 3})
    with pytest.raises(ValueError, match=r"unknown.*GDPFiltre.*GDPFilter"):
        IndividualFilter.from_dict({"type": "GDPFiltre"})
    with pytest.raises(ValueError, match="target_delta"):
        IndividualFilter.from_dict({"type": "GDPFilter", "target_epsilon": 1.0, "max_steps": 3})
