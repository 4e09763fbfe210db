"""The odometer: rounds against Algorithm 1 with a growing budget, and what is stated when."""

import math

import numpy as np
import pytest

from dptrain.accounting import account
from dptrain.accounting.losses import gaussian
from dptrain.core.guarantee import Guarantee, Kind
from dptrain.engine.sealed import seal
from dptrain.individual import GDPFilter, GDPOdometer, IndividualFilter
from dptrain.reporting.report import privacy_report
from tests.contrib.individual.test_gdp_filter import drive, full_batches
from tests.helpers.engine import images, small_net, train
from tests.helpers.individual_runs import (
    Algorithm1,
    as_they_are,
    filtered,
    gradients,
    precise,
    run,
    watch,
)
from tests.oracles.optional_stopping import worst_delta

INCREMENTS = (0.9, 0.7, 1.2)
TOTALS = (0.9, math.sqrt(0.9**2 + 0.7**2), math.sqrt(0.9**2 + 0.7**2 + 1.2**2))


def odometer(increments=INCREMENTS, **options):
    options = {"target_delta": 1e-3, "max_steps": 50, **options}
    return GDPOdometer(increments=increments, **options)


def test_budgets_are_roots_of_sums_of_squares():
    individual = odometer()
    assert individual.budgets == pytest.approx(TOTALS, rel=1e-15)
    assert individual.budget == individual.budgets[-1]
    assert individual.target_epsilon == gaussian.epsilon(1e-3, individual.budget)
    one = odometer((0.665942,), target_delta=1e-5)
    assert one.target_epsilon == pytest.approx(2.75, abs=1e-5)


@pytest.mark.parametrize("epsilons", [(1.0, 2.0, 4.0), (0.5,), (8, 8.001, 10)])
def test_rounds_may_be_stated_as_epsilons(epsilons):
    individual = GDPOdometer.for_epsilons(epsilons, target_delta=1e-5, max_steps=9)
    found = [gaussian.epsilon(1e-5, budget) for budget in individual.budgets]
    assert found == pytest.approx(epsilons, rel=1e-9)
    for budget, epsilon in zip(individual.budgets, epsilons, strict=True):
        assert budget <= gaussian.largest_mu(epsilon, 1e-5)
    assert individual.target_epsilon == pytest.approx(epsilons[-1], rel=1e-9)


def test_an_odometer_is_a_value():
    individual = odometer(full_consumption=True)
    assert IndividualFilter.from_dict(individual.to_dict()) == individual
    assert "target_epsilon" not in individual.to_dict()
    assert odometer((0.9, 0.7)) != odometer((0.9, 0.8))
    settings = {**individual.to_dict(), "target_epsilon": 3.0}
    with pytest.raises(ValueError, match="target_epsilon"):
        IndividualFilter.from_dict(settings)


