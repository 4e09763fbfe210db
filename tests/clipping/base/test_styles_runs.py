"""Clipping styles in a run: releases and charges against one example at a time, and checkpoints."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from dptrain import Automatic, Flat, Gradients, PerGroup, PerLayer, PrivacyEngine
from dptrain.individual import GDPFilter
from tests.helpers.engine import everything_every_step, images, make, released, small_net, train
from tests.helpers.individual_runs import filtered, gradients, precise

STABILITY = 1e-6  # what Opacus, and dptrain with it, adds to a norm that it divides by
BOUND, SIZE = 4.8, 12  # half of the gradients are longer
HALVES = PerGroup({"body": ("[01].*",), "head": ("5.*",)}, {"body": 3, "head": 4})
WHOLE = [Flat(), Automatic(), Automatic(gamma=0.7)]
STYLES = [*WHOLE, PerLayer(), HALVES]
# Lengths of the net's gradient by layer: convolution, GroupNorm, Linear; weight and bias.
LAYERS = [4 * 9 + 4, 4 + 4, 3 * 64 + 3]


def clipped(style, gradient, bound=BOUND):
    """One example's contribution, from the formulas; its squared norm is what a filter charges."""
    if isinstance(style, Automatic):
        return gradient * (bound / (float(gradient.norm()) + style.gamma))
    sizes, bounds = [len(gradient)], [bound]
    if style == PerLayer():
        sizes, bounds = LAYERS, [bound / math.sqrt(3)] * 3
    elif style == HALVES:
        sizes, bounds = [LAYERS[0] + LAYERS[1], LAYERS[2]], [bound * 0.6, bound * 0.8]
    parts = gradient.split(sizes)
    factors = [
        min(1.0, r / (float(part.norm()) + STABILITY))
        for part, r in zip(parts, bounds, strict=True)
    ]
    return torch.cat([part * factor for part, factor in zip(parts, factors, strict=True)])


def noiseless(model, data, mode, style, steps=1, **options):
    return make(
        model,
        data,
        mode,
        scheme=everything_every_step(len(data), steps),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        clipping=style,
        **options,
    )


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("reduction", "micro"), [("mean", 5), ("sum", None)])
def test_the_release_is_the_sum_of_examples_clipped_in_the_style(mode, micro, reduction):
    for style in STYLES:
        model, data = precise(SIZE)
        own = gradients(model, data)
        private = noiseless(
            model, data, mode, style, max_physical_batch_size=micro, loss_reduction=reduction
        )
        train(private)
        expected = torch.stack([clipped(style, g) for g in own]).sum(0)
        found = released(private, SIZE if reduction == "mean" else 1)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
        last = own if micro is None else own[8:]  # three parts of four
        norms = torch.stack([g.norm() for g in last])
        torch.testing.assert_close(private.last_norms, norms, rtol=1e-9, atol=1e-10)
        assert not private.last_norms.requires_grad


def test_styles_clip_differently():
    """Or the test above would say little."""
    own = gradients(*precise(SIZE))
    sums = [torch.stack([clipped(style, g) for g in own]).sum(0) for style in STYLES]
    for i, a in enumerate(sums):
        for b in sums[:i]:
            assert float((a - b).norm()) > 0.02


@pytest.mark.sample(every=2)
def test_a_broken_example_is_left_out_of_every_group(mode):
    for style in STYLES:
        model, data = precise(SIZE)
        data.tensors[0][3, 0, 1, 1] = float("nan")
        own = gradients(model, data)
        private = noiseless(model, data, mode, style)
        train(private)
        expected = torch.stack([clipped(style, g) for i, g in enumerate(own) if i != 3]).sum(0)
        torch.testing.assert_close(released(private, SIZE), expected, rtol=1e-9, atol=1e-10)
        assert private.nonfinite_examples == 1
        assert torch.isfinite(private.last_norms).sum() == SIZE - 1


def test_groups_follow_the_optimizers_order_of_parameters():
    model, data = precise(SIZE)
    own = gradients(model, data)
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(list(model.parameters())[::-1], lr=0.1),
        data=data,
        scheme=everything_every_step(SIZE, 1),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        seed=1,
        gradients=Gradients(clipping=HALVES, mode="hooks"),
    )
    train(private)
    found = torch.cat([p.grad.flatten() for p in model.parameters()]) * SIZE
    expected = torch.stack([clipped(HALVES, g) for g in own]).sum(0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.sample(every=4)
def test_a_filter_charges_what_is_left_after_clipping(mode):
    """Every example's Σ μ² against its contributions, step by step, until it is left out."""
    sigma = 1.5
    individual = GDPFilter(target_epsilon=3.0, target_delta=1e-3, max_steps=50)
    for style in STYLES:
        model, data = precise(SIZE)
        private = filtered(
            model,
            data,
            individual,
            mode,
            steps=5,
            sigma=sigma,
            max_grad_norm=BOUND,
            max_physical_batch_size=7 if style == HALVES else None,
            clipping=style,
        )
        squares, left_out = np.zeros(SIZE), 0
        wrapped, optimizer, loader = private
        criterion = nn.CrossEntropyLoss()
        for x, y in loader:
            if loader.current.part == 0:
                own = [clipped(style, g) for g in gradients(model, data)]
            optimizer.zero_grad()
            criterion(wrapped(x), y).backward()
            optimizer.step()
            if not optimizer.at_step_boundary:
                continue
            costs = np.array([(float(g.norm()) / (sigma * BOUND)) ** 2 for g in own])
            fits = squares + costs <= individual.budget**2
            margin = np.abs((squares + costs) / individual.budget**2 - 1).min()
            assert margin > 1e-4  # else rounding decides, and the test says nothing
            squares += np.where(fits, costs, 0.0)
            left_out += int((~fits).sum())
            charged = private.individual.spent**2
            np.testing.assert_allclose(charged, squares, rtol=2e-5)
            assert (charged >= squares * (1 - 1e-12)).all()
        assert left_out > SIZE // 2


def test_what_is_no_style_is_refused(mode):
    for wrong in (None, "flat", Automatic):
        with pytest.raises(TypeError, match=r"clipping=.*must be a .*ClippingStyle, not .*Flat"):
            noiseless(small_net(), images(), mode, wrong)


def test_a_pattern_for_frozen_parameters_is_refused():
    model = small_net()
    for p in model[0].parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match=r"\['0\.\*'\] of group 'body' match no trainable"):
        noiseless(model, images(), "hooks", PerGroup({"body": ("0.*", "1.*"), "head": ("5.*",)}))


def test_a_style_of_ones_own_must_number_all_groups():
    class _Sparse(Flat):
        def groups(self, names):
            return [2] * len(names)

    with pytest.raises(ValueError, match="use all numbers from 0"):
        noiseless(small_net(), images(), "hooks", _Sparse())


def test_another_style_is_refused_on_resume():
    first = noiseless(small_net(), images(), "hooks", HALVES, steps=3)
    train(first, steps=1)
    state = first.state_dict()
    same = noiseless(small_net(), images(), "hooks", PerGroup(**as_arguments(HALVES)), steps=3)
    same.load_state_dict(state)
    assert same.steps_executed == 1
    equal = PerGroup({"body": ("[01].*",), "head": ("5.*",)})  # without the shares
    for other in (Flat(), PerLayer(), Automatic(), equal):
        private = noiseless(small_net(), images(), "hooks", other, steps=3)
        with pytest.raises(ValueError, match=f"clipping=.*{type(other).__name__}"):
            private.load_state_dict(state)
        assert private.steps_executed == 0


def as_arguments(style):
    return {name: value for name, value in style.to_dict().items() if name != "type"}
