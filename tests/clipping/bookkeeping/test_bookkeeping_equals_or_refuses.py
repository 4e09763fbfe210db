"""Unusual uses of layers: what is released is right, or the run is refused; never wrong."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.helpers.architectures import Architecture
from tests.helpers.architectures_parts import disturb
from tests.helpers.architectures_runs import backward, one_batch
from tests.helpers.clipping_oracle import (
    TOLERANCE,
    assert_norms,
    assert_sums,
    flat_factors,
    reference,
)

ROWS = 4  # of every batch here


class Net(nn.Module):
    """Layers by name, and a function of them and the input."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.run(self, x)


class Tripled(nn.Linear):
    """Of a layer's class, but not its function."""

    def forward(self, x):
        return 3 * super().forward(x)


def linear(**options):
    return nn.Linear(3, 3, **options)


def frozen(norm):
    """In eval mode, with statistics that somebody else's data have left."""
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return norm.eval().requires_grad_(False)


def hooked(layer, **hooks):
    for name, hook in hooks.items():
        getattr(layer, name)(hook)
    return layer


def table(ids):
    return nn.Embedding(int(ids.max()) + 1, 3)


def positions(ids):
    """Embeddings of ids that all examples share, as many as there are rows."""
    return Net(lambda m, x: m.f(m.a(x) + m.p(ids)), a=linear(), p=table(ids), f=linear())


def seen_twice(m, x):
    with torch.no_grad():
        scale = 1 + m.f(x).mean(1, keepdim=True).abs() * 0
    return m.f(x) * scale + m.f(x).detach()


def written_input(m, x):
    """Autograd refuses this, as it needs what was written over."""
    h = m.a(x)
    out = m.f(h)
    h.mul_(2)
    return out + m.b(h)


def written_output(m, x):
    h = m.f(x)
    h[:, 0] *= 3
    h[:, 1] = 1.0
    return m.a(h)


def scaled_gradient(m, x):
    h = m.f(x)
    h.register_hook(lambda g: 2 * g)
    return m.a(h)


