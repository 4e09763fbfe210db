"""Subclasses of layers that have a rule: with the parent's forward, and with one of their own."""

import functools
import types

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from opacus.layers.dp_rnn import RNNLinear
from torch import nn

from dptrain import register_layer
from dptrain.clipping.bookkeeping.rules import RULES, rule_of
from dptrain.testing import check_layer_rule
from tests.clipping.bookkeeping.rules.test_table import KNOWN
from tests.helpers.bookkeeping_runs import ROWS, case, check_like_loop


@pytest.fixture(autouse=True)
def _own_rules():
    """Whatever is registered in a test is forgotten after it."""
    kept = dict(RULES)
    yield
    RULES.clear()
    RULES.update(kept)


@pytest.mark.sample(every=25)
@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_every_rule_holds_for_subclasses_that_change_nothing(kind):
    class Same(kind):
        """With what subclasses usually have of their own."""

        numbers = property(lambda self: sum(p.numel() for p in self.parameters()))

        def reset_parameters(self):
            """Of its own: nothing that forward() looks at."""
            super().reset_parameters()

        def extra_repr(self):
            return "same"

    layer, inputs = KNOWN[kind]()
    layer.__class__ = Same
    assert rule_of(layer) is RULES[kind]
    check_layer_rule(layer, inputs)


class Square(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)
        nn.init.eye_(self.weight)


class Once(nn.Conv1d):
    """A mixin's method comes before torch's."""


def test_a_model_with_subclasses_is_that_of_the_loop():
    torch.manual_seed(0)
    model = nn.Sequential(Once(3, 4, 2), nn.Tanh(), nn.Flatten(), Square(16), nn.Tanh(), Square(16))
    check_like_loop(case(model, torch.randn(ROWS, 3, 5)))


class Tripled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


class Standardized(nn.Conv2d):
    """With the parent's forward, which calls a method that is not the parent's."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


class Halved(nn.Linear):
    """With the parent's forward, which looks at a weight that is not the parameter."""

    weight = property(lambda self: self._parameters["weight"] / 2)


class Seen(nn.Linear):
    def __getattr__(self, name):
        found = super().__getattr__(name)
        return 2 * found if name == "bias" else found


class Mixed:
    def forward(self, x):
        return F.linear(x, self.weight).tanh()


class WithMixin(Mixed, nn.Linear):
    pass


class Longer(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(sizes[1]))


def halved():
    layer = nn.Linear(3, 3, bias=False)
    layer.__class__ = Halved
    return layer


OTHERS = {
    "rows of a packed sequence": (
        lambda: RNNLinear(3, 3),
        "called on the steps of a packed sequence",
    ),
    "forward": (lambda: Tripled(3, 3), r"Linear with a forward\(\) of its own"),
    "a method that forward calls": (
        lambda: Standardized(3, 3, 2),
        r"Conv2d with a _conv_forward\(\) of its own",
    ),
    "a property": (halved, "Linear with a weight of its own"),
    "any attribute": (lambda: Seen(3, 3), r"Linear with a __getattr__\(\) of its own"),
    "a mixin's forward": (lambda: WithMixin(3, 3), r"Linear with a forward\(\) of its own"),
    "a parameter": (lambda: Longer(3, 3), r"Linear with additional parameters \['scale'\]"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_another_has_no_rule(name):
    build, says = OTHERS[name]
    layer = build()
    assert rule_of(layer) is None
    with pytest.raises(
        ValueError,
        match=f"{type(layer).__name__} has no rule, as it is (a )?{says}.*: register one",
    ):
        check_layer_rule(layer, torch.randn(3, 3))


def test_a_frozen_parameter_is_no_obstacle():
    layer = Longer(3, 3)
    layer.scale.requires_grad_(False)
    check_layer_rule(layer, torch.randn(4, 3))


def replaced(layer):
    layer.forward = lambda x: 3 * F.linear(x, layer.weight)
    return layer


def with_hook(layer):
    return add_hook_to_module(layer, ModelHook())


@pytest.mark.parametrize("change", [replaced, with_hook])
def test_a_forward_that_was_put_on_one_layer(change):
    """What it computes is not known; another layer of that class keeps its rule."""
    layer = change(nn.Linear(3, 3))
    assert rule_of(layer) is None
    assert rule_of(nn.Linear(3, 3)) is not None


def test_a_method_that_was_put_on_one_layer():
    layer = nn.Conv1d(3, 3, 2)
    layer._conv_forward = lambda x, weight, bias: F.conv1d(x, 2 * weight, bias)
    assert rule_of(layer) is None


def test_the_own_forward_put_on_a_layer_is_its_own():
    layer = nn.Linear(3, 3)
    layer.forward = types.MethodType(nn.Linear.forward, layer)
    check_layer_rule(layer, torch.randn(4, 3))
    layer.forward = types.MethodType(nn.Linear.forward, nn.Linear(3, 3))  # another layer's weight
    assert rule_of(layer) is None


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def _run(self, x):
        return self.weight * x

    forward = functools.partialmethod(_run)


class Under(Decorated):
    def _run(self, x):
        return 2 * self.weight * x


class Looking(nn.Module):
    """Looks things up by their names."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return getattr(self, "apply_to")(x)  # noqa: B009

    def apply_to(self, x):
        return self.weight * x


class Underneath(Looking):
    def apply_to(self, x):
        return 2 * self.weight * x


class Beside(Looking):
    pass


def test_rules_of_users():
    def gradients(layer, inputs, gradient):
        return {"weight": (inputs[0] * gradient).flatten(1, -2).sum(1)}

    register_layer(Decorated, gradients)
    register_layer(Looking, gradients)
    x = torch.randn(4, 5, 3)
    check_layer_rule(Decorated(), x)
    assert rule_of(Under()) is None  # of a partial, what it calls cannot be told
    check_layer_rule(Beside(), x)
    assert rule_of(Underneath()) is None


@pytest.mark.sample(every=7)
@pytest.mark.parametrize(
    ("lazy", "shape", "kind"),
    [
        (lambda: nn.LazyLinear(3), (5,), nn.Linear),
        (lambda: nn.LazyConv2d(3, 2), (2, 4, 4), nn.Conv2d),
        (lambda: nn.LazyConvTranspose1d(3, 2), (2, 4), nn.ConvTranspose1d),
        (lambda: nn.LazyInstanceNorm1d(track_running_stats=False), (2, 4), nn.InstanceNorm1d),
    ],
)
def test_lazy_layers_that_were_run(lazy, shape, kind):
    layer = lazy()
    x = torch.randn(4, *shape)
    layer(x)
    assert type(layer) is kind
    check_layer_rule(layer, x)


def test_a_rule_of_ours_is_replaced_on_request_only():
    def gradients(layer, inputs, gradient):
        return {"weight": torch.einsum("bo,bi->boi", gradient, inputs[0])}

    ours = RULES[nn.Linear]
    with pytest.raises(ValueError, match=r"kind=Linear: dptrain has a rule .* replace=True"):
        register_layer(nn.Linear, gradients)
    assert RULES[nn.Linear] is ours
    register_layer(nn.Linear, gradients, replace=True)
    check_layer_rule(nn.Linear(3, 2, bias=False), torch.randn(4, 3))
    assert rule_of(nn.Linear(3, 2)) is not ours
    register_layer(Square, gradients)  # of a subclass without further ado
