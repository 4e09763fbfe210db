"""Rules that users register, and what checks them."""

import doctest
import pathlib
import re

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dptrain
from dptrain import GradientRule, Gradients, LayerRule, Poisson, register_layer
from dptrain.clipping.bookkeeping.rules import table as module_of_rules
from dptrain.clipping.bookkeeping.rules.table import RULES
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.clipping.bookkeeping.uses.use import Materialized
from dptrain.testing import check_layer_rule
from tests.helpers.clipping_oracle import (
    assert_norms,
    assert_sums,
    flat_factors,
    reduced,
    reference,
)
from tests.helpers.engine import wire

PAGE = pathlib.Path(__file__).parents[4] / "docs/tutorials/own-layers.md"


@pytest.fixture(autouse=True)
def _own_rules():
    """Whatever is registered in a test is forgotten after it."""
    kept = dict(RULES)
    yield
    RULES.clear()
    RULES.update(kept)


class Affine(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.shift = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return x * self.weight + self.shift


def affine(layer, inputs, gradient):
    return {"weight": (inputs[0] * gradient).sum(1), "shift": gradient.sum(1)}


def make(model, data, mode=None, **options):
    return wire(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0),
        data=data,
        scheme=Poisson(probability=1.0, dataset_size=len(data), steps=1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        gradients=Gradients(mode=mode),
        **options,
    )


def assert_trains(layer, x):
    """Norms and sums by the engine's default mode, against the loop."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(x.shape[2], x.shape[2]), layer).double()
    y = torch.randn(len(x)).double() * 3
    wanted = reference(model, (x.double(),), y)
    private = make(model, TensorDataset(x.double(), y))
    for inputs, targets in private.loader:
        reduced(private.module(inputs), targets, "mean").backward()
        weights = torch.ones(len(x))
        clipper = private.optimizer.clipper
        sums = clipper.clipped_sum(max_grad_norm=1.0, weights=weights)
        assert_norms(clipper.norms, wanted, 1e-10)
        assert_sums(sums, wanted, flat_factors(wanted.norms, 1.0, weights), 1e-10)
        clipper.discard()
        break
    assert private.module is model


def test_the_example_of_the_tutorial():
    page = PAGE.read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    names = {}
    exec(code, names)
    assert_trains(names["Scale"](8), torch.randn(4, 5, 8))


def test_the_example_of_the_docstring():
    names = {"torch": torch, "nn": nn, "dptrain": dptrain}
    test = doctest.DocTestParser().get_doctest(
        register_layer.__doc__, names, "register_layer", module_of_rules.__file__, 0
    )
    assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0
    check_layer_rule(test.globs["Scale"](3), torch.randn(3, 2, 3))


def test_a_registered_layer_is_clipped_like_any_other():
    register_layer(Affine, affine)
    check_layer_rule(Affine(), torch.randn(5, 3, 4))
    assert_trains(Affine(), torch.randn(6, 3, 4))


def test_without_a_rule_the_layer_is_followed():
    assert_trains(nn.Sequential(nn.Linear(4, 4), Affine()), torch.randn(6, 3, 4))


def test_what_can_be_registered():
    with pytest.raises(TypeError, match="kind=3: must be a subclass"):
        register_layer(3, affine)
    with pytest.raises(TypeError, match="rule='affine': must be a LayerRule"):
        register_layer(Affine, "affine")
    register_layer(Affine, GradientRule(affine))
    check_layer_rule(Affine(), torch.randn(3, 2, 4))


class ByUses(LayerRule):
    """A right rule, for others to break."""

    def uses(self, layer, inputs, gradient):
        found = {}
        if layer.weight.requires_grad:
            found["weight"] = Materialized((inputs[0] * gradient).sum(1))
        if layer.shift.requires_grad:
            found["shift"] = Materialized(gradient.sum(1))
        return found


class Unneeded(ByUses):
    def keeps_inputs(self, layer):
        return layer.weight.requires_grad


class ShortNorms(Materialized):
    def norms(self):
        return super().norms() * 0.999


class OtherRows(Materialized):
    def select(self, index):
        return Materialized(self.gradients[: len(index)])


class OtherSums(Materialized):
    def weighted_sum(self, factors):
        return super().weighted_sum(factors.flip(0))


def with_use(kind):
    class Rule(ByUses):
        def uses(self, layer, inputs, gradient):
            return {n: kind(u.gradients) for n, u in super().uses(layer, inputs, gradient).items()}

    return Rule()


class NoInputs(ByUses):
    def keeps_inputs(self, layer):
        return False

    def uses(self, layer, inputs, gradient):
        inputs = inputs or (torch.zeros_like(gradient),)
        return super().uses(layer, inputs, gradient)


class OtherOutput(ByUses):
    def forward(self, layer, forward, inputs, observe):
        return super().forward(layer, forward, inputs, observe) + 1.0


class NoInputGradient(ByUses):
    def forward(self, layer, forward, inputs, observe):
        return super().forward(layer, forward, tuple(x.detach() for x in inputs), observe)


class Missing(ByUses):
    def uses(self, layer, inputs, gradient):
        return {n: u for n, u in super().uses(layer, inputs, gradient).items() if n != "shift"}


class Unobserved(ByUses):
    def forward(self, layer, forward, inputs, observe):
        return forward(*inputs)


class OneForAll(ByUses):
    def uses(self, layer, inputs, gradient):
        return {
            n: Materialized(u.gradients.sum(0, keepdim=True))
            for n, u in super().uses(layer, inputs, gradient).items()
        }


def mixing(layer, inputs, gradient):  # right, except that 0 · NaN is NaN
    same = torch.eye(len(gradient), dtype=gradient.dtype)
    return {k: same @ g for k, g in affine(layer, inputs, gradient).items()}


@pytest.mark.parametrize("rule", [affine, ByUses(), Unneeded()])
def test_right_rules_pass(rule):
    register_layer(Affine, rule)
    check_layer_rule(Affine(), torch.randn(5, 3, 4))


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda *a: {"weight": affine(*a)["weight"]}, "no per-example gradients of 'shift'"),
        (lambda *a: {k: g[..., :1] for k, g in affine(*a).items()}, r"shape \(5, 1\), expected"),
        (lambda *a: {k: g.flip(0) for k, g in affine(*a).items()}, "gradient is off .*rows"),
        (lambda *a: {k: g * (1 + 1e-7) for k, g in affine(*a).items()}, "gradient is off"),
        (mixing, "beside a row that is not a number is off"),
        (with_use(ShortNorms), r"'weight': norms .* of rows \[1, 2, 3, 4\], not"),
        (with_use(OtherRows), "of a selected row is off"),
        (with_use(OtherSums), "the weighted sum is off by"),
        (NoInputs(), "'weight': the gradient is off"),
        (OtherOutput(), "another output than the layer"),
        (NoInputGradient(), "no gradient reaches input 0"),
        (Missing(), r"returned no gradients of 'shift'"),
        (Unobserved(), "the rule gives no use of 'weight'"),
        (OneForAll(), r"gradients of shape \(1, 4\), expected \(5, 4\)"),
    ],
)
def test_wrong_rules_are_found(rule, says):
    register_layer(Affine, rule)
    with pytest.raises(AssertionError, match=says):
        check_layer_rule(Affine(), torch.randn(5, 3, 4))


class Centred(Affine):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Remembers(Affine):
    def __init__(self):
        super().__init__()
        self.all = [self.weight, self.shift]

    def forward(self, x):
        return x * self.all[0] + self.all[1]


@pytest.mark.parametrize(
    ("kind", "says"),
    [(Centred, "mixes the rows of a batch: row 0"), (Remembers, "autograd reaches 'weight' past")],
)
def test_layers_that_no_rule_can_be_right_for(kind, says):
    register_layer(kind, affine)
    with pytest.raises(AssertionError, match=says):
        check_layer_rule(kind(), torch.randn(5, 3, 4))


class Noisy(Affine):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x))


def test_what_cannot_be_checked():
    x = torch.randn(5, 3, 4)
    with pytest.raises(ValueError, match="Affine has no rule: register one"):
        check_layer_rule(Affine(), x)
    with pytest.raises(ValueError, match="the rule refuses this layer: scale_grad_by_freq"):
        check_layer_rule(nn.Embedding(3, 2, scale_grad_by_freq=True), torch.ones(3, 1).long())
    with pytest.raises(ValueError, match=r"inputs=\[\(2, 3\)\]: all .* at least 3"):
        check_layer_rule(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(ValueError, match="no trainable parameter"):
        check_layer_rule(nn.Linear(3, 3).requires_grad_(False), torch.randn(3, 3))
    register_layer(Noisy, affine)
    with pytest.raises(ValueError, match="the layer is random"):
        check_layer_rule(Noisy(), x)


IMAGES = {1: (4, 4, 6), 2: (4, 4, 6, 5), 3: (4, 4, 4, 3, 4)}
KNOWN = {
    nn.Linear: lambda: (nn.Linear(3, 2), torch.randn(4, 5, 3)),
    nn.modules.linear.NonDynamicallyQuantizableLinear: lambda: (
        nn.modules.linear.NonDynamicallyQuantizableLinear(3, 2),
        torch.randn(4, 3),
    ),
    nn.Bilinear: lambda: (nn.Bilinear(3, 4, 2), (torch.randn(4, 5, 3), torch.randn(4, 5, 4))),
    nn.Embedding: lambda: (nn.Embedding(6, 3, padding_idx=1), torch.randint(0, 6, (4, 9))),
    nn.EmbeddingBag: lambda: (nn.EmbeddingBag(6, 3, padding_idx=1), torch.randint(0, 6, (4, 9))),
    nn.PReLU: lambda: (nn.PReLU(5), torch.randn(4, 5, 3)),
    nn.LSTM: lambda: (nn.LSTM(3, 4, batch_first=True), torch.randn(4, 5, 3)),
    nn.LSTMCell: lambda: (nn.LSTMCell(3, 4), torch.randn(4, 3)),
    nn.GRUCell: lambda: (nn.GRUCell(3, 4), torch.randn(4, 3)),
    nn.RNNCell: lambda: (nn.RNNCell(3, 4), torch.randn(4, 3)),
    nn.LayerNorm: lambda: (nn.LayerNorm((2, 3)), torch.randn(4, 5, 2, 3)),
    nn.RMSNorm: lambda: (nn.RMSNorm(3), torch.randn(4, 5, 3)),
    nn.GroupNorm: lambda: (nn.GroupNorm(2, 4), torch.randn(4, 4, 3, 2)),
    nn.MultiheadAttention: lambda: (
        nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True),
        (torch.randn(4, 3, 4), *[torch.randn(4, 5, 4)] * 2),
    ),
    **{
        kind: lambda kind=kind, d=d: (
            kind(4, 6, 3, groups=2, stride=2, padding=1, dilation=1),
            torch.randn(IMAGES[d]),
        )
        for d, kind in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1)
    },
    **{
        kind: lambda kind=kind, d=d: (
            kind(4, 6, 3, groups=2, stride=2, padding=1, output_padding=1),
            torch.randn(IMAGES[d]),
        )
        for d, kind in enumerate((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), 1)
    },
    **{
        kind: lambda kind=kind, d=d: (kind(4, affine=True), torch.randn(IMAGES[d]))
        for d, kind in enumerate((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), 1)
    },
    **{
        kind: lambda kind=kind, d=d: (kind(4).eval(), torch.randn(IMAGES[d]))
        for kind, d in zip(
            (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
            (1, 2, 3, 2),
            strict=True,
        )
    },
}


def test_every_rule_for_a_layer_of_torch_is_checked_here():
    elsewhere = {nn.GRU, nn.RNN}  # test_recurrent.py: their state has the rows second
    ours = {kind for kind in RULES if kind.__module__.startswith("torch.")}
    assert set(KNOWN) == ours - elsewhere


@pytest.mark.sample(every=37)
@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_the_rules_for_layers_of_torch(kind):
    torch.manual_seed(2)
    layer, inputs = KNOWN[kind]()
    for p in layer.parameters():
        nn.init.normal_(p)
    check_layer_rule(layer, inputs)


class Factored(nn.Module):
    """A layer of two factors, observed one by one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2)))

    def forward(self, x):
        return x @ self.a.T @ self.b.T


