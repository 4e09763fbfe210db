"""Scaling before clipping: the bound R holds whatever the scales, and what scales are refused."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain.clipping import PerExampleClipper
from dptrain.engine.scaled_adam import ScaledAdam, ScalesGradients
from tests.engine.test_scaled_adam import (
    INPUTS,
    OUTPUTS,
    SIZE,
    STABILITY,
    WITH_GRADIENTS,
    gradients,
    linear,
    make,
    regression,
    train,
)
from tests.helpers.engine import everything_every_step, flat


@pytest.mark.parametrize("seed", range(20))
def test_an_example_moves_the_scaled_sum_by_at_most_the_bound(seed):
    """Zeroing one example's gradient, whatever the scales: over 12 orders of magnitude here."""
    generator = torch.Generator().manual_seed(seed)
    shapes, rows, bound = [(4, 3), (5,)], 7, 0.8

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    params = [nn.Parameter(torch.zeros(s, dtype=torch.float64)) for s in shapes]
    samples = [draw(rows, *s) for s in shapes]
    scales = [10 ** (2 * draw(*s)).clamp(-6, 6) for s in shapes]
    if seed % 4 == 0:
        scales[1] = None
    sums = []
    for without in (False, True):
        for p, g in zip(params, samples, strict=True):
            p.grad_sample = g.clone()
            if without:
                p.grad_sample[3] = 0
        sums.append(
            PerExampleClipper(params).clipped_sum(
                max_grad_norm=bound, weights=torch.ones(rows), scales=scales
            )
        )
    found = torch.cat([(a - b).flatten() for a, b in zip(*sums, strict=True)])
    assert float(found.norm()) <= bound * (1 + 1e-12)
    parts = [g[3] if s is None else g[3] * s for g, s in zip(samples, scales, strict=True)]
    whole = torch.cat([part.flatten() for part in parts])
    expected = whole * min(1.0, bound / (float(whole.norm()) + STABILITY))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("mode", WITH_GRADIENTS)
def test_neighboring_data_sets_release_sums_within_the_bound(mode):
    """From the same past, with the same noise; an x of zeros has gradient zero without a bias."""

    def start(data, past=None):
        torch.manual_seed(0)
        model = nn.Linear(INPUTS, OUTPUTS, bias=False).double()
        optimizer = ScaledAdam(model.parameters(), lr=0.05, betas=(0.9, 0.5), eps_scale=0.05)
        if past is not None:
            model.load_state_dict(past[0])
            optimizer.load_state_dict(copy.deepcopy(past[1]))
        scheme = everything_every_step(SIZE, 5)
        return make(model, data, mode=mode, optimizer=optimizer, scheme=scheme, max_grad_norm=bound)

    data, bound, moves = regression(), 40.0, []
    before = start(data)
    train(before, batches=4)
    past = before.state_dict()["module"], before.optimizer.state_dict()
    (scale,) = before.optimizer.original_optimizer.scales().values()
    assert float(scale.max() / scale.min()) > 5
    for i in range(SIZE):
        grads = []
        for factor in (1.0, 1e3, 0.0):
            x, y = (t.clone() for t in data.tensors)
            x[i] *= factor
            private = start(TensorDataset(x, y), past)
            train(private, batches=1)
            grads.append(private.optimizer.params[0].grad * SIZE)
        moves += [float(((grad - grads[2]) * scale).norm()) for grad in grads[:2]]
    assert max(moves) <= bound * (1 + 1e-12)
    assert max(moves) > 0.999 * bound  # or the bound would not be tested


def test_scales_stay_as_they_were_at_the_first_microbatch():
    ends = []
    for meddle in (False, True):
        private = make(linear(), regression(), max_physical_batch_size=5)
        train(private, batches=8)  # two steps of four parts each

        def disturb(private=private, meddle=meddle):
            inner = private.optimizer.original_optimizer
            if meddle and private.loader.current.part == 1:
                for group in inner.param_groups:
                    group["eps_scale"] = 7.0
                for state in inner.state.values():
                    state["exp_avg_sq"].fill_(3.0)

        train(private, batches=4, after=disturb)
        assert private.steps_executed == 3
        ends.append(torch.cat([p.grad.flatten() for p in private.optimizer.params]))
    assert torch.equal(ends[0], ends[1])


class ScaledSGD(torch.optim.SGD):
    """Scales some of its parameters by what it was told."""

    def __init__(self, params, answer):
        super().__init__(params, lr=0.0)
        self.answer = answer

    def scales(self):
        return self.answer


def test_any_optimizer_may_scale_some_parameters():
    data, model = regression(), linear()
    factor = torch.tensor([[1e-2, 5.0, 0.3], [2.0, 1e2, 0.1]], dtype=torch.float64)
    optimizer = ScaledSGD(model.parameters(), {model.weight: factor})
    assert isinstance(optimizer, ScalesGradients)
    theta = flat(model).numpy()
    private = make(
        model,
        data,
        optimizer=optimizer,
        noise_multiplier=0.0,
        scheme=everything_every_step(SIZE, 1),
    )
    train(private)
    s = np.concatenate([factor.numpy().ravel(), np.ones(OUTPUTS)])
    rows = gradients(theta, *(t.numpy() for t in data.tensors)) * s
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    expected = (rows * np.minimum(1, 0.9 / (norms + STABILITY))).mean(0) / s
    found = torch.cat([p.grad.flatten() for p in private.optimizer.params])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("entry", [0.0, -1.0, math.nan, math.inf])
def test_scales_that_cannot_be_divided_by_are_refused(entry):
    model = linear()
    factor = torch.ones(OUTPUTS, INPUTS)
    factor[1, 2] = entry
    private = make(
        model, regression(), optimizer=ScaledSGD(model.parameters(), {model.weight: factor})
    )
    with pytest.raises(ValueError, match="zero, negative or not finite"):
        train(private)
    assert private.steps_executed == 0
    private.optimizer.original_optimizer.answer = {model.weight: torch.ones(INPUTS)}
    with pytest.raises(ValueError, match="shape"):
        train(private)


def test_overflown_second_moments_are_refused():
    private = make(linear(), regression())
    train(private, batches=1)
    for state in private.optimizer.original_optimizer.state.values():
        state["exp_avg_sq"].fill_(math.inf)
    with pytest.raises(ValueError, match=r"ScaledAdam\.scales"):
        train(private)
