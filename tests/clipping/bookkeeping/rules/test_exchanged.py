"""Layers whose weights are computed from others by torch.nn.utils.parametrize, against the loop."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.helpers.bookkeeping_runs import (
    ROWS,
    backward,
    case,
    check,
    check_like_loop,
    run_of,
    take,
)
from tests.helpers.clipping_oracle import reduced, reference


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


class Scaled(nn.Module):
    """With parameters of its own: one without dimensions, and one for each row."""

    def __init__(self, rows=4):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.rows = nn.Parameter(torch.ones(rows, 1))

    def forward(self, weight):
        return self.scale * weight * self.rows


class Halves(nn.Module):
    """One weight of two parameters."""

    def forward(self, left, right):
        return torch.cat([left, right])

    def right_inverse(self, weight):
        return weight[:2], weight[2:]


def linear():
    return nn.Linear(4, 4)


def with_(layer, *steps, name="weight"):
    for step in steps:
        parametrize.register_parametrization(layer, name, step)
    return layer


def images(layer):
    return nn.Sequential(nn.Unflatten(1, (2, 2)), layer, nn.Flatten())


LAYERS = {
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "weight norm of all": lambda: parametrizations.weight_norm(linear(), dim=None),
    "weight norm, convolution": lambda: images(
        parametrizations.weight_norm(nn.Conv1d(2, 3, 2), dim=2)
    ),
    "weight norm, transposed": lambda: images(
        parametrizations.weight_norm(nn.ConvTranspose1d(2, 3, 2))
    ),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "orthogonal, Cayley": lambda: parametrizations.orthogonal(linear(), orthogonal_map="cayley"),
    "orthogonal, Householder": lambda: parametrizations.orthogonal(
        linear(), orthogonal_map="householder"
    ),
    "a user's": lambda: with_(linear(), Symmetric()),
    "a user's, of the bias": lambda: with_(linear(), nn.Tanh(), name="bias"),
    "a user's, with parameters": lambda: with_(linear(), Scaled()),
    "a user's, one after another": lambda: with_(linear(), Symmetric(), Scaled()),
    "a user's, of two": lambda: with_(linear(), Halves()),
    "weight and bias": lambda: with_(
        parametrizations.weight_norm(linear()), nn.Tanh(), name="bias"
    ),
}


def built(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), LAYERS[name]())
    return case(model, torch.randn(ROWS, 4))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_the_loop(name):
    a = built(name)
    assert any("parametrizations" in n for n, _ in a.module.named_parameters())
    check_like_loop(a)


@pytest.mark.parametrize("frozen", ["original0", "original1"])
def test_what_is_frozen(frozen):
    a = built("weight norm")
    for n, p in a.module.named_parameters():
        p.requires_grad_(not n.endswith(frozen))
    check_like_loop(a)


def test_weights_that_are_computed_once():
    """Within ``parametrize.cached()``, forward and backward pass."""
    a = built("weight norm")
    wanted = reference(a.module, a.inputs, a.targets)
    private = run_of(a)
    inputs, targets = take(private)
    with parametrize.cached():
        reduced(private.module(*inputs), targets, "mean").backward()
    check(private, wanted)


def test_spectral_norms_state_is_named():
    """In training it writes what it iterated; in eval mode there is nothing against it."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(), parametrizations.spectral_norm(linear()))
    a = case(model, torch.randn(ROWS, 4))
    private = run_of(a)
    backward(private)
    with pytest.raises(RuntimeError, match=r"buffer '_u'.*_SpectralNorm.*Gradients\(buffers="):
        private.optimizer.step()
    torch.manual_seed(0)
    model = nn.Sequential(linear(), parametrizations.spectral_norm(linear()))
    model[1].eval()
    check_like_loop(case(model, torch.randn(ROWS, 4)))
