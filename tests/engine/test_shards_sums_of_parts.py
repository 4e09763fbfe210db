"""Clipped sums of parts of a batch: gathered in float64, and what rounding does to R."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Loading, Poisson, PrivacyEngine, ScaledAdam
from dptrain.engine.shards import add_part
from scripts.bench.sum_rounding import MODELS, clipped_sum, worst


class Holder:
    def __init__(self):
        self.summed_grad = None


def test_parts_are_added_up_in_float64():
    """2^24 + 1 + … + 1: in float32 every 1 is lost."""
    holder = Holder()
    add_part([torch.tensor([2.0**24])], [holder])
    assert holder.summed_grad.dtype is torch.float32
    for _ in range(100):
        add_part([torch.tensor([1.0])], [holder])
        add_part([None], [holder])
    assert holder.summed_grad.tolist() == [2.0**24 + 100]


def test_a_part_is_taken_as_it_is_where_there_is_no_other():
    holder, part = Holder(), torch.ones(3)
    add_part([part], [holder])
    assert holder.summed_grad is part


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("micro", [None, 16])
def test_sums_of_neighbors_differ_by_the_bound_up_to_rounding(name, micro):
    """R plus what is measured, which is far below the worst case; no less than nearly R."""
    batch = 96
    with_it, without = (
        clipped_sum(name, batch, micro, present=present) for present in (True, False)
    )
    moved = float((with_it - without).norm())
    assert moved <= 1.0 + 2e-6 < 1.0 + worst(micro or batch)
    assert moved >= 1.0 - 1e-4  # it is clipped, so that the comparison is one with R


def test_the_order_of_parts_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1000, generator=generator) for _ in range(50)]
    sums = []
    for order in (parts, parts[::-1]):
        holder = Holder()
        for part in order:
            add_part([part.clone()], [holder])
        sums.append(holder.summed_grad)
    assert nn.functional.l1_loss(*sums) < 1e-14
    exact = torch.stack(parts).double().sum(0)
    assert (sums[0] - exact).abs().max() < 1e-13


def test_the_worst_case_is_the_bound_of_sums():
    assert worst(64) == pytest.approx(2 * 64 * 63 * 2.0**-24, rel=1e-4)
    assert worst(1) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["SGD", "ScaledAdam"])
def test_a_release_does_not_tell_how_many_parts_there_were(optimizer, dtype):
    """Sums of two parts are float64: the release, and what it is divided by, must not show it."""

    def released(micro):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 200, bias=False), nn.Linear(200, 3, bias=False))
        model = model.to(dtype)
        made = {
            "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
            "ScaledAdam": lambda p: ScaledAdam(p, lr=0.01, eps_scale=0.1),
        }[optimizer](model.parameters())
        x, y = torch.zeros(12, 40, dtype=dtype), torch.zeros(12, dtype=torch.long)
        private = PrivacyEngine().make_private(
            module=model,
            optimizer=made,
            data=TensorDataset(x, y),  # gradients of zeros are zero: noise alone is released
            scheme=Poisson(probability=1.0, dataset_size=12, steps=3),
            noise_multiplier=0.7,
            max_grad_norm=0.3,
            seed=5,
            loading=Loading(max_physical_batch_size=micro),
        )
        found = []
        made.register_step_pre_hook(
            lambda *_: found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        )
        for rows, labels in private.loader:
            private.optimizer.zero_grad()
            nn.functional.cross_entropy(private.module(rows), labels).backward()
            private.optimizer.step()
        return torch.stack(found)

    assert torch.equal(released(None), released(4))