@pytest.mark.parametrize("full_consumption", [False, True])
def test_random_histories_keep_to_the_rounds_that_are_open(full_consumption):
    """What is left of a round is not lost: in all B_m, and nothing of rounds that are closed."""
    rng = np.random.default_rng(1)
    size, sigma = 30, 2.0
    record = odometer(full_consumption=full_consumption).record(full_batches(size, 45, sigma))
    squares = np.zeros(size)
    for step in range(45):
        if step in (15, 30):
            record.open_round()
        budget = TOTALS[step // 15]
        assert record.rounds == step // 15 + 1
        ratios = np.minimum(rng.lognormal(-0.7, 1.0, size), 1.0)
        shares = drive(record, ratios)
        cost, left = (ratios / sigma) ** 2, budget**2 - squares
        scaled = np.sqrt(np.maximum(left, 0) / cost) if full_consumption else 0.0
        expected = np.where(cost <= left, 1.0, scaled)
        np.testing.assert_allclose(shares, expected, rtol=2e-6, atol=1e-12)
        used_up = (cost > left) & (shares > 0)
        squares = np.where(used_up, budget**2, squares + shares**2 * cost)
        np.testing.assert_allclose(record.spent**2, squares, rtol=1e-9)
        assert (record.spent <= budget * (1 + 1e-15)).all()
    assert (record.spent > 0.95 * TOTALS[-1]).sum() > size / 2


def test_one_round_is_a_filter():
    rng = np.random.default_rng(2)
    budget = GDPFilter(target_epsilon=2.0, target_delta=1e-3, max_steps=50).budget
    mechanism = full_batches(9, 30, 1.5)
    one = odometer((budget, 5.0)).record(mechanism)
    other = GDPFilter(target_epsilon=2.0, target_delta=1e-3, max_steps=50).record(mechanism)
    for _ in range(30):
        ratios = rng.uniform(0, 1, 9)
        np.testing.assert_array_equal(drive(one, ratios), drive(other, ratios))
    np.testing.assert_array_equal(one.spent, other.spent)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
@pytest.mark.parametrize("micro", [None, 1])
def test_a_run_is_algorithm_1_with_a_growing_budget(mode, micro):
    model, data = precise()
    individual = odometer((1.2, 0.8))
    private = filtered(
        model,
        data,
        individual,
        mode,
        steps=9,
        sigma=1.5,
        max_grad_norm=2.0,
        max_physical_batch_size=micro,
        lr=0.2,
    )
    reference = Algorithm1(1.2, 1.5, len(data))
    sums, expected = watch(private), []

    def before_step():
        if private.steps_executed == 5:
            private.individual.open_round()
            reference.budget = math.sqrt(1.2**2 + 0.8**2)
        expected.append(reference.step(gradients(model, data), 2.0))

    if micro is None:
        run(private, before_step, as_they_are)
    else:
        with pytest.raises(RuntimeError, match="middle"):
            open_in_a_step(private)
        run(private, before_step, as_they_are)
    for found, wanted in zip(sums, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(private.individual.spent**2, reference.squares, rtol=3e-6)
    assert reference.margin > 1e-4
    active = private.individual.active_counts
    assert active[4] < active[5]


def open_in_a_step(private):
    train(private, batches=1)
    private.individual.open_round()


@pytest.mark.parametrize(("rounds", "size"), [(10, 0.5), (2, 0.5), (5, 0.1)])
def test_the_statement_holds_whenever_rounds_are_opened(rounds, size):
    """Gradients spend every round in full, and whether to go on is decided by what came out.

    What the number of open rounds by itself would say is exceeded, by the best rule.
    """
    delta, increments = 1e-5, (size,) * rounds
    individual = GDPOdometer(increments=increments, target_delta=delta, max_steps=400)
    mechanism = full_batches(1000, 400, 2.0)
    planned, record = account(mechanism, delta=delta), individual.record(mechanism)
    stated = [individual.state(planned, record)]
    while record.rounds < rounds:
        record.open_round()
        stated.append(individual.state(planned, record))
    said = [Guarantee.from_json(each.to_json()).epsilon for each in stated]
    assert {each.accountant for each in stated} == {"individual GDP odometer"}
    least, most = worst_delta(increments, said, spacing=2e-3 * size)
    assert least <= delta
    assert most <= 1.02 * delta
    alone = [gaussian.epsilon(delta, budget) for budget in individual.budgets]
    assert worst_delta(increments, alone, spacing=2e-3 * size)[0] > 1.7 * delta


def test_the_open_rounds_are_a_note(tmp_path):
    individual = odometer()
    private = filtered(small_net(), images(8), individual, steps=40, sigma=1.0)
    for rounds, total in enumerate(TOTALS, start=1):
        train(private, steps=5 * rounds)
        found = private.guarantee()
        for delta in (1e-3, 1e-2):
            epsilon = gaussian.epsilon(delta, TOTALS[-1])
            assert private.get_epsilon(delta) == pytest.approx(epsilon, rel=1e-9)
        assert f"{total:.6g}-GDP" in str(found)
        assert f"{TOTALS[-1]:.6g}-GDP" in str(found)
        assert found.accountant == "individual GDP odometer"
        assert found.kind is Kind.UPPER_BOUND
        assert f"{rounds} of 3 rounds" in str(found)
        assert ("Had their number been fixed before the run" in str(found)) is (rounds < 3)
        stated = "".join(p.read_text() for p in privacy_report(found, tmp_path / f"{rounds}"))
        assert f"{rounds} of 3 rounds" in stated
        epsilons = private.individual.epsilons(1e-3)
        assert (epsilons <= found.epsilon).all()
        if rounds < 3:
            private.individual.open_round()
    with pytest.raises(ValueError, match=r"all 3 rounds .* open.*fixed before the run"):
        private.individual.open_round()
    assert private.individual.rounds == 3


def test_nothing_is_spent_of_rounds_that_are_not_opened():
    results = []
    for increments in ((0.9,), (0.9, 0.7, 1.2)):
        private = filtered(small_net(), images(8), odometer(increments), steps=12, sigma=1.0)
        train(private)
        results.append(private.individual.spent)
    np.testing.assert_array_equal(*results)


def test_going_back_to_a_checkpoint_does_not_forget_what_was_released():
    """Steps of the second round were seen: until they are repeated, all rounds count as open."""
    private = filtered(small_net(), images(8), odometer(), steps=20, sigma=1.0)
    train(private, steps=3)
    state = private.state_dict()
    private.individual.open_round()
    train(private, steps=6)
    private.load_state_dict(state)
    assert private.individual.rounds == 1
    assert "3 of 3 rounds" in str(private.guarantee())
    private.individual.open_round()
    train(private, steps=6)  # the same releases again
    assert "2 of 3 rounds" in str(private.guarantee())


def test_a_changed_number_of_rounds_is_refused():
    private = filtered(small_net(), images(8), odometer(), steps=20, sigma=1.0)
    state = private.state_dict()
    for rounds in (0, 4):
        state["private"]["individual"]["spending"]["rounds"] = rounds
        with pytest.raises(ValueError, match=f"has {rounds} open rounds"):
            private.load_state_dict(seal(state))


def test_other_filters_have_no_rounds():
    individual = GDPFilter(target_epsilon=2.0, target_delta=1e-3, max_steps=50)
    private = filtered(small_net(), images(8), individual, steps=4)
    with pytest.raises(ValueError, match=r"no rounds.*GDPOdometer"):
        private.individual.open_round()


@pytest.mark.parametrize(
    ("increments", "error", "message"),
    [
        ((), ValueError, "at least one round"),
        ((0.5, 0.0), ValueError, "must be finite and above 0"),
        ((0.5, -1.0), ValueError, "must be finite and above 0"),
        ((0.5, math.inf), ValueError, "must be finite"),
        ((0.5, math.nan), ValueError, "must be finite"),
        ((0.5, "1"), TypeError, "must be a number"),
        ((True,), TypeError, "must be a number"),
        (0.5, TypeError, "must be a sequence of numbers"),
        ("0.5", TypeError, "must be a sequence of numbers"),
    ],
)
def test_bad_increments(increments, error, message):
    with pytest.raises(error, match=message):
        odometer(increments)


def test_bad_epsilons():
    options = {"target_delta": 1e-5, "max_steps": 9}
    with pytest.raises((TypeError, ValueError), match="must ascend"):
        GDPOdometer.for_epsilons((1.0, 1.0), **options)
    with pytest.raises((TypeError, ValueError), match="above 0"):
        GDPOdometer.for_epsilons((-1.0, 1.0), **options)
    with pytest.raises((TypeError, ValueError), match="target_delta=1"):
        GDPOdometer.for_epsilons((1.0,), target_delta=1, max_steps=9)
