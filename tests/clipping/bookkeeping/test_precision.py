"""Half precision inside the model or of its parameters: norms and sums in float32, and bounded."""

import copy

import pytest
import torch
from torch import nn

from tests.helpers.bookkeeping_runs import ROWS, backward, case, dense, run_of, take
from tests.helpers.clipping_oracle import STABILITY, reference

MODELS = {
    "dense": lambda: dense(),
    "tied": lambda: tied(),
    "image": lambda: image(),
}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(6, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 6)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.embed(ids)))).flatten(1)


def tied():
    return case(Tied(), torch.randint(0, 6, (ROWS, 9)))


def image():
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Flatten()
    return case(nn.Sequential(*layers), torch.randn(ROWS, 2, 6, 6))


def contributions(clipper, bound):
    """What each example adds to the clipped sum, shape (rows, numbers), by weights of 0 and 1."""
    uses, norms = clipper._uses, clipper._norms
    found = []
    for i in range(ROWS):
        # A sum may be formed in place of what it is made of.
        own = {p: [copy.deepcopy(use) for use in held] for p, held in uses.items()}
        clipper._uses, clipper._norms = own, dict(norms)
        only = torch.zeros(ROWS)
        only[i] = 1.0
        sums = clipper.clipped_sum(max_grad_norm=bound, weights=only, scales=None)
        assert {s.dtype for s in sums} == {torch.float32}
        found.append(torch.cat([s.flatten() for s in sums]))
    clipper._uses, clipper._norms = uses, norms
    return torch.stack(found)


def as_reported(clipper):
    """The gradients that the uses are forms of, in float64, shape (rows, numbers)."""
    columns = []
    for p in clipper.parameters:
        parts = [use.per_example(0, use.rows).double() for use in clipper._uses[p]]
        columns.append(sum(parts).flatten(1))
    return torch.cat(columns, dim=1) * ROWS  # the loss was a mean


def check_bounded(clipper, bound):
    """No example adds more than R, and each its own gradient clipped as its norm says."""
    found, gradients = contributions(clipper, bound).double(), as_reported(clipper)
    norms = gradients.norm(dim=1)
    assert bool((norms > bound).any())
    assert bool((found.norm(dim=1) <= bound).all())
    expected = gradients * (bound / (norms + STABILITY)).clamp(max=1.0)[:, None]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * bound)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("inside", [False, True], ids=["forward only", "backward too"])
def test_autocast(model, inside):
    """The contributions are bounded exactly as they are formed, and near those of float32."""
    a = MODELS[model]()
    a = case(a.module, *a.inputs, dtype=torch.float32)
    wanted = reference(a.module, a.inputs, a.targets)
    bound = float(wanted.norms.median())
    private = run_of(a)
    inputs, targets = take(private)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = private.module(*inputs)
        losses = (output.float().flatten(1) - targets[:, None]).square().mean(1)
        if inside:
            losses.mean().backward()
    if not inside:
        losses.mean().backward()
    layer = next(m for m in a.module.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sample = next(iter(layer.parameters())).new_zeros(1, *layer.weight.shape[1:])
        assert layer(sample).dtype == torch.bfloat16  # or nothing was cast
    clipper = private.optimizer.clipper
    check_bounded(clipper, bound)
    off = (as_reported(clipper) - torch.cat(wanted.parts, dim=1)).norm(dim=1)
    assert bool((off <= 0.05 * wanted.norms).all()), off / wanted.norms
    assert bool((off > 1e-5 * wanted.norms).any())  # or nothing was rounded


@pytest.mark.parametrize("model", MODELS)
def test_parameters_in_bfloat16(model):
    a = MODELS[model]()
    plain = case(copy.deepcopy(a.module), *a.inputs, dtype=torch.float32)
    half = case(a.module, *a.inputs, dtype=torch.bfloat16)
    plain.module.load_state_dict(half.module.state_dict())  # the rounded parameters
    half.targets = plain.targets.bfloat16()
    wanted = reference(plain.module, plain.inputs, half.targets.float())
    private = run_of(half)
    backward(private)
    clipper = private.optimizer.clipper
    check_bounded(clipper, float(wanted.norms.median()))
    off = (as_reported(clipper) - torch.cat(wanted.parts, dim=1)).norm(dim=1)
    assert bool((off <= 0.1 * wanted.norms).all()), off / wanted.norms
    private.optimizer.step()
    assert {p.grad.dtype for p in private.optimizer.params} == {torch.bfloat16}
