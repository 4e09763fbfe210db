"""Charges, shares and bounds under Poisson sampling, rule by rule."""

import math

import numpy as np
import pytest

from dptrain.accounting.renyi.sampled_step import step_divergence
from tests.helpers.hidden_coins import GRID, NOBODY, cost, record_of


def run_step(record, drawn, parts=1):
    """One step; ``drawn`` maps examples to norm ratios. Returns their shares."""
    indices = np.array(list(drawn), dtype=np.int64)
    ratios = np.array(list(drawn.values()), dtype=float)
    shares = []
    for part, rows in enumerate(np.array_split(np.arange(len(indices)), parts)):
        shares.append(
            record.admit(step=record.steps, part=part, indices=indices[rows], ratios=ratios[rows])
        )
    record.commit(record.steps, parts)
    return dict(zip(drawn, np.concatenate(shares).tolist(), strict=True))


def test_without_personal_clipping_a_draw_costs_its_norm_and_a_wait_costs_the_bound():
    record = record_of(10, size=3)
    assert run_step(record, {0: 0.3, 2: 0.0}) == {0: 1.0, 2: 1.0}
    assert record.spent.tolist() == [cost(0.3), cost(1.0), 0.0]
    assert cost(0.3) >= step_divergence(0.3, order=2.0, probability=0.5, sigma=1.0)
    assert run_step(record, {}) == {}
    assert record.spent.tolist() == [cost(0.3) + cost(1.0), 2 * cost(1.0), cost(1.0)]
    assert record.active_counts == [3, 3]


def test_a_draw_that_does_not_fit_is_left_out_and_a_wait_that_does_not_fit_is_the_end():
    record = record_of(1.5, size=2)
    run_step(record, {0: 1.0, 1: 1.0})
    assert run_step(record, {0: 1.0, 1: 1.0}) == {0: 0.0, 1: 0.0}
    assert record.spent.tolist() == [cost(1.0)] * 2
    assert record.active.tolist() == [True, True]
    assert run_step(record, {0: 0.2}) == {0: 1.0}  # a smaller gradient fits
    assert record.spent.tolist() == [cost(1.0) + cost(0.2), record.budget]
    assert record.active.tolist() == [True, False]
    assert run_step(record, {0: 0.0, 1: 0.0}) == {0: 1.0, 1: 0.0}
    assert record.active_counts == [2, 0, 1, 1]
    assert run_step(record, {}) == {}
    assert run_step(record, {0: 0.0}) == {0: 0.0}
    assert record.active_counts[-2:] == [0, 0]


def test_with_personal_clipping_the_bound_follows_draws_and_is_what_a_wait_costs():
    record = record_of(50, size=3, personal=1.5)
    assert record.bounds.tolist() == [1.0] * 3
    assert run_step(record, {0: 0.2, 1: 0.9}) == {0: 1.0, 1: 1.0}
    assert record.spent.tolist() == [cost(0.2), cost(0.9), cost(1.0)]
    bound = GRID.values[GRID.bucket(0.2 * 1.5)]
    assert 0.3 <= bound <= 0.3 * GRID.ratio
    assert record.bounds.tolist() == [bound, 1.0, 1.0]
    shares = run_step(record, {0: 0.8, 2: 0.0})
    assert shares[0] * 0.8 == pytest.approx(bound, rel=1e-15)
    assert shares[2] == 1.0
    assert record.spent.tolist() == [cost(0.2) + cost(0.3), cost(0.9) + cost(1.0), cost(1.0)]
    assert record.bounds.tolist() == [1.0, 1.0, 0.0]
    assert run_step(record, {2: 0.5}) == {2: 0.0}  # nothing is left of it, but the bound recovers
    assert record.bounds[2] == GRID.values[GRID.bucket(0.75)]
    assert record.active_counts == [3, 3, 3]


def test_a_personal_bound_that_does_not_fit_while_it_waits_is_the_end():
    record = record_of(2.5, size=3, personal=1.0)
    for _ in range(2):
        assert set(run_step(record, {0: 1.0, 1: 1.0, 2: 0.1}).values()) == {1.0}
    assert run_step(record, {1: 1.0}) == {1: 0.0}
    assert record.active.tolist() == [False, True, True]
    assert run_step(record, {0: 0.01, 1: 0.01}) == {0: 0.0, 1: 1.0}  # for 0 it came too late
    assert record.spent.tolist() == [
        record.budget,
        cost(1.0) + cost(1.0) + cost(0.01),
        4 * cost(0.1),
    ]
    assert record.active_counts == [3, 3, 1, 2]


