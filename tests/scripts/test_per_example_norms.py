"""Norms of rows that are not trained on, against one autograd call per row."""

import pytest
import torch
from torch import nn

from dptrain import Automatic, PerLayer, Poisson
from scripts.paper.per_example_norms import per_example_norms
from tests.helpers.engine import everything_every_step, images, make, small_net


def loop_norms(model, x, y):
    """‖∇ loss_i‖ by one call per row, on the module without hooks."""
    found = []
    for i in range(len(x)):
        loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append(torch.cat([g.flatten() for g in gradients]).norm())
    return torch.stack(found)


def look(private, x, y, when="now"):
    """The norms; the loss is of these rows."""
    module, optimizer, _ = private
    reduction = optimizer.loss_reduction

    def loss():
        return nn.functional.cross_entropy(module(x), y, reduction=reduction)

    return per_example_norms(module, loss if when == "inside" else loss(), rows=len(x))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [40, 24, 1])
def test_are_those_of_the_rows_alone(reduction, rows):
    data, other = images(), images(rows)
    x, y = other.tensors
    expected = loop_norms(small_net(), x, y)
    scheme = everything_every_step(len(data), 1)
    private = make(small_net(), data, "bookkeeping", scheme=scheme, loss_reduction=reduction)
    found = look(private, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not found.requires_grad
    next(iter(private.loader))  # with a batch of other rows at hand
    torch.testing.assert_close(look(private, x, y), found)


@pytest.mark.parametrize("style", [PerLayer(), Automatic(gamma=0.1)])
@pytest.mark.parametrize("views", [1, 3])
def test_neither_views_nor_styles_of_the_run_are_the_rows(style, views):
    x, y = images(10).tensors
    scheme = everything_every_step(24, 1)
    private = make(small_net(), images(), "bookkeeping", scheme=scheme, clipping=style, views=views)
    expected = loop_norms(small_net(), x, y)
    torch.testing.assert_close(look(private, x, y), expected, rtol=1e-5, atol=1e-6)


def run(when, how):
    """Parameters after some steps, with looks at norms at these moments."""
    data, model = images(), small_net()
    x, y = images(31).tensors
    scheme = Poisson(probability=0.4, dataset_size=len(data), steps=4)
    private = make(model, data, "bookkeeping", scheme=scheme, max_physical_batch_size=6)
    module, optimizer, loader = private
    criterion = nn.CrossEntropyLoss()
    observed = []

    def looking(moment):
        if moment in when:
            look(private, x, y, how)

    for inputs, labels in loader:
        looking("before")
        optimizer.zero_grad()
        loss = criterion(module(inputs), labels)
        looking("between the passes")
        loss.backward()
        looking("between")
        optimizer.step()
        looking("after")
        observed.append(optimizer.clipper.norms)
    assert private.nonfinite_examples == 0
    return torch.cat([p.detach().flatten() for p in model.parameters()]), torch.cat(observed)


WHEN = ["before", "between", "between the passes", "after"]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("when", "how"),
    [*(((moment,), how) for moment in WHEN for how in ("now", "inside")), (WHEN, "now")],
)
def test_leave_no_trace_in_the_run(when, how):
    plain, norms = run((), how)
    looked, others = run(when, how)
    assert torch.equal(looked, plain)
    assert torch.equal(others, norms)


class Positions(nn.Module):
    """A row of positions that all rows share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.positions = nn.Linear(4, 3), nn.Embedding(4, 3)
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        h = self.first(x[:, 0]) + self.positions(torch.arange(4)[None])
        return self.last(torch.tanh(h).mean(1))


def test_rows_that_are_not_as_many_as_the_batch_share_positions_too():
    data, x, y = images(), *images(9).tensors
    private = make(Positions(), data, "bookkeeping", scheme=everything_every_step(24, 1))
    expected = loop_norms(Positions(), x, y)
    next(iter(private.loader))
    found = look(private, x, y, "inside")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


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
    private = make(Tied(), data, "bookkeeping", scheme=everything_every_step(len(data), 1))
    for _ in range(2):  # the refusal leaves nothing behind either
        with pytest.raises(RuntimeError, match=r"layer\.weight"):
            look(private, x, y)
        assert all(p.grad is None for p in private.module.parameters())


def test_refuse_what_is_no_loss_of_the_rows():
    data = images()
    x, y = data.tensors
    scheme = everything_every_step(len(data), 1)
    private = make(small_net(), data, "bookkeeping", scheme=scheme)
    module = private.module
    losses = nn.functional.cross_entropy(module(x), y, reduction="none")
    with pytest.raises(TypeError, match="a tensor with one number"):
        per_example_norms(module, losses, rows=len(x))
    with pytest.raises(RuntimeError, match="24 per-example gradients for a batch of 23 rows"):
        per_example_norms(module, nn.functional.cross_entropy(module(x), y), rows=23)
    with pytest.raises(RuntimeError, match="no layer of the module"):
        per_example_norms(module, x.clone().requires_grad_().sum(), rows=len(x))
    hooks = make(small_net(), data, "hooks", scheme=scheme)
    with pytest.raises(TypeError, match=r"HookedModule.*'bookkeeping'"):
        look(hooks, x, y)
