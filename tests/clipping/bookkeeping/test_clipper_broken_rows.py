"""Rows with NaN or infinities count nothing and hurt nobody, in layers of every type."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.helpers.bookkeeping_runs import ROWS, backward, case, check, run_of
from tests.helpers.clipping_oracle import reference

BROKEN = (1, 3)
LAYERS = {
    "linear": (lambda: nn.Linear(4, 6), (4,)),
    "linear over positions": (lambda: nn.Linear(4, 6), (7, 4)),
    "linear over few positions": (lambda: nn.Linear(16, 12), (2, 16)),
    "Hugging Face Conv1D": (lambda: Conv1D(6, 4), (7, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (4, 8)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), (4, 5, 5)),
    "conv2d with groups": (lambda: nn.Conv2d(4, 8, 3, stride=2, groups=2), (4, 7, 7)),
    "conv2d over many pixels": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 12, 12)),
    "conv2d with many channels": (lambda: nn.Conv2d(24, 32, 3, padding=1), (24, 3, 3)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 3, 3, 3)),
    "layer norm": (lambda: nn.LayerNorm(4), (3, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), (3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 5)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 5)),
    "attention": (lambda: Attended(), (3, 4)),
    "LSTM": (lambda: Recurrent(nn.LSTM), (3, 4)),
    "GRU": (lambda: Recurrent(nn.GRU), (3, 4)),
    "RNN": (lambda: Recurrent(nn.RNN), (3, 4)),
}


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(4, 5, 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.layer(x)[0]


class Attended(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Around(nn.Module):
    """A layer on the inputs, one before it and one behind it."""

    def __init__(self, layer, shape, rows_of):
        super().__init__()
        self.before = nn.Linear(shape[-1], shape[-1])
        self.layer, self.last = layer, nn.Linear(rows_of, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.layer(torch.tanh(self.before(x)) + x)).flatten(1))


class TiedHead(nn.Module):
    """The numbers enter between the embedding and the head that has its weight."""

    def __init__(self, forms):
        super().__init__()
        self.embed, self.mix = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.forms = forms

    def forward(self, ids, x):
        h = torch.tanh(self.mix(self.embed(ids) + x))
        return self.head(h.mean(1) if self.forms == "one position" else h).flatten(1)


def break_rows(x, bad, whole):
    for row in BROKEN:
        x[row].view(-1)[slice(None) if whole else slice(1)] = bad


def check_broken(a):
    wanted = reference(a.module, a.inputs, a.targets)
    broken = ~torch.isfinite(wanted.norms)
    assert not broken[[i for i in range(ROWS) if i not in BROKEN]].any()
    for reduction in ("mean", "sum"):
        private = run_of(a, reduction=reduction)
        backward(private)
        check(private, wanted)
        assert private.nonfinite_examples == int(broken.sum())
        private.detach()
    return broken


@pytest.mark.sample(every=29)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("whole", [False, True], ids=["one number", "all"])
@pytest.mark.parametrize("name", LAYERS)
def test_inputs(name, bad, whole):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    x, layer = torch.randn(ROWS, *shape), make()
    width = layer(x).flatten(1).shape[1]
    a = case(Around(layer, shape, width), x)
    break_rows(a.inputs[0], bad, whole)
    assert bool(check_broken(a)[list(BROKEN)].all())


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("forms", ["one position", "all positions"])
@pytest.mark.parametrize("length", [2, 9])  # shorter and longer than the table
def test_tied_weights(bad, forms, length):
    torch.manual_seed(0)
    ids = torch.randint(0, 6, (ROWS, length))
    a = case(TiedHead(forms), ids, torch.randn(ROWS, length, 4))
    break_rows(a.inputs[1], bad, whole=bad != bad)
    check_broken(a)


@pytest.mark.sample(every=21)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
@pytest.mark.parametrize("name", LAYERS)
def test_targets(name, bad):
    """The forward pass is whole, and only output gradients are broken, or squares too large."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    x, layer = torch.randn(ROWS, *shape), make()
    width = layer(x).flatten(1).shape[1]
    a = case(Around(layer, shape, width), x)
    a.targets[list(BROKEN)] = bad
    check_broken(a)


def test_all_rows_broken():
    a = case(nn.Linear(4, 2), torch.full((ROWS, 4), float("nan")))
    private = run_of(a, noise_multiplier=1.0)
    backward(private)
    private.optimizer.step()
    assert private.nonfinite_examples == ROWS
    assert all(bool(torch.isfinite(p.grad).all()) for p in private.optimizer.params)
