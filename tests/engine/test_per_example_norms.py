"""Norms of rows that are not trained on, against one autograd call per row."""

import pytest
import torch
from torch import nn

from dptrain import Poisson
from dptrain.clipping import per_example_norms

from .conftest import everything_every_step, images, make, small_net


def loop_norms(model, x, y):
    """‖∇ loss_i‖ by one call per row, on the module without hooks."""
    found = []
    for i in range(len(x)):
        loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append(torch.cat([g.flatten() for g in gradients]).norm())
    return torch.stack(found)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_are_those_of_the_rows_alone(reduction):
    data, other = images(), images(40)
    x, y = other.tensors
    expected = loop_norms(small_net(), x, y)
    private = make(
        small_net(),
        data,
        "ghost",
        scheme=everything_every_step(len(data), 1),
        loss_reduction=reduction,
    )
    found = per_example_norms(private.module, private.criterion(private.module(x), y))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not found.requires_grad


def run(when):
    """Parameters after some steps, with looks at norms at these moments."""
    data, model = images(), small_net()
    x, y = images(31).tensors
    scheme = Poisson(probability=0.4, dataset_size=len(data), steps=4)
    private = make(model, data, "ghost", scheme=scheme)
    module, optimizer, loader, criterion = private

    def look(moment):
        if moment in when:
            per_example_norms(module, criterion(module(x), y))

    for inputs, labels in loader:
        look("before")
        optimizer.zero_grad()
        loss = criterion(module(inputs), labels)
        loss.backward()
        look("between")
        optimizer.step()
        look("after")
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("when", [("before",), ("between",), ("after", "before")])
def test_leave_no_trace_in_the_run(when):
    assert torch.equal(run(when), run(()))


class Tied(nn.Module):
    """Uses its layer once more where no hook sees it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 3)

    def forward(self, x):
        x = x.flatten(1)
        return self.layer(x) + nn.functional.linear(x, self.layer.weight)


def test_refuse_what_they_do_not_cover():
    data = images()
    x, y = data.tensors
    private = make(Tied(), data, "ghost", scheme=everything_every_step(len(data), 1))
    for _ in range(2):  # the refusal leaves nothing behind either
        with pytest.raises(RuntimeError, match=r"layer\.weight"):
            per_example_norms(private.module, private.criterion(private.module(x), y))
        assert all(p.grad is None for p in private.module.parameters())
