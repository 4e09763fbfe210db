"""Layers without a rule: their forward, run again for each example, against the loop."""

import collections
import dataclasses
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from dptrain.clipping.bookkeeping import module_taps
from dptrain.clipping.bookkeeping.rules import generic
from tests.helpers.architectures import Architecture
from tests.helpers.architectures_runs import backward, one_batch
from tests.helpers.clipping_oracle import (
    TOLERANCE,
    assert_sums,
    flat_factors,
    reference,
)
from tests.helpers.one_layer import ROWS, WIDTH, architecture, check, one


class RMSNorm(nn.Module):
    def __init__(self, *, plus_one=False):
        super().__init__()
        self.weight, self.plus_one = nn.Parameter(torch.zeros(WIDTH)), plus_one

    def forward(self, x):
        normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return normal * (self.weight + 1 if self.plus_one else self.weight)


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.gamma


class Mixture(nn.Module):
    """Two inputs, a switch, a constant tensor, keyword-only arguments."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x, other, power=1, *, mask, shift=0.0):
        return (x @ self.a + self.b**power) * mask + other @ self.a + shift * self.b


Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Found:
    states: torch.Tensor
    rest: dict
    count: int


class Several(nn.Module):
    """Outputs of several shapes in structures, one that is not differentiable, one handed on."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        y = x @ self.w
        rest = {"pair": Pair(y.tanh(), [y.sum(-1), (y > 0).long()]), "x": x}
        return Found(y.sin()[:, :2], rest, 3)


class Cube(torch.autograd.Function):
    """As kernels of other libraries are written: vmap cannot run it."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w**3

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w**3, (g * x * 3 * w**2).flatten(0, -2).sum(0)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return Cube.apply(x, self.w)


@torch.jit.script
def scripted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    total = x * w
    for k in range(int(x.shape[1])):
        total = total + k * torch.sin(w) * x
    return total


class Scripted(Custom):
    def forward(self, x):
        return scripted(x, self.w)


class Tokens(nn.Module):
    """As a vision transformer: a class token and positions beside layers that have rules."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))

    def forward(self, x):
        h = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.inner(h)[:, 0]


class OnData(nn.Module):
    """Another path for some examples: what an example takes does not depend on the others."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        rows = [r * self.w if float(r.detach().sum()) > 0 else r + self.w for r in x]
        return torch.stack(rows)


class InPlace(nn.Module):
    """Writes into a buffer of its own, and into what it has made."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.last = None

    def forward(self, x):
        self.calls += 1
        y = torch.zeros_like(x)
        y += x * self.w
        y[..., 0] *= 2
        y.mul_(1.5)
        self.last = y.detach()
        return y


class WritesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        x.mul_(2.0)
        return x * self.w


class Dropped(nn.Module):
    """Random numbers of its own, and of layers within."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH))
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4))

    def forward(self, x):
        return F.dropout(self.inner(F.dropout(x, 0.3) * self.w), 0.5)


class Held(nn.Module):
    """Parameters in lists, in dictionaries, and in a module that has no forward."""

    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH)])
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH)})
        self.holder = nn.Module()
        self.holder.w = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x):
        x = x * self.listed[0] + self.listed[1] + self.named["a"].sin()
        return self.layers[0](x) * self.holder.w


class Positions(nn.Module):
    """Gives every example the same."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 8, WIDTH))

    def forward(self, x):
        return self.table[:, : x.shape[1]]


def mixed(m, h):
    mask = torch.tensor([1.0, 0.0, 2.0], dtype=h.dtype)
    return m.f(h, h.cos(), 2, mask=mask, shift=0.5) + m.f(other=h, x=h.sin(), mask=mask)


def several(m, h):
    found = m.f(h)
    pair = found.rest["pair"]
    total = pair.first * found.count + pair.second[0][..., None] * pair.second[1]
    return total + found.rest["x"] + found.states.mean((1, 2))[:, None, None]


LAYERS = {
    "rms norm": one(RMSNorm),
    "rms norm, 1 + w": one(lambda: RMSNorm(plus_one=True)),
    "layer scale": one(LayerScale),
    "inputs, constants and keywords": one(Mixture, mixed),
    "structures of outputs": one(Several, several),
    "autograd function": one(Custom),
    "scripted": one(Scripted),
    "class token and positions": one(Tokens, lambda m, h: m.f(h[:, :3])),
    "control flow": one(OnData),
    "in place": one(InPlace),
    "input written to": one(WritesInput, lambda m, h: m.f(h * 1.0)),
    "called twice": one(RMSNorm, lambda m, h: m.f(m.f(h).cos() + h)),
    "parameters in containers": one(Held),
    "weight norm": one(lambda: weight_norm(nn.Linear(WIDTH, WIDTH))),
    "a subclass": one(lambda: type("Twice", (nn.Linear,), {})(WIDTH, WIDTH)),
    "recurrent": one(lambda: nn.GRUCell(WIDTH, WIDTH), lambda m, h: m.f(h[:, 0], h[:, 1])),
}
DTYPES = [torch.float64, torch.float32]