# Inputs of shape (ROWS, 3), or (ROWS, ROWS, 3) where the name says "square": one where a layer that
# is called with the batch in another dimension cannot be told by its shape.
FEATURES = {
    "output of a call detached, another without gradients": lambda: Net(seen_twice, f=linear()),
    "output never used": lambda: Net(lambda m, x: (m.a(x), m.f(x))[1], a=linear(), f=linear()),
    "keyword argument": lambda: Net(lambda m, x: m.f(input=x), f=linear()),
    "output written to": lambda: Net(written_output, f=linear(), a=linear()),
    "gradient hook": lambda: Net(scaled_gradient, f=linear(), a=linear()),
    "expanded input and gradient": lambda: Net(
        lambda m, x: m.f(x[:, None].expand(-1, 5, -1)).sum((1, 2))[:, None], f=linear()
    ),
    "checkpoint": lambda: Net(
        lambda m, x: m.b(checkpoint(m.f, m.a(x), use_reentrant=False)),
        a=linear(),
        f=nn.Sequential(linear(), nn.Tanh(), linear()),
        b=linear(),
    ),
    "two tied embeddings": lambda: tied_embeddings(),
    "frozen batch norm": lambda: Net(
        lambda m, x: m.a(m.n(m.f(x))), f=linear(), n=frozen(nn.BatchNorm1d(3)), a=linear()
    ),
}
UNCLEAR = {
    "reentrant checkpoint": lambda: Net(
        lambda m, x: m.b(checkpoint(m.f, m.a(x), use_reentrant=True)),
        a=linear(),
        f=nn.Sequential(linear(), nn.Tanh(), linear()),
        b=linear(),
    ),
    "positions as many as rows": lambda: positions(torch.arange(ROWS)),
    "shared rows of a table": lambda: Net(
        lambda m, x: m.f(x)[:, None] + m.g(m.p.weight),
        f=linear(),
        g=linear(),
        p=nn.Embedding(ROWS, 3),
    ),
    "one shared row": lambda: Net(
        lambda m, x: m.f(x) + m.f(torch.ones(1, 3, dtype=x.dtype)), f=linear()
    ),
    "one shared row of a norm": lambda: Net(
        lambda m, x: m.f(x) + m.f(torch.arange(3, dtype=x.dtype)[None]), f=nn.LayerNorm(3)
    ),
    "one shared row of a norm alone": lambda: Net(
        lambda m, x: m.a(x) + m.f(torch.arange(3, dtype=x.dtype)[None]),
        a=linear(),
        f=nn.LayerNorm(3),
    ),
    "folded rows": lambda: Net(
        lambda m, x: m.f(x.repeat_interleave(2, 0)).unflatten(0, (-1, 2)).sum(1), f=linear()
    ),
    "slice of a table": lambda: Net(
        lambda m, x: m.f(x)[:, None] + m.p.weight[:2], f=linear(), p=nn.Embedding(5, 3)
    ),
    "own parameter": lambda: Net(
        lambda m, x: m.f(x) * m.scale, f=linear(), scale=nn.Parameter(torch.rand(3))
    ),
    "weight used by a function": lambda: Net(lambda m, x: F.linear(m.f(x), m.f.weight), f=linear()),
    "weight used by another's function": lambda: Net(
        lambda m, x: m.a(x) @ m.f.weight, a=linear(), f=linear()
    ),
    "forward called directly": lambda: Net(
        lambda m, x: m.f(m.a(x)) + m.f.forward(x), a=linear(), f=linear()
    ),
    "input written to": lambda: Net(written_input, a=linear(), f=linear(), b=linear()),
    "input changed by a hook": lambda: Net(
        lambda m, x: m.f(x),
        f=hooked(linear(), register_forward_pre_hook=lambda m, args: (5 * args[0],)),
    ),
    "output changed by a hook": lambda: Net(
        lambda m, x: m.f(x), f=hooked(linear(), register_forward_hook=lambda m, args, out: 5 * out)
    ),
    "weight norm": lambda: Net(lambda m, x: m.f(x), f=weight_norm(linear())),
    "subclass": lambda: Net(lambda m, x: m.f(x), f=Tripled(3, 3)),
    "frequencies": lambda: Net(
        lambda m, x: m.f(x) + m.p((x > 0).long()).sum(1),
        f=linear(),
        p=nn.Embedding(2, 3, scale_grad_by_freq=True),
    ),
    "sparse gradients": lambda: Net(
        lambda m, x: m.f(x) + m.p((x > 0).long()).sum(1),
        f=linear(),
        p=nn.Embedding(2, 3, sparse=True),
    ),
    "bag": lambda: Net(lambda m, x: m.p((x > 0).long()), p=nn.EmbeddingBag(2, 3)),
    "bilinear": lambda: Net(lambda m, x: m.p(x, x), p=nn.Bilinear(3, 3, 2)),
    "transposed convolution": lambda: Net(
        lambda m, x: m.p(x[:, None]), p=nn.ConvTranspose1d(1, 2, 2)
    ),
    "attention with key and value biases": lambda: Net(
        lambda m, x: m.p(x[..., None], x[..., None], x[..., None])[0],
        p=nn.MultiheadAttention(1, 1, add_bias_kv=True, add_zero_attn=True, batch_first=True),
    ),
    "attention without a batch": lambda: Net(
        lambda m, x: m.p(x, x, x)[0] * 0 + m.f(x), p=nn.MultiheadAttention(3, 1), f=linear()
    ),
}
SQUARE = {
    "attention with the batch second": lambda: Net(
        lambda m, x: m.p(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1), p=nn.MultiheadAttention(3, 1)
    ),
}
UNSEEN = {
    "positions backwards": lambda: positions(torch.arange(ROWS).flip(0)),
    "every second position": lambda: positions(2 * torch.arange(ROWS)),
    "shared segment ids": lambda: positions(torch.zeros(ROWS, dtype=torch.long)),
    "shared random ids": lambda: positions(torch.tensor([2, 0, 0, 1])),
    "shared rows of a linear": lambda: Net(
        lambda m, x: m.f(x)[:, None] + m.g(torch.eye(ROWS, 3, dtype=x.dtype)),
        f=linear(),
        g=linear(),
    ),
    "linear over a later dimension": lambda: Net(
        lambda m, x: m.f(x.transpose(0, 1)).transpose(0, 1), f=linear()
    ),
    "norm over a later dimension": lambda: Net(
        lambda m, x: m.f(x.transpose(0, 1)).transpose(0, 1), f=nn.LayerNorm(3)
    ),
}


