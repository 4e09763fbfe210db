"""Modules that return more than rows first, with losses outside, against one example at a time."""

import collections
import dataclasses

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Independent, MultivariateNormal, Normal
from torch.nn import functional as F

from tests.helpers.bookkeeping_runs import ROWS, backward, case, check, run_of
from tests.helpers.clipping_oracle import reference

WIDTH, STEPS = 4, 3


class Read(nn.Module):
    """What a loss takes of the outputs of a module."""

    def __init__(self, module, read):
        super().__init__()
        self.module, self.read = module, read

    def forward(self, *inputs):
        return self.read(self.module(*inputs))


class Net(nn.Module):
    """A linear layer, a bare number, a bare vector, a table, and a function of these."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.body = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.spread = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH))
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, x):
        return self.run(self, x)


def check_read(module, read, *inputs, **options):
    a = case(module, *inputs)
    wanted = reference(Read(a.module, read), a.inputs, a.targets)
    private = run_of(a, **options)
    backward(private, lambda *given: read(private.module(*given)))
    check(private, wanted)
    return private


@dataclasses.dataclass
class Found:
    mean: torch.Tensor
    deviation: torch.Tensor


Pair = collections.namedtuple("Pair", ["logits", "scale"])
EVERY = torch.arange(ROWS)

SHARED = {
    "a scale": (lambda m, x: (m.body(x), m.scale.exp()), lambda y: y[0] * y[1]),
    "a scale first": (lambda m, x: (m.scale.exp(), m.body(x)), lambda y: y[1] * y[0]),
    "a scale by name": (
        lambda m, x: {"logits": m.body(x), "scale": m.scale}, lambda y: y["logits"] * y["scale"]
    ),
    "a scale of a named tuple": (
        lambda m, x: Pair(m.body(x), m.scale), lambda y: y.logits / (1 + y.scale.square())
    ),
    "a deviation": (
        lambda m, x: Found(m.body(x), m.spread.exp()), lambda y: y.mean / y.deviation
    ),
    "a deviation of one row": (
        lambda m, x: (m.body(x), m.spread.exp()[None]), lambda y: y[0] / y[1]
    ),
    "a deviation of a list": (
        lambda m, x: [m.body(x), [m.spread]], lambda y: y[0] + F.softplus(y[1][0])
    ),
    "a deviation twice": (
        lambda m, x: (m.body(x), m.spread), lambda y: (y[0] - y[1]) * y[1].exp()
    ),
    "a table": (lambda m, x: (m.body(x), m.table(EVERY)), lambda y: y[0] @ y[1].T),
    "the weights of a table": (lambda m, x: (m.body(x), m.table.weight), lambda y: y[0] @ y[1].T),
    "a density": (
        lambda m, x: (m.body(x), m.spread),
        lambda y: Normal(y[0], y[1].exp()).log_prob(torch.zeros_like(y[0])),
    ),
}  # fmt: skip


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("probe", ["shapes", "off"])
def test_what_all_examples_share(name, probe):
    torch.manual_seed(0)
    run, read = SHARED[name]
    if probe == "off" and "table" in name:
        pytest.skip("see test_gathered.py")
    check_read(Net(run), read, torch.randn(ROWS, WIDTH), probe=probe)


class Recurrent(nn.Module):
    def __init__(self, kind, layers, both):
        super().__init__()
        options = {"num_layers": layers, "bidirectional": both, "batch_first": True}
        self.rnn = kind(WIDTH, 5, **options)
        self.head = nn.Linear(10 if both else 5, 2)

    def forward(self, x):
        out, hidden = self.rnn(x)
        return self.head(out[:, -1]), hidden


def with_hidden(y):
    hidden = torch.cat(y[1]) if isinstance(y[1], tuple) else y[1]
    return torch.cat([y[0], hidden.transpose(0, 1).flatten(1)], dim=1)


@pytest.mark.sample(every=13)
@pytest.mark.parametrize("both", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("rows", [ROWS, 3])
def test_hidden_states(kind, layers, both, rows):
    torch.manual_seed(0)
    check_read(Recurrent(kind, layers, both), with_hidden, torch.randn(rows, STEPS, WIDTH))


class Ctc(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))).log_softmax(-1).transpose(0, 1)


@pytest.mark.parametrize("steps", [ROWS, 6, 9])
def test_steps_before_rows(steps):
    torch.manual_seed(0)
    check_read(Ctc(), lambda y: y.transpose(0, 1), torch.randn(ROWS, steps, WIDTH))


@pytest.mark.parametrize("steps", [6, 9])
def test_a_ctc_loss(steps):
    """One example at a time, each alone in its loss."""
    torch.manual_seed(0)
    labels = torch.randint(1, 5, (ROWS, 3))

    def losses(y):
        n = y.shape[1]
        these = labels[:n] if n == ROWS else labels[:1]
        lengths = torch.full((n,), steps), torch.full((n,), 3)
        return F.ctc_loss(y, these, *lengths, reduction="none")[:, None]

    labels[:] = labels[:1]
    check_read(Ctc(), losses, torch.randn(ROWS, steps, WIDTH))


class Past(torch.autograd.Function):
    """The identity, as a custom function: layers whose parameters it takes are run again."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Holder:
    """Holds tensors, and has further ones made of these when asked."""

    def __init__(self, mean, spread):
        self.inner = {"mean": mean}
        self._spread = spread

    @property
    def deviation(self):
        return self._spread.exp()


