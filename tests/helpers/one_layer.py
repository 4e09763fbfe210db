"""A layer behind another one, and what is clipped of both against the loop."""

from __future__ import annotations

import torch
from torch import nn

from tests.helpers.architectures import Architecture
from tests.helpers.architectures_parts import disturb
from tests.helpers.architectures_runs import backward, one_batch
from tests.helpers.clipping_oracle import (
    TOLERANCE,
    assert_norms,
    assert_sums,
    flat_factors,
    reference,
)

ROWS, WIDTH = 5, 6


class Net(nn.Module):
    """Layers by name, and a function of them and the input."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        self.first = nn.Linear(WIDTH, WIDTH)
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.run(self, self.first(x))


def one(layer, run=lambda m, h: m.f(h)):
    return lambda: Net(run, f=layer())


def architecture(build, dtype=torch.float64, rows=ROWS):
    torch.manual_seed(3)
    module = build()
    disturb(module)
    targets = torch.tensor([0.3, -20.0, 4.0, 1.5, 0.1], dtype=dtype)[:rows]
    x = torch.randn(rows, 4, WIDTH).to(dtype)
    return Architecture(module=module.to(dtype), inputs=(x,), targets=targets, views=1)


def check(a, wanted=None):
    wanted = wanted or reference(a.module, a.inputs, a.targets)
    private = one_batch(a, "bookkeeping", reduction="mean")
    backward(private, a)
    clipper = private.optimizer.clipper
    sums = clipper.clipped_sum(max_grad_norm=0.5, weights=torch.ones(a.examples), scales=None)
    assert_norms(clipper.norms, wanted, TOLERANCE[a.dtype])
    factors = flat_factors(wanted.norms, 0.5, torch.ones(a.examples))
    assert_sums(sums, wanted, factors, TOLERANCE[a.dtype])
    return private