@pytest.fixture(autouse=True)
def replayed(monkeypatch):
    """Every layer without a rule, also where its operations could be followed."""
    monkeypatch.setattr(module_taps, "OperationsRule", generic.GenericRule)


@pytest.fixture(params=["at once", "one row at a time", "found twice"])
def memory(request, monkeypatch):
    """How much there is for a replay, and for what it finds."""
    if request.param != "at once":
        monkeypatch.setattr(generic, "_MEMORY", {"cpu": 1})
    if request.param == "found twice":
        monkeypatch.setattr(generic, "_KEPT", 0)


@pytest.mark.sample(every=25)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("memory")
def test_equals_the_loop(name, dtype):
    check(architecture(LAYERS[name], dtype))


def rules_of(module):
    """The replaying rules of the layers of a run's module, by the layers' names."""
    taps = {name: vars(layer).get("forward") for name, layer in module.named_modules()}
    rules = {name: getattr(tap, "observe", None) for name, tap in taps.items()}
    rules = {name: observe and observe.rule for name, observe in rules.items()}
    return {name: rule for name, rule in rules.items() if isinstance(rule, generic.GenericRule)}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("rms norm", "vmap"),
        ("inputs, constants and keywords", "vmap"),
        ("class token and positions", "vmap"),
        ("weight norm", "vmap"),
        ("autograd function", "loop"),
        ("control flow", "loop"),
    ],
)
def test_vmap_where_it_can(name, way):
    a = architecture(LAYERS[name])
    check(a)
    (rule,) = rules_of(a.module).values()
    (plan,) = rule._plans.values()
    assert (plan.way, plan.rows >= ROWS) == (way, True)


