"""How many forward and backward passes there are for a batch, and of which batch they are."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Poisson
from tests.helpers.engine import everything_every_step, flat, images, make, released, small_net


@pytest.mark.parametrize("again", ["another loss", "retained graph"])
@pytest.mark.parametrize("micro", [None, 7])
def test_backward_passes_of_a_batch_are_clipped_as_one(micro, again):
    """The gradient of the sum of the losses; each on its own would be clipped to R twice."""
    data, model = images(), small_net()
    plain = copy.deepcopy(model)
    private = make(
        model,
        data,
        "bookkeeping",
        scheme=everything_every_step(len(data), 1),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        max_physical_batch_size=micro,
    )
    wrapped, optimizer, loader = private

    def losses(module, x, y):
        out = module(x)
        first = nn.functional.cross_entropy(out, y)
        return first, first if again == "retained graph" else out.square().sum(1).mean()

    for x, y in loader:
        optimizer.zero_grad()
        first, _ = losses(wrapped, x, y)
        first.backward(retain_graph=again == "retained graph")
        (first if again == "retained graph" else losses(wrapped, x, y)[1]).backward()
        optimizer.step()
    expected = torch.zeros_like(flat(plain))
    for x, y in data:
        grads = torch.autograd.grad(sum(losses(plain, x[None], y[None])), list(plain.parameters()))
        gradient = torch.cat([g.flatten() for g in grads])
        expected += gradient * min(1.0, 0.5 / float(gradient.norm()))
    torch.testing.assert_close(released(private, len(data)), expected, rtol=1e-5, atol=2e-6)


def test_a_forward_pass_of_an_earlier_batch_is_not_released_as_this_one():
    """Its examples would be in a part, or a step, that did not draw them."""
    data = images()
    scheme = everything_every_step(len(data), 3)
    options = {"scheme": scheme, "max_physical_batch_size": 12}
    model, optimizer, loader = make(small_net(), data, "bookkeeping", **options)
    batches = iter(loader)
    x, y = next(batches)
    early = nn.functional.cross_entropy(model(x), y)
    early.backward(retain_graph=True)
    optimizer.step()  # the first of two parts: no parameter has changed
    next(batches)
    with pytest.raises(RuntimeError, match="made before the current batch"):
        early.backward()
    with pytest.raises(RuntimeError, match="no per-example gradients"):
        optimizer.step()


def test_a_forward_pass_without_a_backward_pass_is_nothing():
    ends = []
    for look in (False, True):
        data = images()
        private = make(small_net(), data, "bookkeeping", scheme=everything_every_step(24, 2))
        model, optimizer, loader = private
        for x, y in loader:
            if look:
                model(x)
                model(x[:5])
                model(images(50).tensors[0])
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        ends.append(flat(model))
    assert torch.equal(ends[0], ends[1])


@pytest.mark.parametrize("trained", ["bias", "weight"])
def test_a_forward_pass_keeps_inputs_for_weights_only(trained):
    data, layer = images(), nn.Linear(16, 3)
    for name, p in layer.named_parameters():
        p.requires_grad_(name == trained)
    options = {"scheme": everything_every_step(len(data), 1)}
    private = make(nn.Sequential(nn.Flatten(), layer), data, "bookkeeping", **options)
    x, _ = next(iter(private.loader))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        private.module(x)
    inputs = x.flatten(1)
    held = [t for t in kept if t.shape == inputs.shape and torch.equal(t, inputs)]
    assert bool(held) == (trained == "weight")


class OnPadding(nn.Module):
    """What no rule fits as long as no probe has run: a shared table, and a tied function."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        shared = self.f(self.table).sum(0)
        return nn.functional.linear(self.f(x) * shared + self.table[0], self.f.weight)


def test_batches_of_padding_alone_are_not_looked_at():
    """A step whose batch is empty releases a sum of zero, and so it does before any other."""
    data = TensorDataset(torch.randn(6, 4))
    scheme = Poisson(probability=1e-9, dataset_size=6, steps=2)
    private = make(OnPadding(), data, "bookkeeping", scheme=scheme, noise_multiplier=0.0)
    before = flat(private.module)
    for (x,) in private.loader:
        private.module(x).square().sum(1).mean().backward()
        private.optimizer.step()
        assert private.last_norms.eq(0).all()
    assert private.steps_executed == 2
    assert torch.equal(flat(private.module), before)
