"""A device's ways on a processor: what is released, against one autograd call per example."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import AttributionGraph, Gradients, PerLayer, PerUser, Poisson
from dptrain.clipping.base.linear_norms import outer_norms
from dptrain.core import as_on_a_device, devices
from tests.clipping.base.test_linear_norms import SHAPES, vectors
from tests.helpers.engine import (
    everything_every_step,
    images,
    make,
    reference_sum,
    released,
    small_net,
    train,
)


@pytest.fixture(autouse=True)
def ways():
    with as_on_a_device():
        yield


@contextlib.contextmanager
def as_on_a_processor():
    devices._forced = False
    try:
        yield
    finally:
        devices._forced = True


class Words(nn.Module):
    """Ids that repeat within a row, positions, biases and a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.over_positions, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, ids):
        h = torch.tanh(self.over_positions(self.norm(self.table(ids)))) * self.scale
        return self.last(h.mean(1))


def words(size=24):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 7, (size, 5), generator=generator)
    return TensorDataset(ids, torch.randint(0, 3, (size,), generator=generator))


def grouped():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 6, 2, groups=2, dilation=1, bias=False),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


CASES = {
    "convolution": (small_net, images),
    "groups of channels": (grouped, images),
    "words": (lambda: torch.manual_seed(1) and Words(), words),
}


def run(module, data, steps=1, **options):
    scheme = everything_every_step(len(data), steps)
    options = {"scheme": scheme, "noise_multiplier": 0.0, "max_grad_norm": 0.5, **options}
    private = make(module, data, "bookkeeping", lr=0.0, **options)
    train(private)
    return private


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("micro", [None, 7])
@pytest.mark.parametrize("case", CASES)
def test_the_clipped_sum_is_released(case, micro, reduction):
    build, load = CASES[case]
    module, data = build(), load()
    expected = reference_sum(copy.deepcopy(module), data, range(len(data)), 0.5)
    private = run(module, data, max_physical_batch_size=micro, loss_reduction=reduction)
    found = released(private, len(data) if reduction == "mean" else 1.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("broken", [[2, 9], [4, 5, 6, 7], range(12)])
def test_a_broken_example_counts_nothing_and_hurts_nobody(broken, micro, bad):
    """Some of a microbatch, all of one, or all of all."""
    data, module = images(12), small_net()
    x, y = (t.clone() for t in data.tensors)
    x[list(broken), 0, 1, 1] = bad
    whole = [i for i in range(12) if i not in broken]
    expected = reference_sum(copy.deepcopy(module), data, whole, 0.5)
    private = run(module, TensorDataset(x, y), steps=2, max_physical_batch_size=micro)
    torch.testing.assert_close(released(private, 12), expected, rtol=1e-4, atol=2e-6)
    assert private.nonfinite_examples == 2 * len(broken)


def test_broken_examples_are_counted_over_many_steps():
    x, y = images(6).tensors
    x = x.clone()
    x[3] = float("nan")
    assert run(small_net(), TensorDataset(x, y), steps=130).nonfinite_examples == 130


@pytest.mark.parametrize("broken", [[], [2], range(5, 10)])
@pytest.mark.parametrize("case", CASES)
def test_styles_and_records_come_to_what_a_processor_has(case, broken):
    """Layers that are clipped alone; records of 5, 5 and 2 rows, of which one may be broken."""
    build, load = CASES[case]
    data = load(12)
    if case == "words":
        broken = []
    else:
        x, y = (t.clone() for t in data.tensors)
        x[list(broken), 0, 1, 1] = float("nan")
        data = TensorDataset(x, y)
    graph = AttributionGraph.from_lists([[k // 5] for k in range(12)])
    users = Poisson(probability=1.0, dataset_size=3, steps=1)
    for options in (
        {"gradients": Gradients(clipping=PerLayer())},
        {"scheme": PerUser(graph=graph, users=users, group_size=5)},
    ):
        found = []
        for way in (as_on_a_processor, as_on_a_device):
            with way():
                private = run(build(), data, **options)
                found.append((released(private, 1.0), private.nonfinite_examples))
        torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-7)
        records = len({k // 5 for k in broken}) if "scheme" in options else len(broken)
        assert found[1][1] == found[0][1] == records


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["random", "cancelling", "unequal", "positive"])
def test_no_norm_is_too_small(kind, shape):
    """Of positions that cancel it may be too large: no row is computed again there."""
    a, b = vectors(kind, *shape)
    exact = torch.einsum("ntk,ntj->nkj", b.double(), a.double()).flatten(1).norm(dim=1)
    found = outer_norms(b, a)
    assert (found >= exact).all()
    if kind != "cancelling":
        lengths = (a.double().norm(dim=2) * b.double().norm(dim=2)).sum(1)
        assert (found <= (1.02 * exact**2 + 1.5e-6 * lengths**2).sqrt() * (1 + 1e-6)).all()


def test_the_ledger_has_every_step_and_refuses_a_different_one():
    """Entered after the update: what a repeated step makes is compared before it."""
    private = make(
        small_net(), images(), "bookkeeping", scheme=everything_every_step(24, 3), lr=0.1
    )
    train(private, steps=1)
    state, weights = private.state_dict(), copy.deepcopy(private.module.state_dict())
    train(private, steps=2)
    assert len(private.optimizer.ledger.digests) == 2
    after = copy.deepcopy(private.module.state_dict())

    def back():
        private.load_state_dict(state)
        private.module.load_state_dict(weights)

    back()
    train(private, steps=2)
    again = private.module.state_dict()
    assert all(torch.equal(again[name], value) for name, value in after.items())
    back()
    with torch.no_grad():
        private.module[0].weight.add_(0.01)
    before = copy.deepcopy(private.module.state_dict())
    with pytest.raises(RuntimeError, match="was released before and now has a different result"):
        train(private, steps=2)
    now = private.module.state_dict()
    assert all(torch.equal(now[name], value) for name, value in before.items())


@pytest.mark.parametrize("micro", [None, 6])
def test_what_a_forward_pass_leaves_is_refused_after_the_update(micro):
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small_net()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            with torch.no_grad():  # past the version counter
                self.mean.data.add_(x.mean())
            return self.net(x)

    private = make(
        Leaves(),
        images(),
        "bookkeeping",
        scheme=everything_every_step(24, 3),
        max_physical_batch_size=micro,
        probe="off",
    )
    with pytest.raises(RuntimeError, match=r"'mean' .*was released before its device told"):
        train(private)
    assert private.steps_executed == 0
    with pytest.raises(RuntimeError):
        private.state_dict()
    with pytest.raises(RuntimeError):
        train(private)


def test_padding_counts_nothing():
    scheme = Poisson(probability=0.3, dataset_size=24, steps=4)
    data = images()
    private = make(
        small_net(), data, "bookkeeping", scheme=scheme, noise_multiplier=0.0, lr=0.0, seed=9
    )
    model, optimizer, loader = private
    for x, y in loader:
        batch = loader.current
        expected = reference_sum(small_net(), data, batch.indices.tolist(), 1.0)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        torch.testing.assert_close(released(private, 24 * 0.3), expected, rtol=1e-4, atol=2e-6)
        optimizer.zero_grad()


def test_both_ways_are_taken():
    """The comparison above is of two things."""
    x = torch.zeros(1)
    assert not devices.on_processor(x)
    with as_on_a_processor():
        assert devices.on_processor(x)
    assert not devices.on_processor(x)
