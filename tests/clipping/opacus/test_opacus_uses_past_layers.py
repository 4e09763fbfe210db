"""Parameters used past their layer's own calls, which Opacus's hooks do not see."""

import pytest
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from dptrain.clipping.probe.confirmation import Confirmation
from tests.helpers.bookkeeping_runs import case
from tests.helpers.older_modes import ROWS, Call, older, step, wired

IDS = 7


class Nested(nn.Module):
    """A layer with a name of its own, within another."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Decaying(nn.Module):
    """Uses a weight past its layer in training only, behind a dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        h = self.dropout(self.layers[0](x))
        return h + 0.01 * x @ self.layers[0].weight if self.training else h


class Returning(nn.Module):
    """Returns its loss, with a penalty in it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return self.layers[0](x).square().sum() + self.layers[0].weight.square().sum()


def linear():
    return nn.Linear(4, 4)


def features(module):
    return case(module, torch.randn(ROWS, 4), dtype=torch.float32)


def maps(module):
    return case(module, torch.randn(ROWS, 3, 6, 6), dtype=torch.float32)


def ids(module, *more):
    return case(module, torch.randint(0, IDS, (ROWS, 5)), *more, dtype=torch.float32)


def past(run, layers=1):
    return lambda: features(Call(run, *(linear() for _ in range(layers))))


LINEAR = r"'(weight|bias)' of layer 'layers\.0', a Linear"
PAST = {
    "beside its own call": (past(lambda x, f: f(x) + F.linear(x, f.weight)), LINEAR),
    "another layer around it": (past(lambda x, f, g: g(F.linear(x, f.weight)), 2), LINEAR),
    "no layer is called": (past(lambda x, f: F.linear(x, f.weight, f.bias)), LINEAR),
    "of an inner module": (
        lambda: features(
            Call(lambda x, f, g: F.linear(g(x), f.inner.weight), Nested(linear()), linear())
        ),
        r"'weight' of layer 'layers\.0\.inner', a Linear",
    ),
    "in a product": (past(lambda x, f: f(x) @ f.weight), LINEAR),
    "a bias": (past(lambda x, f: f(x) * f.bias), LINEAR),
    "in a penalty": (lambda: features(Returning()), LINEAR),
    "a little, in training": (lambda: features(Decaying()), LINEAR),
    "a tied weight": (
        lambda: ids(Call(lambda x, e: F.linear(e(x).tanh(), e.weight), nn.Embedding(IDS, 4))),
        r"'weight' of layer 'layers\.0', a Embedding",
    ),
    "in a checkpoint": (
        past(lambda x, f: checkpoint(lambda h: f(h) @ f.weight, x, use_reentrant=False)),
        LINEAR,
    ),
    "a convolution": (
        lambda: maps(Call(lambda x, f: f(x) + F.conv2d(x, f.weight), nn.Conv2d(3, 4, 3))),
        r"'weight' of layer 'layers\.0', a Conv2d",
    ),
    "a norm": (
        lambda: maps(Call(lambda x, f: f(x) + f.weight[0], nn.GroupNorm(1, 3))),
        r"'weight' of layer 'layers\.0', a GroupNorm",
    ),
}  # fmt: skip


@pytest.mark.sample(every=7)
@older
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", PAST)
def test_a_use_past_the_layers_calls_is_refused_before_anything_is_released(name, reduction, mode):
    """Its part of the gradient was missing from what is released, and nothing said so."""
    torch.manual_seed(0)
    build, named = PAST[name]
    private = wired(build(), mode, reduction=reduction)
    before = [p.detach().clone() for p in private.optimizer.params]
    noise = private.optimizer.noise.state_dict()["step"]
    with pytest.raises(RuntimeError, match=rf"parameter {named}: .*mode='bookkeeping'\), call the"):
        step(private)
    assert private.steps_executed == 0
    assert all(torch.equal(p, q) for p, q in zip(private.optimizer.params, before, strict=True))
    assert private.optimizer.noise.state_dict()["step"] == noise
    assert private.optimizer.ledger.digests == []


def twice(x, f, g):
    return g(torch.tanh(f(torch.tanh(f(x)))))


class Tied(nn.Module):
    """Two layers with one weight, each called."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(IDS, 4), nn.Linear(4, IDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(IDS, 4), DPLSTM(4, 6, 2, batch_first=True)

    def forward(self, x, lengths=None):
        h = self.embed(x)
        if lengths is not None:
            h = pack_padded_sequence(h, lengths, batch_first=True)
        return self.lstm(h)[1][0][-1]


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(IDS, 4)
        self.attention = DPMultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        h = self.embed(x)
        return self.attention(h, h, h)[0]


def shared():
    block = nn.Sequential(linear(), nn.Tanh(), nn.LayerNorm(4))
    return nn.Sequential(block, nn.Dropout(0.5), block, linear())


RIGHT = {
    "linear": lambda: features(nn.Sequential(linear(), nn.Tanh(), nn.Linear(4, 3))),
    "convolution": lambda: maps(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 2, 2))
    ),
    "norms": lambda: features(nn.Sequential(nn.LayerNorm(4), linear(), nn.LayerNorm(4), linear())),
    "embedding": lambda: ids(nn.Sequential(nn.Embedding(IDS, 4, padding_idx=0), linear())),
    "attention": lambda: ids(Attending()),
    "recurrent": lambda: ids(Recurrent()),
    "packed": lambda: ids(Recurrent(), torch.tensor([5, 4, 4, 1])),
    "a layer twice": past(twice, 2),
    "a submodule twice, dropout": lambda: features(shared()),
    "tied layers": lambda: ids(Tied()),
    "frozen": lambda: features(nn.Sequential(linear(), linear().requires_grad_(False), linear())),
    "reentrant checkpoint": past(
        lambda x, f, g: checkpoint(nn.Sequential(g, nn.Tanh(), g), f(x), use_reentrant=True), 2
    ),
    "a layer that is not called": past(lambda x, f, g: f(x), 2),
}  # fmt: skip


@pytest.mark.sample(every=21)
@older
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", RIGHT)
def test_layers_that_are_called_go_on(name, dtype, mode, monkeypatch):
    found, within = [], Confirmation.disagreement
    monkeypatch.setattr(Confirmation, "disagreement", lambda *a: found.append(within(*a)))
    torch.manual_seed(0)
    a = RIGHT[name]()
    a = case(a.module, *a.inputs, dtype=dtype)
    private = wired(a, mode)
    step(private)
    assert private.steps_executed == 1
    assert found == [None]  # they were compared, and nothing failed on the way


@older
def test_gradients_of_nothing_but_rounding_errors_are_no_disagreement(mode):
    """The bias of attention's keys has gradient zero."""
    torch.manual_seed(2)
    for scale in (1e-6, 1.0, 1e6):
        a = case(Attending(), torch.randint(0, IDS, (ROWS, 5)), dtype=torch.float32)
        with torch.no_grad():
            a.module.embed.weight.mul_(scale)
        step(wired(a, mode))


@older
def test_a_call_in_eval_mode_is_refused_as_such(mode):
    a = RIGHT["linear"]()
    private = wired(a, mode)
    a.module[0].eval()
    with pytest.raises(RuntimeError, match="backward pass through a Linear in eval mode"):
        step(private)


@older
def test_uses_are_not_looked_for_without_the_probe(mode):
    torch.manual_seed(0)
    step(wired(PAST["beside its own call"][0](), mode, probe="off"))