class Slots:
    __slots__ = ("found",)

    def __init__(self, found):
        self.found = found


class Likelihood(nn.Module):
    """A layer with bare parameters that makes something of its input, and what a loss takes."""

    def __init__(self, make, through):
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)
        self.spread = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH))
        self.make, self.through = make, through

    def forward(self, x):
        return self.make(self, self.net(x), self.through(self.spread))


def density(y):
    return y.log_prob(torch.zeros(y.batch_shape + y.event_shape, dtype=torch.float64)).view(
        len(y.mean), -1
    )


def kept(m, h, s):
    m.last = h * s.exp()
    return h * s


def covariance(m, h, s):
    return MultivariateNormal(h, scale_tril=torch.diag_embed(s.exp().expand_as(h)))


MADE = {
    "a normal": (lambda m, h, s: Normal(h, s.exp()), density),
    "independent normals": (lambda m, h, s: Independent(Normal(h, s.exp()), 1), density),
    "a normal of many dimensions": (covariance, lambda y: y.log_prob(y.mean.detach())[:, None]),
    "logits of classes": (lambda m, h, s: Categorical(logits=h * s), lambda y: y.logits),
    "probabilities": (
        lambda m, h, s: Bernoulli(logits=h + s), lambda y: y.log_prob(torch.ones(WIDTH).double())
    ),
    "an object": (lambda m, h, s: Holder(h, h * s), lambda y: y.inner["mean"] + y._spread),
    "properties": (lambda m, h, s: Holder(h, h + s), lambda y: y.inner["mean"] * y.deviation),
    "objects in objects": (
        lambda m, h, s: [Holder(Slots(h * s), h), 3], lambda y: y[0].inner["mean"].found
    ),
    "slots": (lambda m, h, s: Slots(h * s), lambda y: y.found),
    "a dictionary in a tuple": (lambda m, h, s: ({"a": h + s},), lambda y: y[0]["a"]),
    "both twice": (
        lambda m, h, s: (Holder(h, h * s), h * s), lambda y: y[0]._spread * y[1]
    ),
}  # fmt: skip


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("through", [torch.exp, Past.apply], ids=["followed", "run again"])
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("probe", ["shapes", "off"])
def test_what_is_not_a_tensor(name, through, probe):
    """The gradient of the bare parameter is there, example by example."""
    torch.manual_seed(0)
    make, read = MADE[name]
    module, x = Likelihood(make, through), torch.randn(ROWS, WIDTH)
    if through is torch.exp or probe == "shapes":
        check_read(module, read, x, probe=probe)
        return
    with pytest.raises(RuntimeError, match="parameter 'spread' is used outside"):
        check_read(module, read, x, probe=probe)


HIDDEN = {
    "an attribute of the layer": (kept, lambda m, y: y + m.last),
    "a function": (lambda m, h, s: (h * s, lambda: h * s), lambda m, y: y[0] * y[1]()),
    "a generator": (
        lambda m, h, s: (h * s, (h * s for _ in range(1))), lambda m, y: y[0] * next(y[1])
    ),
    "a tensor of no row": (lambda m, h, s: (h * s, s), lambda m, y: y[0] * y[1]),
    "an object of no row": (
        lambda m, h, s: Holder(h * s, s), lambda m, y: y.inner["mean"] * y._spread
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_followed_wherever_it_goes(name):
    torch.manual_seed(0)
    make, read = HIDDEN[name]
    a = case(Likelihood(make, torch.exp), torch.randn(ROWS, WIDTH))
    wanted = reference(Within(a.module, read), a.inputs, a.targets)
    private = run_of(a)
    backward(private, lambda x: read(private.module, private.module(x)))
    check(private, wanted)


class Within(nn.Module):
    """What a loss takes of a module and its outputs."""

    def __init__(self, module, read):
        super().__init__()
        self.module, self.read = module, read

    def forward(self, x):
        return self.read(self.module, self.module(x))


@pytest.mark.parametrize("name", HIDDEN)
def test_no_gradient_is_lost_where_a_layer_is_run_again(name):
    torch.manual_seed(0)
    make, read = HIDDEN[name]
    a = case(Likelihood(make, Past.apply), torch.randn(ROWS, WIDTH))
    private = run_of(a)
    with pytest.raises(
        RuntimeError, match=r"module itself.*by a path other than its returned tensors"
    ):
        backward(private, lambda x: read(private.module, private.module(x)))


def test_an_adversary_asks_for_no_gradient_of_parameters():
    """A derivative by the input passes what would refuse one of a parameter."""
    torch.manual_seed(0)
    a = case(Likelihood(kept, Past.apply), torch.randn(ROWS, WIDTH))
    private = run_of(a)
    x = next(iter(private.loader))[0].flatten(0, 1).requires_grad_()
    private.module(x)
    (found,) = torch.autograd.grad(private.module.last.sum(), x)
    assert found.shape == x.shape
    assert bool(found.any())
