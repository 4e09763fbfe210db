"""The PLD filter: its budget, step counts against other accountants, and what it lets through."""

import itertools
import json
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as dp_pld

from dptrain import BandMF, MatrixMechanism, MinSep, account
from dptrain.accounting.losses import gaussian
from dptrain.accounting.renyi.conversion import epsilon_at_order
from dptrain.contrib.individual import gaussian_renyi
from dptrain.core.guarantee import Kind
from dptrain.individual import GDPFilter, IndividualFilter, PLDFilter, RenyiFilter
from dptrain.reporting.report import conditions
from dptrain.strategies import Identity
from tests.helpers.pld_runs import DELTA, lognormal, play, pld, poisson

# Budget -----------------------------------------------------------------------------------------


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.1, 1e-5), (0.8, 1e-5), (4.0, 1e-5), (10.0, 1e-8), (50.0, 1e-3)]
)
def test_the_budget_is_that_of_the_best_order(epsilon, delta):
    """Brute force: order by order, the largest μ; and ε of it."""
    orders = 1.0 + np.geomspace(1e-3, 1e5, 20_001)
    offsets = [float(epsilon_at_order(1e-300, order=a, delta=delta)) for a in orders]
    # epsilon_at_order does not go below 0: orders whose offset is negative are good for any ε.
    textbook = np.array(
        [(math.log1p(-1 / a) * a - math.log(a - 1) - math.log(delta)) / (a - 1) for a in orders]
    )
    np.testing.assert_allclose(np.maximum(textbook, 0.0), offsets, atol=1e-9)
    best = math.sqrt(max(0.0, float(np.max(2 * (epsilon - textbook) / orders))))
    budget = pld(epsilon, delta).budget
    assert best * (1 - 1e-5) <= budget <= best * (1 + 1e-5)
    assert gaussian_renyi.epsilons(delta, budget) <= epsilon
    assert gaussian_renyi.epsilons(delta, budget * (1 + 1e-6)) > epsilon
    for mu in (0.3 * budget, budget, 2 * budget):
        brute = max(0.0, float(np.min(orders * mu**2 / 2 + textbook)))
        found = float(gaussian_renyi.epsilons(delta, mu))
        assert found == pytest.approx(brute, rel=1e-5)
        assert found >= gaussian.epsilon(delta, mu)


def test_spending_nothing_is_epsilon_zero_and_more_is_never_less():
    found = gaussian_renyi.epsilons(DELTA, np.array([0.0, 1e-9, 0.1, 0.1, 1.0, 30.0]))
    assert found[0] == 0.0
    assert found[2] == found[3]
    assert (np.diff(found) >= 0).all()


# Full batches -------------------------------------------------------------------------------------


def test_full_batches_add_up_squares_as_the_gdp_filter_does():
    """405 steps at the clip as by RDP, since that is how it is converted; other norms by Σ r²."""
    mechanism = poisson(q=1.0, size=40, steps=60, sigma=3.0)
    assert pld(0.8).full_norm_steps(poisson(q=1.0, sigma=100.0)) == 405
    mine = pld(4.0)
    # The GDP filter of the same μ.
    theirs = GDPFilter(
        target_epsilon=gaussian.epsilon(DELTA, mine.budget), target_delta=DELTA, max_steps=1000
    )
    assert theirs.budget == pytest.approx(mine.budget, rel=1e-9)
    assert mine.full_norm_steps(mechanism) == math.floor((mine.budget * 3.0) ** 2)
    one, other = mine.record(mechanism), theirs.record(mechanism)
    rng, everybody = np.random.default_rng(0), np.arange(40)
    for step in range(60):
        ratios = one.grid.values[one.grid.bucket(rng.random(40))]
        shares = [
            each.admit(step=step, part=0, indices=everybody, ratios=ratios) for each in (one, other)
        ]
        assert shares[0].tolist() == shares[1].tolist()
        one.commit(step, 1)
        other.commit(step, 1)
    assert 0.0 in shares[0]
    np.testing.assert_allclose(one.spent, other.spent, rtol=1e-12)
    assert (one.epsilons(DELTA) <= one.epsilon_bound(DELTA)).all()
    assert one.epsilon_bound(DELTA) <= 4.0


# Steps of the full norm ---------------------------------------------------------------------------


def composed(q, sigma, steps):
    return dp_pld.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=1e-4
    ).self_compose(steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q", "sigma", "epsilon"),
    [
        pytest.param(0.02, 1.0, 2.0, marks=pytest.mark.slow),
        (0.1, 2.0, 2.0),
        pytest.param(0.3, 2.0, 4.0, marks=pytest.mark.slow),
    ],
)
def test_full_norm_steps_by_dp_accounting(q, sigma, epsilon):
    """Dominated at every ε down to the floor, and not with 3 % more steps."""
    individual, floor = pld(epsilon), 1e-3 * DELTA
    steps = individual.full_norm_steps(poisson(q=q, sigma=sigma))
    end = gaussian.epsilon(floor, individual.budget)
    grid = np.linspace(0.0, end, 400)
    allowed = gaussian.log_delta(grid, individual.budget)

    def excess(n):
        found = np.log(np.array(composed(q, sigma, n).get_delta_for_epsilon(grid)))
        return float(np.max(found - allowed))

    assert steps > 10
    assert excess(steps) <= 0.01  # of log δ: its lattice
    assert excess(math.ceil(1.03 * steps) + 1) > 0.01
    # What a fixed run of so many steps really has is far below the target.
    assert composed(q, sigma, steps).get_epsilon_for_delta(DELTA) < epsilon


