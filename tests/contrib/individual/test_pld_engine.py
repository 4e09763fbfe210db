"""Whole runs with the PLD filter under Poisson sampling."""

import numpy as np
import pytest
import torch

from dptrain.individual import PLDFilter
from tests.contrib.individual.test_renyi_engine import SIZE, sampled
from tests.engine.test_resume import through_disk
from tests.helpers.engine import MODES, flat, images, small_net, train


def pld(epsilon=6.0, **options):
    return PLDFilter(target_epsilon=epsilon, target_delta=1e-3, max_steps=50, **options)


@pytest.mark.slow
@pytest.mark.sample(every=4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("personal", [None, 1.0])
def test_gradients_that_stay_at_the_clip_take_part_in_the_planned_steps(mode, personal):
    """Tiny R: every norm is at the clip."""
    individual = pld(personal_clipping=personal)
    private = sampled(small_net(), images(), individual, mode, max_grad_norm=1e-4, steps=40)
    train(private)
    planned = individual.full_norm_steps(private.mechanism)
    assert 0 < planned < 40
    assert private.individual.active_counts == [SIZE] * planned + [0] * (40 - planned)
    guarantee = private.guarantee(1e-3)
    assert guarantee.epsilon <= 6.0
    assert guarantee.kind.value == "estimate"
    assert (private.individual.epsilons(1e-3) <= guarantee.epsilon * (1 + 1e-9)).all()


@pytest.mark.slow
@pytest.mark.parametrize("personal", [pytest.param(None, marks=pytest.mark.slow), 1.3])
def test_a_resumed_run_is_bit_identical(personal):
    """Stopped at the end of a step, and within one."""

    def start():
        torch.manual_seed(0)
        individual = pld(personal_clipping=personal)
        return sampled(small_net(0.3), images(), individual, max_physical_batch_size=4, steps=25)

    whole = start()
    train(whole)
    assert whole.individual.active_counts[-1] < SIZE
    for stop in (3, 8, 20):
        first = start()
        train(first, batches=stop)
        state = through_disk(first.state_dict())  # with torch's own generator, so at once
        second = start()
        torch.manual_seed(1234)
        second.load_state_dict(state)
        train(second)
        assert torch.equal(flat(second.module), flat(whole.module))
        mine, theirs = second.individual.state_dict(), whole.individual.state_dict()
        assert mine["active_counts"] == theirs["active_counts"]
        for name, value in mine["spending"].items():
            assert np.array_equal(value, theirs["spending"][name])