def tied_embeddings():
    first, second = nn.Embedding(2, 3, padding_idx=0), nn.Embedding(2, 3)
    second.weight = first.weight
    return Net(
        lambda m, x: m.f(m.a((x > 0).long()).sum(1) + m.b((x > 1).long()).mean(1)),
        a=first,
        b=second,
        f=linear(),
    )


def architecture(build, *shape, rows=ROWS):
    torch.manual_seed(3)
    module = build()
    disturb(module)
    targets = torch.tensor([0.3, -20.0, 4.0, 1.5], dtype=torch.float64)[:rows]
    x = torch.randn(rows, *shape, dtype=torch.float64)
    return Architecture(module=module.double(), inputs=(x,), targets=targets, views=1)


def check(a):
    wanted = reference(a.module, a.inputs, a.targets)
    private = one_batch(a, "bookkeeping", reduction="mean")
    backward(private, a)
    clipper = private.optimizer.clipper
    sums = clipper.clipped_sum(max_grad_norm=0.5, weights=torch.ones(a.examples), scales=None)
    assert_norms(clipper.norms, wanted, TOLERANCE[a.dtype])
    factors = flat_factors(wanted.norms, 0.5, torch.ones(a.examples))
    assert_sums(sums, wanted, factors, TOLERANCE[a.dtype])


@pytest.mark.parametrize("name", FEATURES)
def test_right(name):
    check(architecture(FEATURES[name], 3))


def shared_positions(form, length, rows):
    ids = torch.arange(length) if form == "flat" else torch.arange(length)[None]
    return architecture(
        lambda: Net(lambda m, x: m.f(x) + m.p(ids), f=linear(), p=nn.Embedding(length, 3)),
        length,
        3,
        rows=rows,
    )


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 3, 4])
@pytest.mark.parametrize("form", ["flat", "row"])
def test_positions_that_all_examples_share(form, length, rows):
    check(shared_positions(form, length, rows))


def check_unless_refused(a):
    """A refusal has to say something; a wrong sum is an AssertionError, and fails."""
    refusals = []
    try:
        check(a)
    except (RuntimeError, ValueError, TypeError) as error:
        refusals.append(str(error))
    assert all(len(text) > 20 for text in refusals)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", UNCLEAR)
def test_right_or_refused(name):
    check_unless_refused(architecture(UNCLEAR[name], 3))


@pytest.mark.parametrize("name", SQUARE)
def test_a_batch_in_another_dimension(name):
    check_unless_refused(architecture(SQUARE[name], ROWS, 3))


def test_one_vector_for_all_examples():
    check_unless_refused(
        architecture(
            lambda: Net(
                lambda m, x: m.a(x) * m.f(torch.arange(3, dtype=x.dtype)), a=linear(), f=linear()
            ),
            3,
        )
    )


@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_shape_tells(name):
    """Layers called on as many shared rows as there are examples: told by other numbers of rows."""
    check_unless_refused(architecture(UNSEEN[name], *([ROWS, 3] if "dimension" in name else [3])))