@pytest.mark.parametrize("personal", [None, 1.0, 2.0])
def test_microbatches_and_abandoned_attempts_change_nothing(personal):
    rng = np.random.default_rng(3)
    one, many = (record_of(6, size=40, personal=personal) for _ in range(2))
    for _ in range(12):
        drawn = {int(i): float(rng.random()) for i in np.flatnonzero(rng.random(40) < 0.5)}
        many.admit(step=many.steps, part=0, indices=np.array([0, 3]), ratios=np.array([1.0, 0.9]))
        assert run_step(one, drawn) == run_step(many, drawn, parts=int(rng.integers(2, 6)))
        assert one.spent.tolist() == many.spent.tolist()
        assert one.bounds.tolist() == many.bounds.tolist()
    assert one.active_counts == many.active_counts
    assert one.active_counts[-1] < 40


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("personal", [None, 1.0, 2.0])
@pytest.mark.parametrize("q", [0.05, 0.5, 1.0])
def test_no_example_ever_exceeds_the_budget(personal, q):
    """Gradients at the clip, just above and below a grid value, and zero."""
    rng = np.random.default_rng(4)
    record = record_of(7.3, size=200, q=q, personal=personal)
    for _ in range(40):
        indices = np.flatnonzero(rng.random(200) < q)
        near = rng.choice(GRID.values, len(indices)) * rng.choice([1 - 1e-15, 1.0, 1 + 1e-12])
        ratios = np.minimum(np.where(rng.random(len(indices)) < 0.5, near, 1.0), 1.0)
        before = record.spent
        step = record.steps
        shares = record.admit(step=step, part=0, indices=indices, ratios=ratios)
        record.commit(step, 1)
        paid = record.spent - before
        released = np.zeros(200)
        released[indices] = shares * ratios
        due = step_divergence(released, order=2.0, probability=q, sigma=1.0)
        assert (paid >= due * (1 - 1e-9)).all()
        assert (record.spent <= record.budget).all()
    assert record.spent.max() > 6.9 / 7.3 * record.budget


def test_the_record_goes_through_a_checkpoint_unchanged():
    rng = np.random.default_rng(5)
    for personal in (None, 1.3):
        record = record_of(4, size=30, personal=personal)
        for _ in range(5):
            run_step(
                record, {int(i): float(rng.random()) for i in np.flatnonzero(rng.random(30) < 0.4)}
            )
        other = record_of(4, size=30, personal=personal)
        other.load_state_dict(record.state_dict())
        for name in ("spent", "bounds", "active"):
            assert getattr(other, name).tolist() == getattr(record, name).tolist()
        drawn = {i: 0.5 for i in range(0, 30, 2)}
        state = record.state_dict()
        assert run_step(other, drawn) == run_step(record, drawn)
        assert other.spent.tolist() == record.spent.tolist()
        assert state["spending"]["spent"].tolist() != record.spent.tolist()  # a copy


def test_another_record_is_refused():
    record = record_of(4, size=3)
    run_step(record, {0: 0.5})
    state = record.state_dict()
    with pytest.raises(ValueError, match="has 3 examples"):
        record_of(4, size=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"order 2\.0"):
        record_of(4, size=3, order=3.0).load_state_dict(state)
    state["spending"]["spent"][1] = math.nan
    with pytest.raises(ValueError, match="budget"):
        record_of(4, size=3).load_state_dict(state)
    state["spending"]["spent"][1] = 2 * record.budget
    with pytest.raises(ValueError, match="budget"):
        record_of(4, size=3).load_state_dict(state)


def test_a_norm_that_is_no_ratio_is_refused():
    record = record_of(4)
    with pytest.raises(ValueError, match="ratios"):
        record.admit(step=0, part=0, indices=np.array([0]), ratios=np.array([1.5]))
    assert record.admit(step=0, part=0, indices=NOBODY, ratios=np.empty(0)).shape == (0,)
