"""Layers without a rule: their parameters, followed through their operations, against the loop."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dptrain.clipping.bookkeeping import module_taps
from dptrain.clipping.bookkeeping.rules.generic import GenericRule
from tests.clipping.bookkeeping.rules.test_generic import LAYERS
from tests.helpers.architectures import Architecture
from tests.helpers.architectures_runs import backward, one_batch
from tests.helpers.clipping_oracle import reference
from tests.helpers.one_layer import ROWS, WIDTH, architecture, check, one

DTYPES = [torch.float64, torch.float32]


class Bare(nn.Module):
    """Parameters of given shapes, a, b and so on, and a function of the module and its input."""

    def __init__(self, run, *shapes):
        super().__init__()
        self.run = run
        for name, shape in zip("abcd", shapes, strict=False):
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        return self.run(self, x)


def bare(run, *shapes):
    return one(lambda: Bare(run, *shapes))


def taken(m, x):
    table = m.a[torch.arange(4)[:, None] - torch.arange(4) + 3]
    return x @ x.transpose(1, 2) + table.permute(2, 0, 1).sum(0)


def written(m, x):
    x = x.clone()
    x[:, 0] = m.a
    x[:, 1:] += m.b
    return x


def derived(m, x):
    scale = F.softplus(m.a).relu_()
    return x * scale / (scale + m.b.exp()).norm()


def windows(m, x):
    flat = x.flatten(0, 1)
    return F.linear(flat * m.a, m.b).view_as(x)


def tied(m, x):
    return m.f(x) @ m.f.weight + F.linear(x, m.f.weight, m.f.bias)


def written_values(m, x):
    w = m.a.clone()
    w[0] = m.b
    w[1].mul_(2)
    w[2:].select(0, 0).add_(m.c)
    return x @ w


FOLLOWED = {
    "broadcast": bare(lambda m, x: (x + m.a) * m.b - m.c / (1 + m.d.square()),
                      (WIDTH,), (1, 4, 1), (4, WIDTH), ()),
    "linear": bare(lambda m, x: F.linear(x, m.a, m.b), (3, WIDTH), (3,)),
    "matmul": bare(lambda m, x: m.b @ (x @ m.a), (WIDTH, 3), (2, 4)),
    "matmul of every head": bare(
        lambda m, x: x.unflatten(2, (2, 3)).transpose(1, 2) @ m.a, (2, 3, 2)),
    "convolution": bare(lambda m, x: F.conv1d(x, m.a, m.b, 2, 1, groups=2), (6, 2, 3), (6,)),
    "norms": bare(
        lambda m, x: F.group_norm(F.layer_norm(x, (WIDTH,), m.a, m.b), 2, m.c, m.d),
        (WIDTH,), (WIDTH,), (4,), (4,)),
    "rms norm": bare(lambda m, x: F.rms_norm(x, (WIDTH,), m.a), (WIDTH,)),
    "filled in": bare(lambda m, x: x.masked_fill(x > 0.5, m.a), ()),
    "prelu": bare(lambda m, x: F.prelu(x, m.a), (4,)),
    "look-up": bare(lambda m, x: x + m.a[x[:, :, 0].abs().long() % 3], (3, WIDTH)),
    "embedding": bare(
        lambda m, x: x + F.embedding(x[:, :, 0].abs().long() % 3, m.a, padding_idx=1), (3, WIDTH)),
    "a table of positions": bare(taken, (7, 2)),
    "class token": bare(lambda m, x: torch.cat([m.a.expand(len(x), -1, -1), x], 1) + m.b,
                        (1, 2, WIDTH), (1, 6, WIDTH)),
    "repeated": bare(lambda m, x: x + m.a.repeat(len(x), 1).view_as(x), (4, WIDTH)),
    "repeated and folded into rows": bare(
        lambda m, x: x + m.a[None].repeat(len(x), 1, 1).view(-1, 2, WIDTH).view_as(x), (4, WIDTH)),
    "in another precision": bare(
        lambda m, x: (x.double() * (1 + m.a.double()) * m.b).to(x.dtype), (WIDTH,), (WIDTH,)),
    "queries": bare(
        lambda m, x: F.scaled_dot_product_attention(m.a.expand(len(x), -1, -1), x, x, m.b),
        (1, 3, WIDTH), (1, 3, 4)),
    "einsum": bare(lambda m, x: torch.einsum("btd,de,te->bt", x, m.a, m.b), (WIDTH, 3), (4, 3)),
    "any other": bare(
        lambda m, x: torch.addmv(torch.mv(x[:, 1], m.b), x[:, :, 0], m.a)[:, None],
        (4,), (WIDTH,)),
    "written into the input": bare(written, (WIDTH,), (WIDTH,)),
    "made of parameters": bare(derived, (WIDTH,), (WIDTH,)),
    "written into what is made of parameters": bare(
        written_values, (WIDTH, 3), (3,), (3,)),
    "flattened rows": bare(windows, (WIDTH,), (WIDTH, WIDTH)),
    "a layer on what all share": one(
        lambda: nn.Linear(3, 1), lambda m, h: h * m.f(torch.eye(4, 3, dtype=h.dtype))),
    "a layer on flattened rows": one(
        lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
        lambda m, h: m.f(h.flatten(0, 1)).view(len(h), -1)),
    "an embedding of pairs of positions": one(
        lambda: nn.Embedding(4, 2),
        lambda m, h: h + m.f(torch.arange(16).view(4, 4) % 4).sum((1, 2))[:, None]),
    "tied through a function": one(lambda: nn.Linear(WIDTH, WIDTH), tied),
}  # fmt: skip


@pytest.mark.sample(every=9)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FOLLOWED)
def test_equals_the_loop(name, dtype):
    private = check(architecture(FOLLOWED[name], dtype))
    rules = [tap.observe.rule for tap in module_taps.taps_of(private.module)._taps]
    assert not any(isinstance(rule, GenericRule) for rule in rules)


@pytest.mark.parametrize("rows", [2, 3, 4, 6])
def test_sizes_that_are_as_many_as_the_rows_by_chance(rows):
    """Positions, heads and features are no examples, however many there are."""
    for name in ("broadcast", "a table of positions", "a layer on what all share"):
        check(architecture(FOLLOWED[name], rows=min(rows, ROWS)))


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", LAYERS)
def test_what_cannot_be_followed_is_run_again(name):
    private = check(architecture(LAYERS[name]))
    rules = {type(tap.observe.rule) for tap in module_taps.taps_of(private.module)._taps}
    replayed = name in ("autograd function", "scripted")
    assert (GenericRule in rules) >= replayed


def test_views_of_an_example():
    a = architecture(FOLLOWED["class token"], rows=4)
    a = Architecture(module=a.module, inputs=a.inputs, targets=a.targets, views=2)
    check(a, reference(a.module, a.inputs, a.targets, views=2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint(reentrant):
    def run(m, h):
        return torch.utils.checkpoint.checkpoint(m.f, h, use_reentrant=reentrant)

    check(
        architecture(one(lambda: Bare(lambda m, x: F.linear(x, m.a) * m.b, (3, WIDTH), (3,)), run))
    )


def test_compiled():
    a = architecture(FOLLOWED["class token"])
    wanted = reference(a.module, a.inputs, a.targets)
    compiled = torch.compile(a.module, backend="eager")
    check(Architecture(module=compiled, inputs=a.inputs, targets=a.targets, views=1), wanted)


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: x * m.a + (x.detach().mean(0) * m.b),
        lambda m, x: x + m.a * x.detach().square().mean() * 0.1,
        lambda m, x: x + F.linear(x.detach().mean((0, 1))[None], m.c),
    ],
)
def test_a_constant_that_is_made_of_the_batch_is_refused(run):
    """It would carry other examples into an example's gradient."""
    a = architecture(bare(run, (WIDTH,), (WIDTH,), (WIDTH, WIDTH)))
    private = one_batch(a, "bookkeeping", reduction="mean")
    with pytest.raises(RuntimeError, match="layer 'f'"):
        backward(private, a)


def test_a_parameter_that_is_not_used_is_not_trained():
    a = architecture(bare(lambda m, x: x * m.a, (WIDTH,), (3,)))
    private = one_batch(a, "bookkeeping", reduction="mean")
    backward(private, a)
    clipper = private.optimizer.clipper
    sums = clipper.clipped_sum(max_grad_norm=0.5, weights=torch.ones(ROWS))
    unused = [s for p, s in zip(clipper.parameters, sums, strict=True) if p is a.module.f.b]
    assert unused == [None]
