"""Half precision inside the model or of its parameters: norms and sums in float32, and bounded."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.helpers.bookkeeping_runs import ROWS, case, dense, run_of, take
from tests.helpers.clipping_oracle import STABILITY, reference, row_losses
from tests.helpers.engine import flat, images, make, separated, small_net

STEPS = 6

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


def contributions(clipper, bound, scale=1.0):
    """What each example adds to the clipped sum, shape (rows, numbers), by weights of 0 and 1.

    The loss was multiplied by ``scale``.
    """
    before = clipper._held
    found = []
    for i in range(ROWS):
        # A sum may be formed in place of what it is made of.
        clipper._held = {key: copy.copy(held) for key, held in before.items()}
        for held in clipper._held.values():
            held.uses = [copy.deepcopy(use) for use in held.uses]
        only = torch.zeros(ROWS)
        only[i] = 1.0
        sums = clipper.clipped_sum(max_grad_norm=bound, weights=only, scales=None, loss_scale=scale)
        assert {s.dtype for s in sums} == {torch.float32}
        found.append(torch.cat([s.flatten() for s in sums]))
    clipper._held = before
    return torch.stack(found)


def as_reported(clipper, scale=1.0):
    """The gradients that the uses are forms of, in float64, shape (rows, numbers)."""
    columns = []
    for p in clipper.parameters:
        parts = [use.per_example(0, use.rows).double() for use in clipper._held[id(p)].uses]
        columns.append(sum(parts).flatten(1))
    return torch.cat(columns, dim=1) * (ROWS / scale)  # the loss was a mean


def check_bounded(clipper, bound, scale=1.0):
    """No example adds more than R, and each its own gradient clipped as its norm says."""
    found, gradients = contributions(clipper, bound, scale).double(), as_reported(clipper, scale)
    norms = gradients.norm(dim=1)
    assert bool((clipper.norms.double() >= norms * (1 - 1e-6)).all())  # what charges are padded by
    assert bool((norms > bound).any())
    assert bool((found.norm(dim=1) <= bound * (1 + 1e-6)).all())  # of float32 norms and factors
    expected = gradients * (bound / (norms + STABILITY)).clamp(max=1.0)[:, None]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * bound)


HALF = {"bfloat16": (torch.bfloat16, 1.0), "float16, scaled": (torch.float16, 2.0**10)}
half = pytest.mark.parametrize(("dtype", "scale"), HALF.values(), ids=HALF)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("inside", [False, True], ids=["forward only", "backward too"])
@half
def test_autocast(model, inside, dtype, scale):
    """The contributions are bounded exactly as they are formed, and near those of float32."""
    a = MODELS[model]()
    a = case(a.module, *a.inputs, dtype=torch.float32)
    wanted = reference(a.module, a.inputs, a.targets)
    bound = float(wanted.norms.median())
    private = run_of(a)
    inputs, targets = take(private)
    with torch.autocast("cpu", dtype=dtype):
        output = private.module(*inputs)
        losses = (output.float().flatten(1) - targets[:, None]).square().mean(1) * scale
        if inside:
            losses.mean().backward()
    if not inside:
        losses.mean().backward()
    layer = next(m for m in a.module.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    with torch.autocast("cpu", dtype=dtype):
        sample = next(iter(layer.parameters())).new_zeros(1, *layer.weight.shape[1:])
        assert layer(sample).dtype == dtype  # or nothing was cast
    clipper = private.optimizer.clipper
    check_bounded(clipper, bound, scale)
    off = (as_reported(clipper, scale) - torch.cat(wanted.parts, dim=1)).norm(dim=1)
    assert bool((off <= 0.05 * wanted.norms).all()), off / wanted.norms
    assert bool((off > 1e-5 * wanted.norms).any())  # or nothing was rounded


@pytest.mark.parametrize("model", MODELS)
@half
def test_parameters_in_half_precision(model, dtype, scale):
    a = MODELS[model]()
    plain = case(copy.deepcopy(a.module), *a.inputs, dtype=torch.float32)
    rounded = case(a.module, *a.inputs, dtype=dtype)
    plain.module.load_state_dict(rounded.module.state_dict())  # the rounded parameters
    rounded.targets = plain.targets.to(dtype)
    wanted = reference(plain.module, plain.inputs, rounded.targets.float())
    private = run_of(rounded)
    inputs, targets = take(private)
    (row_losses(private.module(*inputs), targets).mean() * scale).backward()
    clipper = private.optimizer.clipper
    check_bounded(clipper, float(wanted.norms.median()), scale)
    off = (as_reported(clipper, scale) - torch.cat(wanted.parts, dim=1)).norm(dim=1)
    assert bool((off <= 0.1 * wanted.norms).all()), off / wanted.norms
    private.optimizer.step()
    assert {p.grad.dtype for p in private.optimizer.params} == {dtype}


def trained(dtype=None, scale=1.0, whole=False):
    """A model after six steps with noise: autocast to a dtype, or in it as a whole."""
    torch.manual_seed(0)
    net = small_net()
    data = images()
    if whole:
        net = net.to(dtype)
        data = TensorDataset(data.tensors[0].to(dtype), data.tensors[1])
    private = make(net, data, "bookkeeping", momentum=0.0, **separated(len(data), STEPS))
    enabled = scale != 1.0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**9, enabled=enabled)
    autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype is not None and not whole)
    for x, y in private.loader:
        private.optimizer.zero_grad()
        with autocast:
            output = private.module(x)
        scaler.scale(nn.functional.cross_entropy(output.float(), y)).backward()
        scaler.step(private.optimizer)
        scaler.update()
    assert private.steps_executed == STEPS
    assert private.nonfinite_examples == 0
    return flat(net).double()


@half
@pytest.mark.parametrize("whole", [False, True], ids=["autocast", "parameters"])
def test_training_is_near_that_of_float32(dtype, scale, whole):
    """With the same noise; what is left between them is what the dtype rounds.

    An example, which takes part in 2 of the 6 steps at most, adds to each at most 1 in length, of
    which 5 % are off, and 0.1/4 of the sum is the step. A parameter of the dtype is rounded when
    the model is, and by half a unit in the last place with every step; so is the release, twice.
    """
    plain, found = trained(), trained(dtype, scale, whole)
    assert plain.shape == found.shape
    moved = float((plain - flat(small_net())).norm())
    off = 0.05 * 24 * 2 * 0.1 / 4
    if whole:
        off += torch.finfo(dtype).eps / 2 * ((STEPS + 1) * float(plain.norm()) + 2 * STEPS * moved)
    distance = float((plain - found).norm())
    assert 0 < distance <= off
    assert moved > 3 * off
