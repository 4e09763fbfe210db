"""Filtered runs in which something goes wrong: broken gradients, abandoned and cut-off steps."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain.individual import GDPFilter
from tests.helpers.engine import flat, images, small_net, train
from tests.helpers.individual_runs import (
    BOUND,
    FILTER,
    SIGMA,
    Algorithm1,
    check_against_algorithm_1,
    filtered,
    gradients,
    precise,
)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("micro", [None, 5])
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_broken_gradients_cost_and_contribute_nothing(mode, micro, bad):
    model, data = precise()
    x = data.tensors[0]
    x[2], x[9, 0, 1, 1] = bad, float("nan")
    private = filtered(
        model,
        data,
        FILTER,
        mode,
        steps=4,
        sigma=SIGMA,
        max_grad_norm=BOUND,
        max_physical_batch_size=micro,
        lr=0.2,
    )
    check_against_algorithm_1(private, data, FILTER, lambda: gradients(model, data), broken=2)
    assert private.individual.spent[[2, 9]].tolist() == [0.0, 0.0]
    assert (np.delete(private.individual.spent, [2, 9]) > 0).all()
    assert torch.isfinite(flat(model)).all()


def test_half_precision_gradients_are_charged_in_float32():
    """The gradient of w·x is x, exactly, also in bfloat16."""
    torch.manual_seed(0)
    x = (torch.randn(6, 40) * torch.tensor([0.02, 0.1, 0.2, 0.5, 1.0, 4.0])[:, None]).bfloat16()
    model = nn.Linear(40, 1, bias=False).bfloat16()
    individual = GDPFilter(target_epsilon=1.0, target_delta=1e-3, max_steps=50)
    data = TensorDataset(x, torch.zeros(6))
    private = filtered(
        model, data, individual, steps=6, sigma=5.0, max_grad_norm=2.0, loss_reduction="sum"
    )
    reference = Algorithm1(individual.budget, 5.0, 6)
    wrapped, optimizer, loader = private
    for rows, _ in loader:
        reference.step(list(x.double()), 2.0)
        optimizer.zero_grad()
        wrapped(rows).sum().backward()
        optimizer.step()
    np.testing.assert_allclose(private.individual.spent**2, reference.squares, rtol=3e-6)
    assert (private.individual.spent**2 >= np.array(reference.squares)).all()
    assert 0 < private.individual.active_counts[-1] < 6


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_abandoned_and_repeated_passes_are_charged_once(mode):
    ends = []
    for disturbed in (False, True):
        model, data = precise()
        private = filtered(
            model,
            data,
            FILTER,
            mode,
            steps=4,
            sigma=SIGMA,
            max_grad_norm=BOUND,
            max_physical_batch_size=5,
        )
        if disturbed:
            train(private, batches=1)  # broken off after the first microbatch,
            assert private.individual.spent.max() == 0
            train(private, batches=5)  # and again in the second step
            wrapped, optimizer, loader = private
            criterion = nn.CrossEntropyLoss()
            for x, y in loader:  # a second backward pass in place of a first one
                criterion(wrapped(x), y).backward()
                optimizer.zero_grad()
                criterion(wrapped(x), y).backward()
                optimizer.step()
                if private.steps_executed == 3:
                    break
        train(private)
        assert private.individual.steps == 4
        ends.append((flat(model), private.individual.spent))
    assert torch.equal(ends[0][0], ends[1][0])
    np.testing.assert_array_equal(ends[0][1], ends[1][1])


def test_an_interrupted_release_is_mended_by_the_checkpoint_only():
    model, data = precise()
    options = {"steps": 5, "sigma": SIGMA, "max_grad_norm": BOUND, "max_physical_batch_size": 5}
    whole = filtered(copy.deepcopy(model), data, FILTER, **options)
    train(whole)
    private = filtered(model, data, FILTER, **options)
    train(private, steps=2)
    state, spent = private.state_dict(), private.individual.spent

    def stop(optimizer):
        optimizer.step_hook = None
        raise KeyboardInterrupt

    private.optimizer.attach_step_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        train(private)
    with pytest.raises(RuntimeError, match="interrupted"):
        train(private)
    np.testing.assert_array_equal(private.individual.spent, spent)
    private.load_state_dict(state)
    train(private)
    assert torch.equal(flat(model), flat(whole.module))
    np.testing.assert_array_equal(private.individual.spent, whole.individual.spent)


def test_steps_beyond_the_plan_are_refused_and_cost_nothing():
    private = filtered(small_net(), images(8), FILTER, steps=2, sigma=SIGMA)
    train(private)
    spent = private.individual.spent
    with pytest.raises(RuntimeError, match="all 2 planned steps"):
        train(private)
    np.testing.assert_array_equal(private.individual.spent, spent)


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_a_bound_changed_inside_a_step_is_charged_from_the_next_one_on(mode):
    """The step is clipped and noised with its old bound: a larger one would charge too little."""
    ends = []
    for changed in (False, True):
        model, data = precise()
        options = {"steps": 2, "sigma": SIGMA, "max_grad_norm": 0.5, "max_physical_batch_size": 5}
        private = filtered(model, data, FILTER, mode, **options)
        optimizer = private.optimizer

        def after_step(optimizer=optimizer, changed=changed):
            optimizer.max_grad_norm = 50.0 if changed and not optimizer.at_step_boundary else 0.5

        train(private, steps=1, after_step=after_step)
        ends.append((flat(model), private.individual.spent))
    assert torch.equal(ends[0][0], ends[1][0])
    np.testing.assert_array_equal(ends[0][1], ends[1][1])
    np.testing.assert_allclose(ends[0][1], 1 / SIGMA)  # all norms are above 0.5
