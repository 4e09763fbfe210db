"""What the PLD filter lets through, against the accountant and a look at every step."""

import functools
import math

import numpy as np
import pytest

from dptrain.accounting.losses import gaussian
from dptrain.contrib.individual.gaussian_dominance import GaussianDominance
from dptrain.contrib.individual.pld import GRID
from dptrain.contrib.per_example.pld import IndividualPLD
from tests.helpers.pld_runs import DELTA, growing, lognormal, play, pld, poisson

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


CASES = [
    (0.3, 2.0, 3.0, 40),
    pytest.param(0.1, 1.2, 3.0, 30, marks=pytest.mark.slow),
    pytest.param(0.7, 5.0, 1.0, 25, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.sample(every=5)
@pytest.mark.parametrize("norms", [lognormal, growing])
@pytest.mark.parametrize("personal", [None, 1.0, 1.5])
@pytest.mark.parametrize(("q", "sigma", "epsilon", "steps"), CASES)
def test_credits_decide_as_a_look_at_every_step(q, sigma, epsilon, steps, personal, norms):
    rng = np.random.default_rng(3)
    individual = pld(epsilon, personal_clipping=personal)
    mechanism = poisson(q=q, sigma=sigma, size=10, steps=steps)
    record = individual.record(mechanism)
    seen = play(record, rng, q, steps, norms, EveryStep(individual, mechanism))
    assert seen.min() > 0


@pytest.mark.slow
@pytest.mark.parametrize(("personal", "norms"), [(None, lognormal), (1.5, growing)])
def test_every_admitted_history_is_dominated(personal, norms):
    """By the accountant, whose transforms are chosen for each example; and it is nearly used up."""
    q, sigma, steps = 0.2, 1.5, 80
    individual = pld(3.0, personal_clipping=personal)
    record = individual.record(poisson(q=q, sigma=sigma, size=12, steps=steps))
    play(record, np.random.default_rng(8), q, steps, norms)
    accountant = IndividualPLD(probability=q, noise_multiplier=sigma, grid=GRID)
    found = accountant.gaussian_mu(record._counts, floor=1e-8)
    assert (found <= individual.budget * (1 + 1e-6)).all()
    if personal is None:
        assert found.max() > 0.97 * individual.budget
    spent = record.spent
    assert (spent >= np.minimum(found, individual.budget)).all()
    assert (record.epsilons(DELTA) <= record.epsilon_bound(DELTA)).all()
    assert record.epsilon_bound(DELTA) <= 3.0


@pytest.mark.slow
@pytest.mark.parametrize(("q", "sigma", "epsilon", "_"), CASES)
def test_the_fast_test_is_never_more_generous_than_the_accountant(q, sigma, epsilon, _):
    """Mixed histories around the budget, at every ε; what it loses is not asserted here."""
    individual = pld(epsilon)
    full = individual.full_norm_steps(poisson(q=q, sigma=sigma))
    test = dominance(q, sigma, individual.budget, 1e-8, full)
    accountant = IndividualPLD(probability=q, noise_multiplier=sigma, grid=GRID)
    rng = np.random.default_rng(1)
    counts = np.zeros((4, len(GRID.values)), dtype=np.int64)
    for row in counts:
        # So many steps that Σ r² is around the budget's.
        ratios = rng.uniform(0.3, 1.0, 100 * full)
        last = np.searchsorted(np.cumsum(ratios**2), rng.uniform(0.5, 1.1) * full)
        np.add.at(row, GRID.bucket(ratios[: last + 1]), 1)
    mine = test.log_ratios(test.exponents(counts)).reshape(4, 2, -1).max(axis=1)
    for level, epsilon in enumerate(test.epsilons):
        exact = np.log(accountant.delta(counts, epsilon))
        excess = mine[:, level] - (exact - gaussian.log_delta(epsilon, individual.budget))
        near = exact > math.log(1e-10)
        assert (excess[near] >= 0).all()
