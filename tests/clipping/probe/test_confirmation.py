"""Whether bookkeeping's gradients are those of the loss is seen when the run is made."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dptrain import GradientRule, LayerRule, register_layer
from dptrain.clipping.bookkeeping.rules.table import RULES
from tests.helpers.bookkeeping_runs import ROWS, backward, case, run_of, take


@pytest.fixture(autouse=True)
def _own_rules():
    torch.manual_seed(0)  # an error of 1e-4 is near what few rows can tell from rounding
    kept = dict(RULES)
    yield
    RULES.clear()
    RULES.update(kept)


class Scale(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.rand(4))

    def forward(self, x):
        return x * self.weight + self.shift


def right(layer, inputs, gradient):
    x = inputs[0]
    return {"weight": (x * gradient).sum(1), "shift": gradient.sum(1)}


def changed(**change):
    def rule(*call):
        found = right(*call)
        return {name: change.get(name, lambda g: g)(g) for name, g in found.items()}

    return GradientRule(rule)


WRONG = {
    "twice": changed(weight=lambda g: 2 * g),
    "off by 1e-4": changed(weight=lambda g: g * (1 + 1e-4)),
    "another's": changed(weight=lambda g: g.flip(0)),
    "the sum's": changed(weight=lambda g: g.mean(0).expand_as(g)),
    "none": changed(weight=torch.zeros_like),
}


def model(*layers):
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Scale(), *layers, nn.Linear(4, 3))


def refusal(module, **options):
    private = run_of(case(module, torch.randn(ROWS, 5, 4)), **options)
    with pytest.raises(RuntimeError) as found:
        backward(private)
    return str(found.value)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_is_refused_by_the_parameters_name(wrong):
    register_layer(Scale, WRONG[wrong])
    says = refusal(model().float())
    assert "parameter 'weight' of layer '2', a Scale" in says
    assert "check_layer_rule" in says
    assert "requires_grad_(False)" in says
    assert "differ by more than rounding" in says


def test_a_wrong_rule_is_not_looked_for_without_the_probe():
    register_layer(Scale, WRONG["twice"])
    backward(run_of(case(model(), torch.randn(ROWS, 5, 4)), probe="off"))


class Unobserved(LayerRule):
    """Runs the layer without parameters, and reports nothing."""

    def forward(self, layer, forward, inputs, observe):
        return forward(*inputs)

    def uses(self, layer, inputs, gradient):
        raise NotImplementedError


def test_a_parameter_without_any_use_is_refused():
    """Ordinary training would move it; here it would get noise alone."""
    register_layer(Scale, Unobserved())
    says = refusal(model())
    assert "of layer '2', a Scale" in says
    assert "they are missing" in says


class Lossy(nn.Module):
    """A module that returns its loss."""

    def __init__(self):
        super().__init__()
        self.net = model()

    def forward(self, x):
        return self.net(x).square().sum()


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.first, self.net, self.reentrant = nn.Linear(4, 4), model(), reentrant

    def forward(self, x):
        return checkpoint(self.net, self.first(x), use_reentrant=self.reentrant)


MODULES = {
    "plain": model,
    "dropout": lambda: model(nn.Dropout(0.5)),
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
    "compiled": lambda: torch.compile(model(), backend="eager"),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True),
    "convolution": lambda: nn.Sequential(
        nn.Conv1d(5, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(8, 3)
    ),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "autocast"])
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_right_rules_pass_and_wrong_ones_do_not(name, wrong, dtype):
    torch.manual_seed(1)
    module = MODULES[name]()
    register_layer(Scale, WRONG["twice"] if wrong else right)
    kind = torch.float32 if dtype == "autocast" else getattr(torch, dtype)
    a = case(module.to(kind), torch.randn(ROWS, 5, 4), dtype=kind)
    private = run_of(a)
    has_scale = any(isinstance(m, Scale) for m in module.modules())
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        if wrong and has_scale:
            with pytest.raises(RuntimeError, match=r"'weight' of layer '.*', a Scale"):
                backward(private)
        else:
            backward(private)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_module_that_returns_its_loss(wrong):
    register_layer(Scale, WRONG["twice"] if wrong else right)
    private = run_of(case(Lossy(), torch.randn(ROWS, 5, 4)), reduction="sum")
    (x,), _ = take(private)
    if not wrong:
        return private.module(x).backward()
    with pytest.raises(RuntimeError, match=r"'weight' of layer 'net\.2', a Scale"):
        private.module(x).backward()


class Attention(nn.Module):
    """The bias of its keys has gradient zero, so that nothing but rounding errors is left of it."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


def test_rounding_errors_alone_are_no_disagreement():
    torch.manual_seed(2)
    module = nn.Sequential(Attention(), nn.LayerNorm(4), Attention(), nn.Linear(4, 3))
    module[1].requires_grad_(False)
    for scale in (1e-6, 1.0, 1e6):
        a = case(module, scale * torch.randn(ROWS, 5, 4), dtype=torch.float32)
        private = run_of(a)
        backward(private)
        private.detach()


class Inside(nn.Module):
    """Rounds to half precision, or to float32, within its own forward."""

    def __init__(self, how):
        super().__init__()
        self.net, self.how = model(), how

    def forward(self, x):
        if self.how == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x).to(x.dtype)
        return self.net(x).float().sin().to(x.dtype)


@pytest.mark.parametrize(("how", "dtype"), [("autocast", "float32"), ("float32", "float64")])
def test_what_a_module_rounds_inside(how, dtype):
    register_layer(Scale, right)
    a = case(Inside(how), torch.randn(ROWS, 5, 4), dtype=getattr(torch, dtype))
    backward(run_of(a))


def test_a_small_gradient_is_compared_too():
    """Behind a factor of 1e-6, as of layer scale, a wrong rule shows in float32 all the same."""

    class Faint(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.scale, self.last = nn.Linear(4, 4), Scale(), nn.Linear(4, 3)

        def forward(self, x):
            h = self.first(x)
            return self.last(h + 1e-6 * self.scale(h))

    register_layer(Scale, WRONG["twice"])
    private = run_of(case(Faint(), torch.randn(ROWS, 5, 4), dtype=torch.float32))
    with pytest.raises(RuntimeError, match=r"'weight' of layer 'scale', a Scale"):
        backward(private)


def test_nothing_of_it_is_left():
    register_layer(Scale, right)
    module = model(nn.Dropout(0.5))
    a = case(module, torch.randn(ROWS, 5, 4))
    fired = []
    private = run_of(a)
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(fired.append)
    before = {n: p.clone() for n, p in module.named_parameters()}
    pointers = {n: p.data_ptr() for n, p in module.named_parameters()}
    (x,), _ = take(private)
    private.module(x)
    assert not fired
    for n, p in module.named_parameters():
        assert torch.equal(p, before[n])
        assert p.data_ptr() == pointers[n]
        assert p.grad is None


def test_a_normalization_of_one_number_has_rounding_errors_for_its_gradient():
    """All of it cancels; what is left is of a frozen parameter, called twice."""
    module = nn.Sequential(nn.Linear(4, 1), nn.LayerNorm(1), nn.Tanh(), nn.LayerNorm(1))
    module[1].bias.requires_grad_(False)
    for seed in range(5):
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(torch.randn_like(p))
        private = run_of(case(module, torch.randn(ROWS, 5, 4)))
        backward(private)
        private.detach()
