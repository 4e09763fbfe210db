"""The PLD filter: its budget, step counts against other accountants, and what it lets through."""

import functools
import itertools
import json
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as dp_pld

from dptrain import BandMF, MatrixMechanism, MinSep, Poisson, account
from dptrain.accounting import gaussian
from dptrain.accounting.individual_pld import IndividualPLD
from dptrain.accounting.renyi_conversion import epsilon_at_order
from dptrain.guarantee import Kind
from dptrain.individual import GDPFilter, IndividualFilter, PLDFilter, RenyiFilter, gaussian_renyi
from dptrain.individual.gaussian_dominance import GaussianDominance
from dptrain.individual.pld import GRID
from dptrain.report import conditions
from dptrain.strategies import Identity

DELTA = 1e-5


def pld(epsilon=4.0, delta=DELTA, max_steps=1000, **options):
    return PLDFilter(target_epsilon=epsilon, target_delta=delta, max_steps=max_steps, **options)


def poisson(q=0.3, size=24, steps=10, sigma=2.0):
    scheme = Poisson(probability=q, dataset_size=size, steps=steps)
    return MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)


# Budget -----------------------------------------------------------------------------------------


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
    one, other = mine.ledger(mechanism), theirs.ledger(mechanism)
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


@pytest.mark.parametrize(
    ("q", "sigma", "epsilon"), [(0.02, 1.0, 2.0), (0.1, 2.0, 2.0), (0.3, 2.0, 4.0)]
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


def test_fewer_steps_than_the_renyi_filter_unless_the_floor_is_high():
    """Domination at all ε would imply the Rényi budget, at which the other filter stops."""
    mechanism = poisson(q=0.02, sigma=1.0)
    rigorous = RenyiFilter(target_epsilon=2.0, target_delta=DELTA, max_steps=10)
    steps = [pld(2.0, floor=f).full_norm_steps(mechanism) for f in (1e-14, 1e-8, 1e-5)]
    assert steps == sorted(steps)
    assert steps[0] <= rigorous.full_norm_steps(mechanism) < steps[2]


# What is let through ------------------------------------------------------------------------------


@functools.cache
def dominance(q, sigma, budget, floor, reference):
    return GaussianDominance(
        probability=q, noise_multiplier=sigma, grid=GRID, mu=budget, floor=floor,
        reference=reference,
    )  # fmt: skip


class EveryStep:
    """The filter without credits: one look at each example for each decision."""

    def __init__(self, individual, mechanism):
        self.full = full = individual.full_norm_steps(mechanism)
        q, sigma = mechanism.scheme.rate, mechanism.noise_multiplier
        self.test = dominance(q, sigma, individual.budget, individual._floor, full)
        size = mechanism.scheme.dataset_size
        self.counts = np.zeros((size, len(GRID.values)), dtype=np.int64)
        self.bounds, self.alive = np.full(size, len(GRID.values) - 1), np.ones(size, bool)
        self.factor = individual.personal_clipping

    def step(self, drawn):
        shares = {}
        for i in range(len(self.bounds)):
            ratio = drawn.get(i)
            bucket = self.bounds[i]
            if ratio is not None:
                bucket = min(bucket, int(GRID.bucket(ratio)))
            trial = self.counts[i].copy()
            trial[bucket] += bucket > 0
            ratios = self.test.log_ratios(self.test.exponents(trial[None]))
            # So many steps of the full norm are dominated by the accountant's own count.
            free = bucket == 0 or trial.sum() <= self.full
            fits = self.alive[i] and (free or bool((ratios <= 0).all()))
            if fits:
                self.counts[i] = trial
            elif ratio is None:
                self.alive[i] = False
            if ratio is not None:
                shares[i] = float(fits)
                if self.factor is not None:
                    self.bounds[i] = GRID.bucket(min(1.0, self.factor * ratio))
        return shares


def play(ledger, rng, q, steps, norms, reference=None):
    """Random draws; returns how often an example took part and did not."""
    seen = np.zeros(2, dtype=int)
    for step in range(steps):
        indices = np.flatnonzero(rng.random(ledger.size) < q)
        ratios = norms(rng, indices)
        shares = ledger.admit(step=step, part=0, indices=indices, ratios=ratios)
        ledger.commit(step, 1)
        seen += np.bincount((shares > 0).astype(int), minlength=2)
        if reference is not None:
            wanted = reference.step(dict(zip(indices.tolist(), ratios.tolist(), strict=True)))
            assert {i: float(s > 0) for i, s in zip(indices, shares, strict=True)} == wanted
            assert ledger._counts.tolist() == reference.counts.tolist()
    return seen


def lognormal(rng, indices):
    return np.minimum(rng.lognormal(-1.0, 1.0, indices.size), 1.0)


def growing(rng, indices):
    """Adversarial for bounds and credits: tiny, then suddenly the clip."""
    return np.where(rng.random(indices.size) < 0.7, 0.02 * rng.random(indices.size), 1.0)


CASES = [(0.3, 2.0, 3.0, 40), (0.1, 1.2, 3.0, 30), (0.7, 5.0, 1.0, 25)]


@pytest.mark.parametrize("norms", [lognormal, growing])
@pytest.mark.parametrize("personal", [None, 1.0, 1.5])
@pytest.mark.parametrize(("q", "sigma", "epsilon", "steps"), CASES)
def test_credits_decide_as_a_look_at_every_step(q, sigma, epsilon, steps, personal, norms):
    rng = np.random.default_rng(3)
    individual = pld(epsilon, personal_clipping=personal)
    mechanism = poisson(q=q, sigma=sigma, size=10, steps=steps)
    ledger = individual.ledger(mechanism)
    seen = play(ledger, rng, q, steps, norms, EveryStep(individual, mechanism))
    assert seen.min() > 0


@pytest.mark.parametrize(("personal", "norms"), [(None, lognormal), (1.5, growing)])
def test_every_admitted_history_is_dominated(personal, norms):
    """By the accountant, whose transforms are chosen for each example; and it is nearly used up."""
    q, sigma, steps = 0.2, 1.5, 80
    individual = pld(3.0, personal_clipping=personal)
    ledger = individual.ledger(poisson(q=q, sigma=sigma, size=12, steps=steps))
    play(ledger, np.random.default_rng(8), q, steps, norms)
    accountant = IndividualPLD(probability=q, noise_multiplier=sigma, grid=GRID)
    found = accountant.gaussian_mu(ledger._counts, floor=1e-8)
    assert (found <= individual.budget * (1 + 1e-6)).all()
    if personal is None:
        assert found.max() > 0.97 * individual.budget
    spent = ledger.spent
    assert (spent >= np.minimum(found, individual.budget)).all()
    assert (ledger.epsilons(DELTA) <= ledger.epsilon_bound(DELTA)).all()
    assert ledger.epsilon_bound(DELTA) <= 3.0


@pytest.mark.parametrize(("q", "sigma", "epsilon", "_"), CASES)
def test_the_fast_test_is_never_more_generous_than_the_accountant(q, sigma, epsilon, _):
    """Mixed histories around the budget, at every ε; what it loses is not asserted here."""
    individual = pld(epsilon)
    full = individual.full_norm_steps(poisson(q=q, sigma=sigma))
    test = dominance(q, sigma, individual.budget, 1e-8, full)
    accountant = IndividualPLD(probability=q, noise_multiplier=sigma, grid=GRID)
    rng = np.random.default_rng(1)
    counts = np.zeros((8, len(GRID.values)), dtype=np.int64)
    for row in counts:
        # So many steps that Σ r² is around the budget's.
        ratios = rng.uniform(0.3, 1.0, 100 * full)
        last = np.searchsorted(np.cumsum(ratios**2), rng.uniform(0.5, 1.1) * full)
        np.add.at(row, GRID.bucket(ratios[: last + 1]), 1)
    mine = test.log_ratios(test.exponents(counts)).reshape(8, 2, -1).max(axis=1)
    for level, epsilon in enumerate(test.epsilons):
        exact = np.log(accountant.delta(counts, epsilon))
        excess = mine[:, level] - (exact - gaussian.log_delta(epsilon, individual.budget))
        near = exact > math.log(1e-10)
        assert (excess[near] >= 0).all()


# Statement, refusals, state -----------------------------------------------------------------------


def test_the_guarantee_says_that_it_is_an_estimate():
    mechanism = poisson(steps=200)
    individual = pld(2.0, delta=1e-3, max_steps=200)
    ledger = individual.ledger(mechanism)
    stated = individual.state(account(mechanism, delta=1e-3), ledger)
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
        pld().ledger(MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=2.0))
    banded = MatrixMechanism(
        scheme=poisson().scheme, strategy=BandMF(bands=2), noise_multiplier=2.0
    )
    with pytest.raises(ValueError, match="strategy=BandMF"):
        pld().ledger(banded)
    with pytest.raises(ValueError, match="max_steps=9"):
        pld(max_steps=9).ledger(poisson(steps=10))
    with pytest.raises(ValueError, match="not one step of the full norm"):
        pld(0.5).ledger(poisson(sigma=0.5))