@pytest.mark.slow
def test_fewer_steps_than_the_renyi_filter_unless_the_floor_is_high():
    """Domination at all ε would imply the Rényi budget, at which the other filter stops."""
    mechanism = poisson(q=0.02, sigma=1.0)
    rigorous = RenyiFilter(target_epsilon=2.0, target_delta=DELTA, max_steps=10)
    steps = [pld(2.0, floor=f).full_norm_steps(mechanism) for f in (1e-14, 1e-8, 1e-5)]
    assert steps == sorted(steps)
    assert steps[0] <= rigorous.full_norm_steps(mechanism) < steps[2]


# Statement, refusals, state -----------------------------------------------------------------------


def test_the_guarantee_says_that_it_is_an_estimate():
    mechanism = poisson(steps=200)
    individual = pld(2.0, delta=1e-3, max_steps=200)
    record = individual.record(mechanism)
    stated = individual.state(account(mechanism, delta=1e-3), record)
    assert stated.kind is Kind.ESTIMATE
    assert 1.999 < stated.epsilon <= 2.0
    assert stated.accountant == "individual PLD filter"
    assert "pproximate" in stated.notes[0]
    assert "estimate" in str(stated)
    assert json.loads(stated.to_json())["kind"] == "estimate"
    assert any("stimate" in line for line in conditions(stated))
    # Stated from Rényi divergences, never as δ_B(ε).
    assert stated.epsilon > gaussian.epsilon(1e-3, individual.budget) * 1.05


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"floor": 0.0}, ValueError, "floor=0"),
        ({"floor": 2e-5}, ValueError, "floor"),
        ({"floor": math.nan}, ValueError, "floor"),
        ({"floor": True}, TypeError, "floor"),
        ({"personal_clipping": 0.99}, ValueError, "personal_clipping"),
        ({"personal_clipping": "1"}, TypeError, "personal_clipping"),
        ({"max_steps": math.inf}, ValueError, "bounded"),
        ({"epsilon": 0.0}, ValueError, "epsilon"),
    ],
)
def test_bad_settings_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        pld(**options)


def test_other_schemes_noise_and_budgets_below_one_step_are_refused():
    scheme = MinSep.for_batch_size(batch_size=2, dataset_size=24, min_sep=3, steps=8)
    with pytest.raises(ValueError, match="scheme=MinSep"):
        pld().record(MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=2.0))
    banded = MatrixMechanism(
        scheme=poisson().scheme, strategy=BandMF(bands=2), noise_multiplier=2.0
    )
    with pytest.raises(ValueError, match="strategy=BandMF"):
        pld().record(banded)
    with pytest.raises(ValueError, match="max_steps=9"):
        pld(max_steps=9).record(poisson(steps=10))
    with pytest.raises(ValueError, match="not one step of the full norm"):
        pld(0.5).record(poisson(sigma=0.5))


def test_is_written_and_read():
    individual = pld(personal_clipping=2, floor=1e-7)
    assert PLDFilter.from_settings(individual.to_dict()) == individual
    assert IndividualFilter.from_settings(pld().to_dict()) == pld()


@pytest.mark.slow
@pytest.mark.sample(every=2)
@pytest.mark.parametrize("personal", [None, 1.5])
def test_the_record_goes_through_a_checkpoint_unchanged(personal):
    individual, mechanism = pld(3.0, personal_clipping=personal), poisson(size=30, steps=40)
    one, other = individual.record(mechanism), individual.record(mechanism)
    rng = np.random.default_rng(2)
    play(one, rng, 0.3, 12, lognormal)
    other.load_state_dict(one.state_dict())
    for step in range(12, 40):
        indices = np.flatnonzero(rng.random(30) < 0.3)
        ratios = lognormal(rng, indices)
        shares = []
        for record in (one, other):
            shares.append(record.admit(step=step, part=0, indices=indices, ratios=ratios).tolist())
            record.commit(step, 1)
        assert shares[0] == shares[1]
    for name, value in one.state_dict()["spending"].items():
        assert np.array_equal(value, other.state_dict()["spending"][name])
    assert one.active_counts == other.active_counts
    assert one.active_counts[-1] < 30


@pytest.mark.slow
def test_another_record_is_refused():
    mechanism = poisson(size=3)
    record = pld().record(mechanism)
    play(record, np.random.default_rng(0), 0.3, 3, lognormal)
    with pytest.raises(ValueError, match="budget"):
        pld(5.0).record(mechanism).load_state_dict(record.state_dict())
    for name, value in itertools.product(("counts", "credit"), (-2, 1001)):
        state = record.state_dict()
        state["spending"][name].view(-1)[0] = value
        with pytest.raises(ValueError, match="outside the budget"):
            pld().record(mechanism).load_state_dict(state)
