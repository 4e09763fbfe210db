"""The Rényi filter by brute force, with right and wrong records.

The claim is docs/theory/individual.md#thm-renyi-filter.
"""

import itertools
import math

import numpy as np
import pytest

from dptrain.individual import RenyiRecord
from tests.helpers.hidden_coins import HiddenRun, cost, record_of


def tightness(run, order, full_steps, **options):
    """Both directions' Rényi divergences of the filtered run as shares of the budget."""
    record = record_of(full_steps, order=order, q=run.probability, sigma=run.sigma, **options)
    there, back, mass = run.moments(record, order)
    assert mass == pytest.approx(1.0, abs=1e-7)  # of the quadrature
    return [math.log(m) / ((order - 1.0) * record.budget) for m in (there, back)]


def always(*ratios):
    """The norm at each step (the last one from then on), whatever is released."""
    return lambda history: (ratios[min(len(history), len(ratios) - 1)],)


def adaptive(rng, bins, steps, augmentations):
    """Norms drawn afresh for every history of outputs."""
    choices = np.array([0.0, 0.05, 0.3, 0.5, 0.8, 1.0])
    table = {
        history: tuple(rng.choice(choices, size=augmentations))
        for length in range(steps)
        for history in itertools.product(range(bins), repeat=length)
    }
    return table.__getitem__


@pytest.mark.slow
@pytest.mark.parametrize("personal", [None, 1.0, 1.5])
def test_adaptive_runs_keep_the_budget_in_both_directions(personal):
    rng = np.random.default_rng(20)
    found = []
    for _ in range(40):
        augmentations = int(rng.integers(1, 3))
        run = HiddenRun(
            probability=float(rng.choice([0.1, 0.4, 0.8, 1.0])),
            sigma=float(rng.choice([0.7, 1.0, 1.6])),
            steps=3,
            ratios=adaptive(rng, 2, 3, augmentations),
            edges=(float(rng.choice([-0.5, 0.3, 1.0])),),
            nodes=20,
        )
        order, full_steps = float(rng.choice([1.3, 2.0, 3.7])), float(rng.uniform(0.05, 2.5))
        found += tightness(run, order, full_steps, personal=personal)
    assert max(found) <= 1.0 + 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("personal", [None, 1.2])
def test_four_steps_and_three_bins_keep_the_budget(personal):
    rng = np.random.default_rng(21)
    for full_steps in (0.4, 1.01, 1.7, 2.4):
        run = HiddenRun(
            probability=0.4,
            sigma=1.0,
            steps=4,
            ratios=adaptive(rng, 3, 4, 1),
            edges=(-0.5, 1.0),
            nodes=14,
        )
        assert max(tightness(run, 2.0, full_steps, personal=personal)) <= 1.0 + 1e-5


@pytest.mark.parametrize("personal", [None, 1.0])
@pytest.mark.parametrize("q", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("order", [1.5, 4.0])
def test_a_budget_of_full_norms_is_used_up_exactly(personal, q, order):
    """The oracle is sharp: a hair less than what is charged would be seen."""
    run = HiddenRun(probability=q, sigma=1.0, steps=3, ratios=always(1.0))
    for full_steps in (1.0, 3.0):
        remove, add = tightness(run, order, full_steps + 1e-9, personal=personal)
        assert remove == pytest.approx(1.0, abs=1e-6)
        assert add <= remove + 1e-9


class ChargesOnlyDrawn(RenyiRecord):
    """Wrong: waiting is free."""

    def _book(self, step):
        buckets = np.where(step.shares > 0, self.grid.bucket(step.ratios), 0)
        self._spent[step.indices] += self._costs.take(buckets)
        return 1


class WaitsForSmallNorms(RenyiRecord):
    """Wrong: stays although the full norm does not fit when it is not drawn."""

    def _book(self, step):
        alive, spent = self._alive.copy(), self._spent.copy()
        count = super()._book(step)
        self._spent = np.where(self._alive, self._spent, spent)
        self._alive = alive
        return count


class ReleasesMoreThanItsBound(RenyiRecord):
    """Wrong: charged the personal bound, but not clipped to it."""

    def _shares(self, indices, ratios):
        return (super()._shares(indices, ratios) > 0).astype(float)


@pytest.mark.parametrize("q", [0.2, 0.5])
@pytest.mark.parametrize("order", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("personal", [None, 1.0])
def test_charging_only_draws_would_exceed_the_budget(q, order, personal):
    run = HiddenRun(probability=q, sigma=1.0, steps=3, ratios=always(1.0))
    wrong = tightness(run, order, 1.001, personal=personal, kind=ChargesOnlyDrawn)
    assert wrong[0] > 1.02
    assert max(tightness(run, order, 1.001, personal=personal)) <= 1.0


def test_charging_less_than_a_step_costs_would_exceed_the_budget():
    run = HiddenRun(probability=0.4, sigma=1.0, steps=3, ratios=always(1.0))
    for personal in (None, 1.0):
        assert tightness(run, 2.0, 2.0, scale=0.9, personal=personal)[0] <= 1.0
        assert tightness(run, 2.0, 2.75, scale=0.9, personal=personal)[0] > 1.05


def test_waiting_for_a_small_norm_for_free_would_exceed_the_budget():
    q, sigma, order = 0.3, 0.7, 2.0
    small = cost(0.5, order=order, q=q, sigma=sigma) / cost(1.0, order=order, q=q, sigma=sigma)
    run = HiddenRun(probability=q, sigma=sigma, steps=3, ratios=always(0.5))
    assert min(tightness(run, order, 1.02 * small, kind=WaitsForSmallNorms)) > 1.2
    assert max(tightness(run, order, 1.02 * small)) <= 1.0


def test_a_bound_that_is_charged_but_not_kept_would_exceed_the_budget():
    """First small, then large: waits were charged the small norm, and the large one is released."""
    run = HiddenRun(probability=0.7, sigma=0.7, steps=3, ratios=always(0.1, 1.0))
    wrong = tightness(run, 2.5, 1.05, personal=1.0, kind=ReleasesMoreThanItsBound)
    assert wrong[0] > 1.5
    assert max(tightness(run, 2.5, 1.05, personal=1.0)) <= 1.0
