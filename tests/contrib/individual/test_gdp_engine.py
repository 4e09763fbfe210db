"""Filtered runs against Algorithm 1 example by example, in every mode."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from dptrain.engine.scaled_adam import ScaledAdam
from dptrain.individual import GDPFilter
from tests.clipping.base.test_row_groups_views import consecutive, one_by_one, viewed
from tests.helpers.engine import everything_every_step, make, small_net, train
from tests.helpers.individual_runs import (
    BOUND,
    FILTER,
    SIGMA,
    STEPS,
    Algorithm1,
    as_they_are,
    bare,
    check_against_algorithm_1,
    filtered,
    gradients,
    make_with,
    precise,
    run,
    watch,
)

FULL = GDPFilter(target_epsilon=6.0, target_delta=1e-3, max_steps=50, full_consumption=True)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize(
    ("reduction", "micro"), [("mean", None), ("sum", 5), ("mean", 1), ("sum", 1)]
)
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_a_run_is_algorithm_1(mode, reduction, micro):
    model, data = precise()
    private = filtered(
        model,
        data,
        FILTER,
        mode,
        steps=STEPS,
        sigma=SIGMA,
        max_grad_norm=BOUND,
        loss_reduction=reduction,
        max_physical_batch_size=micro,
        lr=0.2 if reduction == "mean" else 0.2 / len(data),
    )
    reference = check_against_algorithm_1(private, data, FILTER, lambda: gradients(model, data))
    shares = np.array(reference.history)
    assert (shares[:2] == 1).all()  # nobody is left out at first,
    assert (shares.min(0) == 0).sum() >= 6  # then many are, some of them
    assert reference.returned  # only until their gradient is smaller


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_the_release_is_that_of_the_active_examples_alone(mode):
    """Each step again without a filter, on a data set without the examples that were left out."""
    model, data = precise()
    options = {"max_grad_norm": BOUND, "steps": STEPS, "sigma": SIGMA, "lr": 0.2}
    private = filtered(model, data, FILTER, mode, **options)
    reference = Algorithm1(FILTER.budget, SIGMA, len(data))
    sums, snapshots = watch(private), []

    def before_step():
        snapshots.append(bare(model))
        reference.step(gradients(model, data), BOUND)

    run(private, before_step, as_they_are)
    assert min(map(sum, reference.history)) < len(data)
    for found, snapshot, shares in zip(sums, snapshots, reference.history, strict=True):
        active = [i for i, share in enumerate(shares) if share]
        alone = make(
            snapshot,
            Subset(data, active),
            mode,
            scheme=everything_every_step(len(active), 1),
            noise_multiplier=0.0,
            max_grad_norm=BOUND,
        )
        dropped = watch(alone)
        train(alone)
        torch.testing.assert_close(found, dropped[0], rtol=1e-10, atol=1e-10)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("micro", [None, 1])
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_full_consumption_scales_the_last_gradient_down(mode, micro):
    model, data = precise()
    private = filtered(
        model,
        data,
        FULL,
        mode,
        steps=STEPS,
        sigma=SIGMA,
        max_grad_norm=BOUND,
        max_physical_batch_size=micro,
        lr=0.2,
    )
    check_against_algorithm_1(private, data, FULL, lambda: gradients(model, data))
    assert (private.individual.spent == FULL.budget).sum() >= 6


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("individual", [FILTER, FULL])
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_scaled_gradients_are_charged_as_scaled(mode, individual):
    model, data = precise()
    optimizer = ScaledAdam(model.parameters(), lr=0.02, eps_scale=0.05)
    private = make_with(
        optimizer,
        model,
        data,
        individual,
        mode,
        steps=STEPS,
        sigma=SIGMA,
        max_grad_norm=30.0,
        max_physical_batch_size=5,
    )

    def scaled():
        s = torch.cat([optimizer.scales()[p].flatten() for p in private.optimizer.params])
        return [g * s for g in gradients(model, data)]

    reference = check_against_algorithm_1(private, data, individual, scaled)
    assert np.array(reference.history).min() < 1


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_a_public_schedule_of_bounds_is_charged_by_the_bound_of_each_step(mode):
    model, data = precise()
    private = filtered(model, data, FILTER, mode, steps=STEPS, sigma=SIGMA, lr=0.2)
    bounds = [2.0, 3.0, 1.5, 0.5, 4.0, 2.5, 2.0, 1.0, 3.5]
    check_against_algorithm_1(private, data, FILTER, lambda: gradients(model, data), bounds)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_the_mean_over_views_is_charged(mode):
    model, data = small_net().double(), viewed(size=10)
    private = filtered(
        model,
        data,
        FILTER,
        mode,
        steps=STEPS,
        sigma=SIGMA,
        max_grad_norm=1.0,
        views=3,
        max_physical_batch_size=4,
        lr=0.2,
    )

    def means():
        snapshot = bare(model)
        return [one_by_one(snapshot, Subset(data, [i]), 1e12) for i in range(len(data))]

    reference = check_against_algorithm_1(private, data, FILTER, means, rows=consecutive)
    assert np.array(reference.history).min() == 0


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_frozen_parameters_are_neither_trained_nor_charged(mode):
    model, data = precise()
    model[0].requires_grad_(False)
    private = filtered(
        model, data, FILTER, mode, steps=STEPS, sigma=SIGMA, max_grad_norm=BOUND, lr=0.2
    )
    start = copy.deepcopy(model[0].state_dict())
    check_against_algorithm_1(private, data, FILTER, lambda: gradients(model, data))
    assert all(torch.equal(start[name], value) for name, value in model[0].state_dict().items())


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_478_full_norm_steps_run_and_not_one_more(mode):
    """ε = 0.8 at δ = 1e-5 and σ = 100, with gradients 1000 times the bound."""
    individual = GDPFilter(target_epsilon=0.8, target_delta=1e-5, max_steps=480)
    model = nn.Linear(2, 1, bias=False)
    data = TensorDataset(torch.tensor([[600.0, 800.0], [0.0, 0.25]]), torch.zeros(2))
    private = make_with(
        torch.optim.SGD(model.parameters(), lr=0.0),
        model,
        data,
        individual,
        mode,
        steps=480,
        sigma=100.0,
        max_grad_norm=1.0,
        loss_reduction="sum",
        criterion=Output(),
    )
    wrapped, optimizer, loader = private
    criterion, sums = Output(), watch(private)
    for x, y in loader:
        criterion(wrapped(x), y).backward()
        optimizer.step()
    both, alone = torch.tensor([0.6, 0.8 + 0.25]), torch.tensor([0.0, 0.25])
    torch.testing.assert_close(torch.stack(sums[:478]), both.expand(478, 2), rtol=0, atol=2e-6)
    torch.testing.assert_close(torch.stack(sums[478:]), alone.expand(2, 2), rtol=0, atol=2e-6)
    assert private.individual.active_counts == [2] * 478 + [1] * 2
    assert private.guarantee().epsilon == pytest.approx(0.8, rel=1e-9)


class Output:
    """A loss whose gradient is that of the model's output."""

    reduction = "sum"

    def __call__(self, out, _y):
        losses = out.flatten(1).sum(1)
        return losses if self.reduction == "none" else losses.sum()