def test_is_written_and_read():
    individual = pld(personal_clipping=2, floor=1e-7)
    assert PLDFilter.from_settings(individual.to_dict()) == individual
    assert IndividualFilter.from_settings(pld().to_dict()) == pld()


@pytest.mark.parametrize("personal", [None, 1.5])
def test_the_record_goes_through_a_checkpoint_unchanged(personal):
    individual, mechanism = pld(3.0, personal_clipping=personal), poisson(size=30, steps=40)
    one, other = individual.ledger(mechanism), individual.ledger(mechanism)
    rng = np.random.default_rng(2)
    play(one, rng, 0.3, 12, lognormal)
    other.load_state_dict(one.state_dict())
    for step in range(12, 40):
        indices = np.flatnonzero(rng.random(30) < 0.3)
        ratios = lognormal(rng, indices)
        shares = []
        for ledger in (one, other):
            shares.append(ledger.admit(step=step, part=0, indices=indices, ratios=ratios).tolist())
            ledger.commit(step, 1)
        assert shares[0] == shares[1]
    for name, value in one.state_dict()["spending"].items():
        assert np.array_equal(value, other.state_dict()["spending"][name])
    assert one.active_counts == other.active_counts
    assert one.active_counts[-1] < 30


def test_another_record_is_refused():
    mechanism = poisson(size=3)
    ledger = pld().ledger(mechanism)
    play(ledger, np.random.default_rng(0), 0.3, 3, lognormal)
    with pytest.raises(ValueError, match="budget"):
        pld(5.0).ledger(mechanism).load_state_dict(ledger.state_dict())
    for name, value in itertools.product(("counts", "credit"), (-2, 1001)):
        state = ledger.state_dict()
        state["spending"][name].view(-1)[0] = value
        with pytest.raises(ValueError, match="outside the budget"):
            pld().ledger(mechanism).load_state_dict(state)
