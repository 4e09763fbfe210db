"""Trainable parameters that no gradient reaches are named, once."""

import logging

import peft
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, Loading, Poisson
from tests.helpers.engine import wire

ROWS = 6


class TwoHeads(nn.Module):
    """With a head that is called in some steps only, or never."""

    def __init__(self, *, other_from=None):
        super().__init__()
        self.body, self.head, self.other = (nn.Linear(4, 4) for _ in range(3))
        self.calls, self.other_from = 0, other_from

    def forward(self, x):
        h = self.body(x).tanh()
        if self.other_from is not None and step["now"] >= self.other_from:
            return self.head(h) + self.other(h)
        return self.head(h)


step = {"now": 0}


def train(model, caplog, *, steps=2, mode=None, most=None):
    """The warnings of this kind in each step, and the run."""
    private = wire(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data=TensorDataset(torch.randn(ROWS, 4), torch.randint(0, 4, (ROWS,))),
        scheme=Poisson(probability=1.0, dataset_size=ROWS, steps=steps),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        seed=1,
        gradients=Gradients(mode=mode),
        loading=Loading(max_physical_batch_size=most),
    )
    said: list[list[str]] = [[]]
    step["now"] = 0
    for x, y in private.loader:
        caplog.clear()
        private.optimizer.zero_grad()
        nn.functional.cross_entropy(private.module(x), y).backward()
        private.optimizer.step()
        said[-1] += [m for r in caplog.records if "no gradient reached" in (m := r.getMessage())]
        if private.optimizer.at_step_boundary:
            step["now"] += 1
            said.append([])
    return said[:-1]


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
@pytest.mark.parametrize("most", [None, 2])
def test_what_no_call_reaches_is_named_after_the_first_step(mode, most, caplog):
    caplog.set_level(logging.WARNING)
    model = TwoHeads()
    before = model.other.weight.clone()
    first, *later = train(model, caplog, mode=mode, most=most, steps=3)
    assert len(first) == 1
    assert "2 trainable parameters in the first step: 'other.weight', 'other.bias'." in first[0]
    assert "requires_grad_(False)" in first[0]
    assert later == [[], []]
    assert not torch.equal(model.other.weight, before)  # noise, as the warning says


def test_nothing_is_said_where_all_is_reached_or_frozen(caplog):
    caplog.set_level(logging.WARNING)
    assert train(TwoHeads(other_from=0), caplog) == [[], []]
    model = TwoHeads()
    model.other.requires_grad_(False)
    assert train(model, caplog) == [[], []]


def test_layers_that_take_part_in_some_steps_only(caplog):
    """It is said once, with the remark that there may be nothing wrong."""
    caplog.set_level(logging.WARNING)
    (said,), *later = train(TwoHeads(other_from=1), caplog, steps=3)
    assert "layer drop" in said
    assert later == [[], []]


def test_adapters_that_are_not_active(caplog):
    """As in a run that lost its 45 GPU hours: an adapter that was added and not set."""
    caplog.set_level(logging.WARNING)
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0", "1"])
    )
    config = peft.LoraConfig(target_modules=["0"])
    model.add_adapter("forgotten", config)
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name)
    (said,), _ = train(model, caplog)
    assert "forgotten" in said
    assert "default" not in said


def test_a_zero_gradient_is_a_gradient(caplog):
    """LoRA's first matrix has none but zeros in the first step."""
    caplog.set_level(logging.WARNING)
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0"])
    )
    assert train(model, caplog) == [[], []]