@pytest.mark.parametrize("first", ["vmap", "whole"])
def test_dropout_within(first, monkeypatch):
    """The random numbers are those of the forward pass, drawn for the batch as a whole."""
    if first == "whole":
        monkeypatch.setattr(generic, "_TOLERANCE_RANDOM", -1.0)
    a = architecture(one(Dropped))
    torch.manual_seed(7)
    outputs = a.module(a.inputs[0])
    losses = (outputs.flatten(1) - a.targets[:, None]).square().mean(1)
    rows = [
        torch.autograd.grad(loss, [*a.module.parameters()], retain_graph=True) for loss in losses
    ]
    private = one_batch(a, "bookkeeping", reduction="sum")
    batch = next(iter(private.loader))
    torch.manual_seed(7)
    found = private.module(batch[0].flatten(0, 1))
    assert torch.equal(found, outputs)
    after = torch.get_rng_state()
    (found.flatten(1) - a.targets[:, None]).square().mean(1).sum().backward()
    assert torch.equal(torch.get_rng_state(), after)
    factors = torch.ones(ROWS)
    sums = private.optimizer.clipper.clipped_sum(max_grad_norm=1e9, weights=factors)
    for total, gradients in zip(sums, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(total, sum(gradients), rtol=1e-9, atol=1e-9)
    norms = [torch.cat([g.flatten() for g in row]).norm() for row in rows]
    torch.testing.assert_close(
        private.optimizer.clipper.norms, torch.stack(norms), rtol=1e-9, atol=0
    )
    assert [plan.way for plan in rules_of(a.module)["f"]._plans.values()][-1] == first


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", ["rms norm", "autograd function", "class token and positions"])
@pytest.mark.usefixtures("memory")
def test_a_broken_row_counts_nothing_and_hurts_nobody(name):
    a = architecture(LAYERS[name])
    wanted = reference(a.module, a.inputs, a.targets)
    a.targets[2] = torch.nan
    private = one_batch(a, "bookkeeping", reduction="mean")
    backward(private, a)
    clipper = private.optimizer.clipper
    sums = clipper.clipped_sum(max_grad_norm=0.5, weights=torch.ones(ROWS), scales=None)
    assert clipper.nonfinite_examples == 1
    factors = flat_factors(wanted.norms, 0.5, torch.ones(ROWS))
    factors[2] = 0.0
    assert_sums(sums, wanted, factors, TOLERANCE[a.dtype])


def test_a_broken_row_in_a_batch_that_is_run_again_as_a_whole(monkeypatch):
    """Its gradient of zero times what is no number is no number, in the sums of all others."""
    monkeypatch.setattr(generic, "_TOLERANCE_RANDOM", -1.0)
    gradients = {}
    for value in (0.0, torch.nan):
        torch.manual_seed(0)
        a = architecture(one(Dropped))
        a.inputs[0][2] = value
        private = one_batch(a, "bookkeeping", reduction="sum")
        torch.manual_seed(7)
        backward(private, a)
        clipper = private.optimizer.clipper
        others = torch.ones(ROWS)
        others[2] = 0.0
        gradients[value == 0] = clipper.clipped_sum(max_grad_norm=0.5, weights=others)
        assert clipper.norms.isfinite().sum() == ROWS - (value != 0)
        assert [plan.way for plan in rules_of(a.module)["f"]._plans.values()][-1] == "whole"
    torch.testing.assert_close(gradients[False], gradients[True], rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("memory")
def test_views_of_an_example():
    a = architecture(LAYERS["rms norm"], rows=4)
    a = Architecture(module=a.module, inputs=a.inputs, targets=a.targets, views=2)
    check(a, reference(a.module, a.inputs, a.targets, views=2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint(reentrant):
    def run(m, h):
        return torch.utils.checkpoint.checkpoint(m.f, h, use_reentrant=reentrant)

    check(architecture(one(RMSNorm, run)))


def test_compiled():
    a = architecture(LAYERS["class token and positions"])
    wanted = reference(a.module, a.inputs, a.targets)
    compiled = torch.compile(a.module, backend="eager")
    a = Architecture(module=compiled, inputs=a.inputs, targets=a.targets, views=1)
    check(a, wanted)


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_half_precision(how):
    """The replay runs in the dtypes of the forward pass; its norms are off by half's rounding."""
    a = architecture(LAYERS["class token and positions"], torch.float32)
    wanted = reference(a.module, a.inputs, a.targets)
    if how == "bfloat16":
        a.module.bfloat16()
        a.inputs[0].data = a.inputs[0].bfloat16()
        a.targets.data = a.targets.bfloat16()
    private = one_batch(a, "bookkeeping", reduction="mean")
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        backward(private, a)
    clipper = private.optimizer.clipper
    clipper.clipped_sum(max_grad_norm=0.5, weights=torch.ones(ROWS))
    assert clipper.norms.dtype == torch.float32
    off = (clipper.norms.double() - wanted.norms).abs() / wanted.norms
    assert float(off.max()) < 2**-4


class Centred(LayerScale):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Pooled(LayerScale):
    def forward(self, x):
        return super().forward(x).mean(0)


class OwnGenerator(LayerScale):
    generator = torch.Generator()

    def forward(self, x):
        noise = torch.rand(x.shape, generator=OwnGenerator.generator, dtype=x.dtype)
        return super().forward(x + noise)


class Cached(LayerScale):
    def forward(self, x, cache):
        cache.kept.append(x)
        return super().forward(x)


class Cache:
    def __init__(self):
        self.kept = []


@pytest.mark.parametrize(
    ("layer", "run", "says"),
    [
        (
            Centred,
            None,
            r"layer 'f', a Centred without a rule, returned other outputs .*mixes the exa",
        ),
        (
            Pooled,
            lambda m, h: h + m.f(h),
            "layer 'f', a Pooled .* by a path other than .* row per example",
        ),
        (
            Positions,
            lambda m, h: h + m.f(h),
            "layer 'f', a Positions .* output of another shape.* one that all share",
        ),
        (OwnGenerator, None, "layer 'f', a OwnGenerator .* draws random numbers from a generator"),
        (
            Cached,
            lambda m, h: m.f(h, Cache()),
            "layer 'f' has no rule .* and is called with a Cache",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(layer, run, says):
    a = architecture(one(layer, run) if run else one(layer))
    private = one_batch(a, "bookkeeping", reduction="mean", probe="off")
    with pytest.raises(RuntimeError, match=says):
        backward(private, a)


def test_what_it_costs_is_said_once(caplog):
    a = architecture(lambda: nn.Sequential(*[RMSNorm() for _ in range(5)], LayerScale()))
    private = one_batch(a, "bookkeeping", reduction="mean")
    for _ in range(2):
        caplog.clear()
        backward(private, a)
        private.optimizer.clipper.clipped_sum(max_grad_norm=0.5, weights=torch.ones(ROWS))
        said, first = [r.getMessage() for r in caplog.records], _ == 0
        assert len(said) == first
        if not first:
            continue
        assert "RMSNorm ('0', '1', '2' and 2 more)" in said[0]
        assert "LayerScale ('5')" in said[0]
        assert "dptrain.register_layer()" in said[0]
        shares = re.findall(r"\) (?:about (\d+)|less than 5) %", said[0])
        assert len(shares) == 2
        assert sum(int(share or 0) for share in shares) <= 110  # of roundings to tens
        assert not re.search(r"\d m?s\b", said[0])
