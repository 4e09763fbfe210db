"""Charges and shares under Poisson sampling, and the theorem behind them by brute force."""

import functools
import itertools
import math

import numpy as np
import pytest

from dptrain.accounting.norm_grid import NormGrid
from dptrain.accounting.renyi_step import step_divergence
from dptrain.individual import RenyiLedger

from .hidden_coins import NOBODY, HiddenRun

GRID = NormGrid()


@functools.cache
def costs_of(order, probability, sigma):
    return step_divergence(GRID.values, order=order, probability=probability, sigma=sigma)


def ledger_of(
    full_steps, *, size=1, order=2.0, q=0.5, sigma=1.0, personal=None, kind=RenyiLedger, scale=1.0
):
    """A ledger whose budget is so many charges of the full norm."""
    costs = costs_of(order, q, sigma)
    return kind(
        size=size,
        grid=GRID,
        costs=scale * costs,
        order=order,
        budget=full_steps * costs[-1],
        max_steps=100,
        personal_clipping=personal,
    )


def run_step(ledger, drawn, parts=1):
    """One step; ``drawn`` maps examples to norm ratios. Returns their shares."""
    indices = np.array(list(drawn), dtype=np.int64)
    ratios = np.array(list(drawn.values()), dtype=float)
    shares = []
    for part, rows in enumerate(np.array_split(np.arange(len(indices)), parts)):
        shares.append(
            ledger.admit(step=ledger.steps, part=part, indices=indices[rows], ratios=ratios[rows])
        )
    ledger.commit(ledger.steps, parts)
    return dict(zip(drawn, np.concatenate(shares).tolist(), strict=True))


def cost(ratio, *, order=2.0, q=0.5, sigma=1.0):
    return costs_of(order, q, sigma)[GRID.bucket(ratio)]


# Theorem H by brute force -------------------------------------------------------------------------


def tightness(run, order, full_steps, **options):
    """Both directions' Rényi divergences of the filtered run as shares of the budget."""
    ledger = ledger_of(full_steps, order=order, q=run.probability, sigma=run.sigma, **options)
    there, back, mass = run.moments(ledger, order)
    assert mass == pytest.approx(1.0, abs=1e-7)  # of the quadrature
    return [math.log(m) / ((order - 1.0) * ledger.budget) for m in (there, back)]


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


class ChargesOnlyDrawn(RenyiLedger):
    """Wrong: waiting is free."""

    def _book(self, step):
        buckets = np.where(step.shares > 0, self.grid.bucket(step.ratios), 0)
        self._charge(step.indices, buckets)
        return 1


class WaitsForSmallNorms(RenyiLedger):
    """Wrong: stays although the full norm does not fit when it is not drawn."""

    def _exhaust(self, which):
        self._reprieved = which

    def _book(self, step):
        before = self._alive.copy()
        count = super()._book(step)
        self._alive = before
        return count


class ReleasesMoreThanItsBound(RenyiLedger):
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


# Rules ------------------------------------------------------------------------------------------


def test_without_personal_clipping_a_draw_costs_its_norm_and_a_wait_costs_the_bound():
    ledger = ledger_of(10, size=3)
    assert run_step(ledger, {0: 0.3, 2: 0.0}) == {0: 1.0, 2: 1.0}
    assert ledger.spent.tolist() == [cost(0.3), cost(1.0), 0.0]
    assert cost(0.3) >= step_divergence(0.3, order=2.0, probability=0.5, sigma=1.0)
    assert run_step(ledger, {}) == {}
    assert ledger.spent.tolist() == [cost(0.3) + cost(1.0), 2 * cost(1.0), cost(1.0)]
    assert ledger.active_counts == [3, 3]


def test_a_draw_that_does_not_fit_is_left_out_and_a_wait_that_does_not_fit_is_the_end():
    ledger = ledger_of(1.5, size=2)
    run_step(ledger, {0: 1.0, 1: 1.0})
    assert run_step(ledger, {0: 1.0, 1: 1.0}) == {0: 0.0, 1: 0.0}
    assert ledger.spent.tolist() == [cost(1.0)] * 2
    assert ledger.active.tolist() == [True, True]
    assert run_step(ledger, {0: 0.2}) == {0: 1.0}  # a smaller gradient fits
    assert ledger.spent.tolist() == [cost(1.0) + cost(0.2), ledger.budget]
    assert ledger.active.tolist() == [True, False]
    assert run_step(ledger, {0: 0.0, 1: 0.0}) == {0: 1.0, 1: 0.0}
    assert ledger.active_counts == [2, 0, 1, 1]
    assert run_step(ledger, {}) == {}
    assert run_step(ledger, {0: 0.0}) == {0: 0.0}
    assert ledger.active_counts[-2:] == [0, 0]


def test_with_personal_clipping_the_bound_follows_draws_and_is_what_a_wait_costs():
    ledger = ledger_of(50, size=3, personal=1.5)
    assert ledger.bounds.tolist() == [1.0] * 3
    assert run_step(ledger, {0: 0.2, 1: 0.9}) == {0: 1.0, 1: 1.0}
    assert ledger.spent.tolist() == [cost(0.2), cost(0.9), cost(1.0)]
    bound = GRID.values[GRID.bucket(0.2 * 1.5)]
    assert 0.3 <= bound <= 0.3 * GRID.ratio
    assert ledger.bounds.tolist() == [bound, 1.0, 1.0]
    shares = run_step(ledger, {0: 0.8, 2: 0.0})
    assert shares[0] * 0.8 == pytest.approx(bound, rel=1e-15)
    assert shares[2] == 1.0
    assert ledger.spent.tolist() == [cost(0.2) + cost(0.3), cost(0.9) + cost(1.0), cost(1.0)]
    assert ledger.bounds.tolist() == [1.0, 1.0, 0.0]
    assert run_step(ledger, {2: 0.5}) == {2: 0.0}  # nothing is left of it, but the bound recovers
    assert ledger.bounds[2] == GRID.values[GRID.bucket(0.75)]
    assert ledger.active_counts == [3, 3, 3]


