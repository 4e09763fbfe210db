"""Layers whose parameters others use past their own forward: found, or named in the refusal."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.clipping.bookkeeping.operations.test_followed import DTYPES
from tests.helpers.architectures_runs import backward, one_batch
from tests.helpers.one_layer import WIDTH, architecture, check, one


class Reader(nn.Module):
    """Holds a linear layer, and does with it what it is told to."""

    def __init__(self, run):
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


class Product(torch.autograd.Function):
    """x Wᵀ, by what no operation is seen of."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def positions_first(m, x):
    return F.linear(x.transpose(0, 1) * 1.0, m.l.weight, m.l.bias).transpose(0, 1)


def attention(m, x):
    q, w, b = x.transpose(0, 1), m.l.weight, m.l.bias
    found, _ = F.multi_head_attention_forward(
        q, q, q, WIDTH, 2, torch.empty(0), torch.cat([b] * 3), None, None, False, 0.0, w, b,
        use_separate_proj_weight=True, q_proj_weight=w, k_proj_weight=w, v_proj_weight=w,
    )  # fmt: skip
    return found.transpose(0, 1)


READ = {
    "positions first": positions_first,
    "attention's function": attention,
    "an autograd function": lambda m, x: Product.apply(x, m.l.weight),
    "called as well": lambda m, x: Product.apply(x, m.l.weight) + m.l(x).tanh(),
}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", READ)
def test_equals_the_loop(name, dtype):
    check(architecture(one(lambda: Reader(READ[name])), dtype))


def test_called_also_where_it_is_not_read():
    """Neither use is left out, and none is counted twice."""
    run = READ["called as well"]
    check(architecture(one(lambda: Reader(run), lambda m, h: m.f(h) + m.f.l(h * 0.5).sin())))


def test_read_by_two():
    def run(m, h):
        return m.f(h) + Product.apply(h, m.f.l.weight)

    check(architecture(one(lambda: Reader(READ["called as well"]), run)))


class TiedHead(nn.Module):
    """As MobileBERT's: a bias by two names, a table that is part of the head's weight."""

    def __init__(self, embed):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(5))
        self.wide, self.decoder = nn.Linear(5, 2, bias=False), nn.Linear(WIDTH - 2, 5)
        self.decoder.weight, self.decoder.bias = embed.weight, self.bias

    def forward(self, x):
        weight = torch.cat([self.decoder.weight.t(), self.wide.weight])
        x = x @ weight
        x += self.decoder.bias
        return x


class TiedByTwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH - 2)
        self.head = TiedHead(self.embed)

    def forward(self, x):
        ids = x[..., 0].detach().abs().long() % 5
        return self.head(torch.cat([self.embed(ids), x[..., :2]], 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_read_by_another_name(dtype):
    check(architecture(one(TiedByTwoNames), dtype))


def test_a_refusal_names_both():
    def several(m, x):
        if len(x) < 2:
            raise ValueError("at least two rows")
        return Product.apply(x, m.l.weight)

    a = architecture(one(lambda: Reader(several)))
    private = one_batch(a, "bookkeeping", reduction="mean")
    with pytest.raises(
        RuntimeError, match=r"'f', a Reader .*parameters of 'l'.*ValueError in several"
    ):
        backward(private, a)
