"""Single steps in modes hooks and functorch, and modules to take them with."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, Loading, Poisson, PrivacyEngine
from tests.helpers.architectures import Architecture
from tests.helpers.architectures_parts import Residual, disturb
from tests.helpers.clipping_oracle import (
    assert_norms,
    assert_sums,
    flat_factors,
    reduced,
    reference,
)

OLDER = ["hooks", "functorch"]
ROWS = 4
TOLERANCE = 1e-10  # of doubles

older = pytest.mark.parametrize("mode", OLDER)


class Loss:
    """The oracle's loss as a criterion, which make_private checks."""

    def __init__(self, reduction):
        self.reduction = reduction

    def __call__(self, output, targets):
        return reduced(output, targets, self.reduction)


def wired(a, mode, bound=0.5, reduction="mean", most=None, probe="shapes"):
    return PrivacyEngine().make_private(
        module=a.module,
        optimizer=torch.optim.SGD([p for p in a.module.parameters() if p.requires_grad], lr=0.0),
        data=TensorDataset(*a.inputs, a.targets),
        scheme=Poisson(probability=1.0, dataset_size=a.examples, steps=1),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        seed=1,
        gradients=Gradients(loss=Loss(reduction), mode=mode, probe=probe),
        loading=Loading(max_physical_batch_size=most),
    )


def step(private):
    """What the one step releases, undone of the division by the batch size; and the norms."""
    model, optimizer, loader = private
    loss = Loss(optimizer.loss_reduction)
    examples = 0
    for *inputs, targets in loader:
        optimizer.zero_grad()
        loss(model(*inputs), targets).backward()
        optimizer.step()
        examples += len(targets)
    scale = examples if optimizer.loss_reduction == "mean" else 1
    return [p.grad * scale for p in optimizer.params], optimizer.clipper.norms


def check(a, mode, bound=0.5, reduction="mean"):
    wanted = reference(a.module, a.inputs, a.targets)
    sums, norms = step(wired(a, mode, bound, reduction))
    assert_norms(norms, wanted, TOLERANCE)
    assert_sums(sums, wanted, flat_factors(wanted.norms, bound, torch.ones(a.examples)), TOLERANCE)


def with_features(*layers, shape=(3, 5, 4), rows=ROWS):
    return batch(nn.Sequential(*layers), torch.randn(rows, *shape, dtype=torch.float64))


def batch(module, x):
    torch.manual_seed(3)
    disturb(module)
    targets = torch.tensor([30.0, -20.0, 0.3, 1.5], dtype=torch.float64)[: len(x)]
    return Architecture(module=module.double(), inputs=(x,), targets=targets, views=1)


class Call(nn.Module):
    """A function of some layers and the input."""

    def __init__(self, run, *layers):
        super().__init__()
        self.run, self.layers = run, nn.ModuleList(layers)

    def forward(self, x):
        return self.run(x, *self.layers)


def last(x):
    """As it is, but with the channels last in memory."""
    return x.contiguous(memory_format=torch.channels_last)


def shared_layer(how):
    layer = nn.Linear(3, 3)
    inner = layer if how == "residual" else nn.Sequential(nn.Sequential(layer), nn.Tanh())
    return nn.Sequential(layer, nn.Tanh(), Residual(inner))