class FactoredRule(LayerRule):
    def forward(self, layer, forward, inputs, observe):
        (x,) = inputs
        h = observe(x @ layer.a.T, (x,), lambda _, i, g: {"a": OuterProducts(g, i[0])})
        return observe(h @ layer.b.T, (h,), self.uses)

    def uses(self, layer, inputs, gradient):
        return {"b": OuterProducts(gradient, inputs[0])}


@pytest.mark.slow
def test_a_rule_that_observes_more_than_one_output():
    register_layer(Factored, FactoredRule())
    check_layer_rule(Factored(), torch.randn(4, 5, 4))
    assert_trains(Factored(), torch.randn(4, 5, 4))


class Steps(nn.Module):
    """Takes (steps, rows, width), between two transpositions of the model's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x):
        return x.cumsum(0) * self.weight


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Steps()

    def forward(self, x):
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


class StepsRule(LayerRule):
    """Runs calls on the rows first."""

    def run(self, observe, forward, args, kwargs):
        def rows_first(x):
            return forward(x.transpose(0, 1)).transpose(0, 1)

        y = super().run(observe, rows_first, (args[0].transpose(0, 1),), kwargs)
        return y.transpose(0, 1)

    def uses(self, layer, inputs, gradient):
        return {"weight": Materialized((inputs[0].cumsum(1) * gradient).sum(1))}


def test_a_rule_that_runs_the_calls_of_its_layer():
    """Whatever layout the layer takes, its uses are of rows in the first dimension."""
    register_layer(Steps, StepsRule())
    assert_trains(Turned(), torch.randn(4, 5, 4))


class Head(nn.Module):
    """Holds the bias of a layer within it, as heads of BERT do."""

    def __init__(self, *, past):
        super().__init__()
        self.inner, self.past = nn.Linear(4, 3), past
        self.bias = self.inner.bias

    def forward(self, x):
        return self.inner(x) + (self.bias if self.past else 0.0)


def test_a_parameter_that_a_layer_within_has_too():
    x = torch.randn(5, 3, 4)
    assert_trains(Head(past=False), x)
    assert_trains(Head(past=True), x)
