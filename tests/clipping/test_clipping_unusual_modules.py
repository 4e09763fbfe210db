"""Unusual modules: what the norms must cover, and what is refused because they cannot."""

import copy

import pytest
import torch
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.data import TensorDataset

from tests.helpers.engine import (
    MODES,
    everything_every_step,
    images,
    make,
    reference_sum,
    released,
    small_net,
    train,
)

WITHOUT_RULES = [mode for mode in MODES if mode != "bookkeeping"]  # for a layer of any type


class TiedByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)

    def forward(self, ids):
        return nn.functional.linear(3 * self.embed(ids).mean(1), self.embed.weight)


class Unembed(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, h):
        return 20 * h @ self.weight.t()


class TiedByLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 5)
        self.first = nn.Linear(5, 5)
        self.unembed = Unembed(self.first.weight)

    def forward(self, ids):
        return self.unembed(self.first(self.embed(ids).mean(1)))


class UncalledLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.last = nn.Linear(4, 5)

    def forward(self, ids):
        return self.last.forward(30 * self.embed(ids).mean(1))


class LayerInEvalMode(UncalledLayer):
    def __init__(self):
        super().__init__()
        self.last.eval()

    def forward(self, ids):
        return self.last(30 * self.embed(ids).mean(1))


class HalfUsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 5)

    def forward(self, ids):
        h = self.embed(ids).mean(1)
        self.norm(h + 1)
        return self.last(30 * self.norm(h))


class SharedRow(nn.Module):
    """Calls one layer on the batch and on a single row that all examples share."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 5)

    def forward(self, ids):
        x = self.embed(ids).mean(1)
        return self.last(self.norm(x) + self.norm(torch.arange(4.0)[None]))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("micro", [None, 1, 4])
@pytest.mark.parametrize(
    "kind", [UncalledLayer, LayerInEvalMode, HalfUsedTwice, TiedByFunction, SharedRow]
)
def test_bookkeeping_is_right_about_unusual_uses_of_a_parameter(kind, micro):
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(0, 5, (6, 3)), torch.randint(0, 5, (6,)))
    model = kind()
    expected = reference_sum(copy.deepcopy(model), data, range(6), 2.0)
    private = make(
        model,
        data,
        "bookkeeping",
        scheme=everything_every_step(6, 1),
        noise_multiplier=0.0,
        max_grad_norm=2.0,
        max_physical_batch_size=micro,
    )
    train(private)
    torch.testing.assert_close(released(private, 6), expected, rtol=1e-5, atol=2e-6)


def test_bookkeeping_refuses_a_penalty_on_weights():
    private = make(small_net(), images(), "bookkeeping", scheme=everything_every_step(24, 1))
    x, y = next(iter(private.loader))
    loss = nn.functional.cross_entropy(private.module(x), y)
    penalty = 0.1 * sum(p.square().sum() for p in private.module.parameters())
    with pytest.raises(RuntimeError, match=r"used outside .*penalty on the weights.*weight_decay"):
        (loss + penalty).backward()
    assert all(p.grad is None for p in private.module.parameters())


class Parts(nn.Module):
    """A parameter of its own beside layers, and a head that only some losses use."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.linear(torch.tanh(self.first(x * self.scale)), self.first.weight)


class WithUnusedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts, self.head, self.last = Parts(), nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x):
        h = self.parts(x)
        self.head(h)
        return self.last(h)


@pytest.mark.parametrize("mode", WITHOUT_RULES)
@pytest.mark.parametrize("micro", [None, 1, 3])
def test_unusual_modules_are_clipped_to_the_reference(mode, micro):
    torch.manual_seed(0)
    model = WithUnusedHead()
    data = TensorDataset(torch.randn(8, 4), torch.randint(0, 3, (8,)))
    scheme = everything_every_step(8, 1)
    used = nn.Sequential(copy.deepcopy(model.parts), copy.deepcopy(model.last))
    expected = reference_sum(used, data, range(8), 0.1)
    private = make(
        model,
        data,
        mode,
        scheme=scheme,
        noise_multiplier=0.0,
        max_grad_norm=0.1,
        max_physical_batch_size=micro,
    )
    train(private)
    unused = [p.grad for p in model.head.parameters()]
    assert all(not g.any() for g in unused)
    rest = [p.grad.flatten() for part in (model.parts, model.last) for p in part.parameters()]
    torch.testing.assert_close(torch.cat(rest) * 8, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("mode", WITHOUT_RULES)
def test_a_layer_called_on_a_row_that_all_examples_share_is_refused(mode):
    """Row 0 would hold the gradients of all examples, clipped as if it were one."""
    data = TensorDataset(torch.randint(0, 5, (6, 3)), torch.randint(0, 5, (6,)))
    private = make(SharedRow(), data, mode, scheme=everything_every_step(6, 1))
    with pytest.raises(RuntimeError, match="'norm' was called with 1 rows in a batch of"):
        train(private)


class Scaled(nn.Module):
    """A layer without a rule of its own, and an input that Opacus does not pass on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x, scale=1.0):
        return scale * x @ self.weight


class WithScaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaled, self.last = Scaled(), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.scaled(x, scale=50.0))


@pytest.mark.parametrize("mode", WITHOUT_RULES)
def test_where_opacus_loses_an_input_it_is_refused_and_sums_follow_the_norms(mode):
    """One example, no noise: what is released must not be longer than R."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1, 4), torch.randint(0, 3, (1,)))
    options = {"scheme": everything_every_step(1, 1), "noise_multiplier": 0.0, "max_grad_norm": 0.1}
    private = make(WithScaled(), data, mode, probe="off", **options)
    train(private)
    assert 0.09 < released(private, 1).norm() < 0.1 * (1 + 1e-5)
    with pytest.raises(RuntimeError, match=r"'weight' of layer 'scaled', a Scaled.*rule for the"):
        train(make(WithScaled(), data, mode, **options))


def test_bookkeeping_refuses_what_it_cannot_train_by_name():
    """Before anything is wired."""
    model = nn.Sequential(DPLSTM(4, 4))
    with pytest.raises(ValueError, match=r"layer '0'.* has no rule: use torch\.nn\.LSTM"):
        make(model, images(), "bookkeeping", scheme=everything_every_step(24, 1))
    assert all("forward" not in vars(m) for m in model.modules())


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_a_backward_pass_in_eval_mode_is_refused_by_name(mode):
    private = make(small_net(), images(), mode, scheme=everything_every_step(24, 2))
    private.module.eval()
    x, y = next(iter(private.loader))
    loss = nn.functional.cross_entropy(private.module(x), y)
    with pytest.raises(RuntimeError, match=r"in eval mode.*module\.train\(\)"):
        loss.backward()
    private.module.train()
    train(private)
    assert private.steps_executed == 2