def test_a_personal_bound_that_does_not_fit_while_it_waits_is_the_end():
    ledger = ledger_of(2.5, size=3, personal=1.0)
    for _ in range(2):
        assert set(run_step(ledger, {0: 1.0, 1: 1.0, 2: 0.1}).values()) == {1.0}
    assert run_step(ledger, {1: 1.0}) == {1: 0.0}
    assert ledger.active.tolist() == [False, True, True]
    assert run_step(ledger, {0: 0.01, 1: 0.01}) == {0: 0.0, 1: 1.0}  # for 0 it came too late
    assert ledger.spent.tolist() == [
        ledger.budget,
        cost(1.0) + cost(1.0) + cost(0.01),
        4 * cost(0.1),
    ]
    assert ledger.active_counts == [3, 3, 1, 2]


@pytest.mark.parametrize("personal", [None, 1.0, 2.0])
def test_microbatches_and_abandoned_attempts_change_nothing(personal):
    rng = np.random.default_rng(3)
    one, many = (ledger_of(6, size=40, personal=personal) for _ in range(2))
    for _ in range(12):
        drawn = {int(i): float(rng.random()) for i in np.flatnonzero(rng.random(40) < 0.5)}
        many.admit(step=many.steps, part=0, indices=np.array([0, 3]), ratios=np.array([1.0, 0.9]))
        assert run_step(one, drawn) == run_step(many, drawn, parts=int(rng.integers(2, 6)))
        assert one.spent.tolist() == many.spent.tolist()
        assert one.bounds.tolist() == many.bounds.tolist()
    assert one.active_counts == many.active_counts
    assert one.active_counts[-1] < 40


@pytest.mark.parametrize("personal", [None, 1.0, 2.0])
@pytest.mark.parametrize("q", [0.05, 0.5, 1.0])
def test_no_example_ever_exceeds_the_budget(personal, q):
    """Gradients at the clip, just above and below a grid value, and zero."""
    rng = np.random.default_rng(4)
    ledger = ledger_of(7.3, size=200, q=q, personal=personal)
    for _ in range(40):
        indices = np.flatnonzero(rng.random(200) < q)
        near = rng.choice(GRID.values, len(indices)) * rng.choice([1 - 1e-15, 1.0, 1 + 1e-12])
        ratios = np.minimum(np.where(rng.random(len(indices)) < 0.5, near, 1.0), 1.0)
        before = ledger.spent
        step = ledger.steps
        shares = ledger.admit(step=step, part=0, indices=indices, ratios=ratios)
        ledger.commit(step, 1)
        paid = ledger.spent - before
        released = np.zeros(200)
        released[indices] = shares * ratios
        due = step_divergence(released, order=2.0, probability=q, sigma=1.0)
        assert (paid >= due * (1 - 1e-9)).all()
        assert (ledger.spent <= ledger.budget).all()
    assert ledger.spent.max() > 6.9 / 7.3 * ledger.budget


def test_the_record_goes_through_a_checkpoint_unchanged():
    rng = np.random.default_rng(5)
    for personal in (None, 1.3):
        ledger = ledger_of(4, size=30, personal=personal)
        for _ in range(5):
            run_step(
                ledger, {int(i): float(rng.random()) for i in np.flatnonzero(rng.random(30) < 0.4)}
            )
        other = ledger_of(4, size=30, personal=personal)
        other.load_state_dict(ledger.state_dict())
        for name in ("spent", "bounds", "active"):
            assert getattr(other, name).tolist() == getattr(ledger, name).tolist()
        drawn = {i: 0.5 for i in range(0, 30, 2)}
        state = ledger.state_dict()
        assert run_step(other, drawn) == run_step(ledger, drawn)
        assert other.spent.tolist() == ledger.spent.tolist()
        assert state["spending"]["spent"].tolist() != ledger.spent.tolist()  # a copy


def test_another_record_is_refused():
    ledger = ledger_of(4, size=3)
    run_step(ledger, {0: 0.5})
    state = ledger.state_dict()
    with pytest.raises(ValueError, match="of 3 examples"):
        ledger_of(4, size=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"order 2\.0"):
        ledger_of(4, size=3, order=3.0).load_state_dict(state)
    state["spending"]["spent"][1] = math.nan
    with pytest.raises(ValueError, match="budget"):
        ledger_of(4, size=3).load_state_dict(state)
    state["spending"]["spent"][1] = 2 * ledger.budget
    with pytest.raises(ValueError, match="budget"):
        ledger_of(4, size=3).load_state_dict(state)


def test_a_norm_that_is_no_ratio_is_refused():
    ledger = ledger_of(4)
    with pytest.raises(ValueError, match="ratios"):
        ledger.admit(step=0, part=0, indices=np.array([0]), ratios=np.array([1.5]))
    assert ledger.admit(step=0, part=0, indices=NOBODY, ratios=np.empty(0)).shape == (0,)
