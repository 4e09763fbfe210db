"""What people do to models and losses beside a plain forward and backward pass."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from dptrain import Poisson
from tests.helpers.bookkeeping_runs import (
    ROWS,
    backward,
    case,
    check,
    check_like_loop,
    dense,
    run_of,
    take,
)
from tests.helpers.clipping_oracle import flat_factors, reference


class InPlace(nn.Module):
    """Changes outputs of layers in place, views of them included."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.relu(self.first(x))
        h = self.second(h)
        h += 1
        h[:, 0] = x[:, 0]
        h[:, 1:3].mul_(2)
        out = self.last(h)
        out.sigmoid_()
        return out


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_changes_in_place_after_layers(reduction):
    check_like_loop(case(InPlace(), torch.randn(ROWS, 4)), reduction=reduction)


def test_an_input_that_is_changed_after_the_layer_has_seen_it_is_refused():
    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            h = x * 1
            out = self.layer(h)
            h.zero_()
            return out

    private = run_of(case(Changed(), torch.randn(ROWS, 4)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(private)


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_microbatches(most, reduction):
    a = dense()
    wanted = reference(a.module, a.inputs, a.targets)
    bound = float(wanted.norms.median())
    private = run_of(a, most=most, reduction=reduction, bound=bound)
    parts = 0
    for x, y in private.loader:
        private.optimizer.zero_grad()
        losses = (private.module(x.flatten(0, 1)) - y.flatten()[:, None]).square().mean(1)
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
        private.optimizer.step()
        parts += 1
    assert parts == -(-ROWS // most)
    factors = flat_factors(wanted.norms, bound, torch.ones(ROWS))
    scale = ROWS if reduction == "mean" else 1
    expected = wanted.clipped_sums(factors)
    for p, total in zip(private.optimizer.params, expected, strict=True):
        torch.testing.assert_close(p.grad.flatten() * scale, total, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("padding", [0.0, float("nan"), float("inf")])
def test_padding_rows_count_nothing_whatever_is_in_them(padding):
    a = dense()
    a.inputs[0][3:] = padding
    wanted = reference(a.module, a.inputs, a.targets)
    private = run_of(a)
    backward(private)
    weights = torch.tensor([1.0, 0.25, 1.0, 0.0, 0.0])
    check(private, wanted, weights)
    assert private.nonfinite_examples == 0


def test_an_empty_batch_releases_noise_only():
    a = dense()
    private = run_of(
        a, noise_multiplier=1.0, scheme=Poisson(probability=1e-9, dataset_size=ROWS, steps=2)
    )
    for x, y in private.loader:
        losses = (private.module(x.flatten(0, 1)) - y.flatten()[:, None]).square().mean(1)
        losses.mean().backward()
        private.optimizer.step()
    assert private.steps_executed == 2
    assert all(bool((p.grad != 0).all()) for p in private.optimizer.params)


def smooth():
    torch.manual_seed(0)
    return case(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(ROWS, 4))


@pytest.mark.parametrize("linear", [False, True])
def test_gradient_penalties_are_refused(linear):
    """Without the refusal, the penalty's part would be missing without a word."""
    a = case(nn.Linear(4, 2), torch.randn(ROWS, 4)) if linear else smooth()
    private = run_of(a)
    (x,), _ = take(private)
    x.requires_grad_()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*gradient penalty"):
        torch.autograd.grad(private.module(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        private.module(x).sum().backward(create_graph=True)
    assert all(p.grad is None for p in a.module.parameters())


def test_adversarial_examples():
    """FGSM: a gradient by the inputs first, then the training pass on what it moved."""
    a = smooth()
    plain = copy.deepcopy(a.module)

    def moved(module, x, targets):
        x = x.clone().requires_grad_()
        losses = (module(x) - targets[:, None]).square().mean(1)
        (gradient,) = torch.autograd.grad(losses.sum(), x)
        return (x + 0.1 * gradient.sign()).detach()

    private = run_of(a)
    (x,), targets = take(private)
    attacked = moved(private.module, x, targets)
    assert torch.equal(attacked, moved(plain, x, targets))
    assert not private.optimizer.clipper._held
    loss = (private.module(attacked) - targets[:, None]).square().mean(1).mean()
    loss.backward()
    check(private, reference(plain, (moved(plain, *a.inputs, a.targets),), a.targets))


@pytest.mark.parametrize("clears", ["module", "optimizer"])
def test_adversarial_examples_by_a_whole_backward_pass(clears):
    """As FGSM is often written: that pass is dropped by ``zero_grad()``, of either."""
    a = smooth()
    wanted = reference(a.module, a.inputs, a.targets)
    private = run_of(a)
    (x,), targets = take(private)
    moved = x.clone().requires_grad_()
    (private.module(moved) - targets[:, None]).square().sum().backward()
    assert bool(moved.grad.any())
    (private.module if clears == "module" else private.optimizer).zero_grad()
    (private.module(x) - targets[:, None]).square().mean(1).mean().backward()
    check(private, wanted)


def test_a_gradient_by_the_inputs_between_the_passes():
    a = smooth()
    wanted = reference(a.module, a.inputs, a.targets)
    private = run_of(a)
    (x,), targets = take(private)
    x.requires_grad_()
    loss = (private.module(x) - targets[:, None]).square().mean(1).mean()
    (by_inputs,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert bool(by_inputs.any())
    loss.backward()
    torch.testing.assert_close(x.grad, by_inputs)
    check(private, wanted)


@pytest.mark.slow
def test_forward_passes_without_a_backward_pass_leave_no_memory():
    a = dense()
    private = run_of(a)
    (x,), _ = take(private)
    alive = []

    def note(_layer, inputs, output):
        alive.extend([weakref.ref(inputs[0]), weakref.ref(output)])

    for layer in a.module:
        layer.register_forward_hook(note)
    output = private.module(x)
    assert any(ref() is not None and ref() is not x for ref in alive)  # the graph has them
    del output
    gc.collect()
    assert [ref() for ref in alive if ref() is not x] == [None] * (len(alive) - 1)
    assert not private.optimizer.clipper._held


@pytest.mark.slow
def test_reports_are_dropped_with_the_step():
    """Nothing of a batch outlives it: neither inputs nor gradients."""
    a = dense()
    private = run_of(a, probe="off")  # which calls hooks too
    seen = []
    a.module[3].register_forward_hook(lambda _layer, i, _o: seen.append(weakref.ref(i[0])))
    backward(private)
    gc.collect()
    private.optimizer.step()
    gc.collect()
    clipper = private.optimizer.clipper
    assert [ref() for ref in seen] == [None]
    assert not clipper._held


class Unused(nn.Module):
    """One layer is never called, one is called for nothing, one is used on some inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)
        self.never, self.nothing = nn.Linear(2, 2), nn.Linear(3, 2)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        self.nothing(h)
        return self.last(h)


def test_unused_layers():
    private = check_like_loop(case(Unused(), torch.randn(ROWS, 4)))
    private.module.zero_grad()
    backward(private)
    sums = private.optimizer.clipper.clipped_sum(
        max_grad_norm=1.0, weights=torch.ones(ROWS), scales=None
    )
    missing = [s is None for s in sums]
    assert missing == [False] * 4 + [True] * 4


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "1.weight", "3.bias"])
def test_parameters_frozen_after_the_run_was_made_take_no_part(frozen):
    a = dense()
    private = run_of(a)
    a.module.get_parameter(frozen).requires_grad_(False)
    wanted = reference(a.module, a.inputs, a.targets)
    backward(private)
    clipper = private.optimizer.clipper
    bound = float(wanted.norms.median())
    sums = clipper.clipped_sum(max_grad_norm=bound, weights=torch.ones(ROWS), scales=None)
    torch.testing.assert_close(clipper.norms, wanted.norms, rtol=1e-10, atol=0)
    factors = flat_factors(wanted.norms, bound, torch.ones(ROWS))
    expected = dict(zip(trained(a.module), wanted.clipped_sums(factors), strict=True))
    names = [name for name, _ in a.module.named_parameters()]
    for name, total in zip(names, sums, strict=True):
        if name == frozen:
            assert total is None
        else:
            torch.testing.assert_close(total.flatten(), expected[name], rtol=1e-10, atol=1e-12)


def trained(module):
    return [name for name, p in module.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", None])
@pytest.mark.parametrize("inner", [False, True])
def test_data_parallel_is_refused(mode, inner):
    a = dense()
    a.module = nn.DataParallel(a.module)
    if inner:
        a.module = nn.Sequential(a.module)
    with pytest.raises(ValueError, match=r"DataParallel.*pass the (bare )?module"):
        run_of(a, mode=mode)


PARAMETRIZED = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_weights_that_torch_computes_within_the_layer(kind):
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), PARAMETRIZED[kind](nn.Linear(6, 2)))
    a = case(module, torch.randn(ROWS, 4))
    check_like_loop(a)


WEIGHTS = {
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", amount=2),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_weights_that_are_computed_from_others_are_refused_by_the_layers_name(kind):
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), WEIGHTS[kind](nn.Linear(6, 2)))
    a = case(module, torch.randn(ROWS, 4))
    with pytest.raises(ValueError, match=r"layer '2[.'].*Gradients\(mode='hooks'\)"):
        run_of(a)
    assert all("forward" not in vars(m) for m in module.modules())
