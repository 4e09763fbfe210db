"""Modules that count the rows of a batch, or know a row's place in it, are refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.clipping.probe.test_probe import Net, check, numbers, run_of, step
from tests.helpers.engine import MODES

ROWS = 5


def linear():
    return nn.Linear(4, 4)


def places(x):
    return torch.arange(len(x), dtype=x.dtype)[:, None, None]


class MeanLoss(nn.Module):
    """Returns the loss of its batch, as a mean over the rows or as a sum."""

    def __init__(self, reduction):
        super().__init__()
        self.f, self.reduction = linear(), reduction

    def forward(self, x):
        losses = self.f(x).square().mean((1, 2))
        return losses.mean() if self.reduction == "mean" else losses.sum()


# One example more changes what is made of all others.
COUNTS = {
    "divided by the rows": lambda m, x: m.f(x) / len(x),
    "divided within": lambda m, x: m.g(m.f(x) / x.shape[0]),
    "places": lambda m, x: m.f(x) + 0.1 * places(x),
    "turned by the place": lambda m, x: m.f(x) * (1 - 2 * (places(x) % 2)),
    "the first is spared": lambda m, x: m.f(x) * (places(x) > 0),
    "places beside dropout": lambda m, x: m.g(F.dropout(m.f(x), 0.1, m.training) + 0.1 * places(x)),
    "gradient by the rows": lambda m, x: m.g(_by_rows(m.f(x))),
}
# What has to do with the number of rows, and keeps them apart.
APART = {
    "rows counted and divided again": lambda m, x: m.f(x) * len(x) / len(x),
    "expanded": lambda m, x: m.f(x) + torch.ones(1, 3, 4, dtype=x.dtype).expand(len(x), -1, -1),
    "constant but for rounding": lambda m, x: F.layer_norm(m.f(torch.ones_like(x)), (4,)) + m.g(x),
    "gradients of roundings": lambda m, x: m.g(x) + _centred(m.f(x)).mean(1, keepdim=True),
    "a loop over rows": lambda m, x: m.f(torch.stack([row.tanh() for row in x])),
}


def _by_rows(h):
    h.register_hook(lambda gradient: gradient / len(gradient))
    return h


def _centred(h):
    return h - h.mean(1, keepdim=True)


def net(run):
    torch.manual_seed(0)
    return Net(run, f=linear(), g=linear()).double()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COUNTS)
def test_what_counts_the_rows_is_refused(name, mode):
    x = numbers(ROWS, 3, 4)
    private = run_of(net(COUNTS[name]), (x,), torch.zeros(ROWS, dtype=x.dtype), mode)
    with pytest.raises(RuntimeError, match=r"another example was left out.*alone"):
        step(private)


@pytest.mark.parametrize("name", APART)
def test_what_keeps_the_rows_apart_is_trained(name):
    check(net(APART[name]), (numbers(ROWS, 3, 4),), "bookkeeping")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_dependence(dtype):
    torch.manual_seed(0)
    deep = nn.Sequential(*[m for _ in range(20) for m in (linear(), nn.Tanh(), nn.LayerNorm(4))])
    private = run_of(deep.to(dtype), (numbers(ROWS, 3, 4).to(dtype),), torch.zeros(ROWS), "hooks")
    step(private)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_the_modules_own_may_be_a_mean(reduction):
    x = numbers(ROWS, 3, 4)
    private = run_of(
        MeanLoss(reduction).double(), (x,), torch.zeros(ROWS, dtype=x.dtype), "bookkeeping"
    )
    for rows, _ in private.loader:
        private.module(rows).backward()
        private.optimizer.step()
    assert private.last_norms is not None
