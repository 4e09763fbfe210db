"""Whole runs with the Rényi filter under Poisson sampling, against a loop over examples."""

import numpy as np
import pytest
import torch

from dptrain import MatrixMechanism, Poisson
from dptrain.accounting.renyi.sampled_step import step_divergence
from dptrain.individual import RenyiFilter
from dptrain.strategies import Identity
from tests.engine.test_private_training_resume import through_disk
from tests.helpers.engine import MODES, flat, images, make, small_net, train
from tests.helpers.individual_runs import as_they_are, gradients, precise, run, watch

BOUND, RATE, STEPS, SIZE = 2.2, 0.3, 14, 24


def renyi(epsilon=6.0, **options):
    return RenyiFilter(target_epsilon=epsilon, target_delta=1e-3, max_steps=50, **options)


def sampled(module, data, individual, mode="hooks", *, q=RATE, steps=STEPS, **options):
    options = {"max_grad_norm": BOUND, "seed": 5, **options}
    scheme = Poisson(probability=q, dataset_size=len(data), steps=steps)
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
    return make(module, data, mode, mechanism=mechanism, individual=individual, **options)


class Reference:
    """Charges and clipped sums, example by example; wraps the run's record to see who is drawn.

    Attributes:
        found: the gradients of all examples at the step under way.
        sums: what every step releases before noise.
        left_out: draws that did not take part.
        cut: draws that were clipped to a personal bound.
    """

    def __init__(self, private, factor):
        self.private, self.record, self.factor = private, private.individual, factor
        self.spent, self.bounds, self.alive = ([v] * self.record.size for v in (0.0, 1.0, True))
        self.left_out = self.cut = 0
        self.found, self.sums, self.drawn = [], [], []
        admit, commit = self.record.admit, self.record.commit

        def admitting(*, step, part, indices, ratios):
            self.drawn = [*(self.drawn if part else ()), *indices.tolist()]
            return admit(step=step, part=part, indices=indices, ratios=ratios)

        def committing(step, parts):
            self.sums.append(self.step())
            commit(step, parts)

        self.record.admit, self.record.commit = admitting, committing

    def up(self, ratio):
        return float(min(v for v in self.record.grid.values if v >= ratio))

    def cost(self, ratio):
        mechanism = self.private.mechanism
        q, sigma = mechanism.scheme.rate, mechanism.noise_multiplier
        return float(step_divergence(ratio, order=self.record.order, probability=q, sigma=sigma))

    def step(self):
        """The clipped sum of the step; charges everybody."""
        total = torch.zeros_like(self.found[0])
        for i, g in enumerate(self.found):
            if not self.alive[i]:
                continue
            left = self.record.budget - self.spent[i]
            if i not in self.drawn:
                price = self.cost(self.bounds[i])
                self.alive[i] = price <= left
                self.spent[i] += min(price, left)
                continue
            ratio = min(float(g.norm()) * (1 + 1e-6) / BOUND, 1.0)
            kept = min(ratio, self.bounds[i])
            price = self.cost(self.up(kept))
            if price <= left:
                self.spent[i] += price
                total += g * min(1.0, BOUND / (float(g.norm()) + 1e-6)) * (kept / ratio)
                self.cut += kept < ratio
            else:
                self.left_out += 1
            if self.factor is not None:
                self.bounds[i] = self.up(min(1.0, self.factor * ratio))
        return total


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("personal", [None, 1.05])
def test_release_and_charges_are_those_of_a_plain_loop(mode, micro, personal):
    module, data = precise(SIZE)
    individual = renyi(personal_clipping=personal)
    private = sampled(module, data, individual, mode, max_physical_batch_size=micro)
    reference, sums = Reference(private, personal), watch(private)

    def before_step():
        reference.found = gradients(module, data)

    run(private, before_step, as_they_are)
    assert len(sums) == len(reference.sums) == STEPS
    for found, wanted in zip(sums, reference.sums, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    record = private.individual
    np.testing.assert_allclose(record.spent, reference.spent, rtol=1e-9)
    np.testing.assert_allclose(
        record.bounds[reference.alive], np.array(reference.bounds)[reference.alive]
    )
    assert reference.left_out > 0
    assert not all(reference.alive)
    assert (reference.cut > 0) == (personal is not None)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("personal", [None, 1.0])
def test_gradients_that_stay_at_the_clip_never_exceed_the_budget(mode, personal):
    """Tiny R: every norm is at the clip, and everybody pays the full step at every step."""
    individual = renyi(personal_clipping=personal)
    private = sampled(small_net(), images(), individual, mode, max_grad_norm=1e-4, steps=40)
    train(private)
    record = private.individual
    planned = individual.full_norm_steps(private.mechanism)
    assert 0 < planned < 40
    assert (record.spent <= record.budget).all()
    assert record.active_counts == [SIZE] * planned + [0] * (40 - planned)
    assert (record.epsilons(1e-3) <= private.guarantee(1e-3).epsilon).all()
    assert private.guarantee(1e-3).epsilon <= 6.0
    assert not record.active.all()


@pytest.mark.parametrize("personal", [None, 1.3])
def test_larger_gradients_never_cost_less_than_the_worst_case_allows(personal):
    """Individual ε is at most the budget's and that of the plan at the same order."""
    private = sampled(small_net(), images(), renyi(60.0, personal_clipping=personal), steps=30)
    train(private)
    record = private.individual
    full = float(step_divergence(1.0, order=record.order, probability=RATE, sigma=1.0))
    assert (record.spent <= 30 * full * (1 + 1e-12)).all()
    assert record.spent.min() < 29 * full
    assert record.active_counts == [SIZE] * 30


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("personal", [None, 1.5])
def test_empty_batches_charge_everybody(mode, personal):
    private = sampled(small_net(), images(4), renyi(30.0, personal_clipping=personal), mode, q=0.1)
    record, before, empty = private.individual, np.zeros(4), 0
    model, optimizer, loader = private
    criterion = torch.nn.CrossEntropyLoss()
    for x, y in loader:
        drawn = loader.current.indices
        bounds, active = record.bounds, record.active
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        paid, before = record.spent - before, record.spent
        if len(drawn) == 0:
            empty += 1
            due = step_divergence(bounds, order=record.order, probability=0.1, sigma=1.0)
            np.testing.assert_allclose(paid[active], due[active], rtol=1e-9)
    assert empty > 2
    assert record.steps == STEPS


@pytest.mark.slow
@pytest.mark.sample(every=4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("personal", [None, 1.3])
def test_a_resumed_run_is_bit_identical(mode, personal):
    """The record as well; stopped at the end of a step, and within one."""

    def start():
        individual = renyi(4.0, personal_clipping=personal)
        torch.manual_seed(0)
        return sampled(
            small_net(0.3), images(), individual, mode, steps=9, max_physical_batch_size=4
        )

    whole = start()
    train(whole)
    assert whole.individual.active_counts[-1] < SIZE
    for stop in (3, 6):
        first = start()
        train(first, batches=stop)
        state = through_disk(first.state_dict())
        second = start()
        torch.manual_seed(1234)  # whatever the new process's generator holds
        second.load_state_dict(state)
        assert second.individual.steps == second.steps_executed < 9
        assert second.individual.spent.tolist() == first.individual.spent.tolist()
        train(second)
        assert torch.equal(flat(second.module), flat(whole.module))
        assert second.individual.active_counts == whole.individual.active_counts
        for name in ("spent", "bounds", "active"):
            found, wanted = (getattr(each.individual, name) for each in (second, whole))
            assert found.tolist() == wanted.tolist()


def test_a_record_of_another_filter_is_refused():
    first = sampled(small_net(), images(), renyi())
    train(first, batches=2)
    state = through_disk(first.state_dict())
    for other in (renyi(7.0), renyi(order=9.0), renyi(personal_clipping=1.0), None):
        private = sampled(small_net(), images(), other)
        before = flat(private.module)
        with pytest.raises(ValueError, match="individual"):
            private.load_state_dict(state)
        assert torch.equal(flat(private.module), before)


def test_small_gradients_take_part_longer_with_personal_clipping():
    """What it is for: norms far below R, seen rarely."""
    active = {}
    for personal in (None, 1.5):
        individual = renyi(personal_clipping=personal)
        private = sampled(small_net(), images(), individual, max_grad_norm=15.0, steps=40, lr=1e-4)
        train(private)
        active[personal] = private.individual.active_counts
    assert all(a <= b for a, b in zip(active[None], active[1.5], strict=True))
    assert active[None][-1] < SIZE / 4
    assert active[1.5][-1] > SIZE / 2
