"""Norms with fixed statistics, and norms without a bias, against one example at a time."""

import copy
import functools
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import dptrain
from dptrain.clipping.bookkeeping import cache
from tests.helpers.bookkeeping_runs import ROWS, case, check_like_loop
from tests.helpers.engine import everything_every_step, make, released

WIDTH = 4
FLAT, SEQUENCES, IMAGES, VOLUMES = (WIDTH,), (WIDTH, 5), (WIDTH, 5, 3), (WIDTH, 2, 3, 2)


def tracking(kind):
    return functools.partial(kind, affine=True, track_running_stats=True)


STATISTICS = {
    "BatchNorm1d": (nn.BatchNorm1d, SEQUENCES),
    "BatchNorm1d of rows": (nn.BatchNorm1d, FLAT),
    "BatchNorm2d": (nn.BatchNorm2d, IMAGES),
    "BatchNorm3d": (nn.BatchNorm3d, VOLUMES),
    "SyncBatchNorm": (nn.SyncBatchNorm, IMAGES),
    "InstanceNorm1d": (tracking(nn.InstanceNorm1d), SEQUENCES),
    "InstanceNorm2d": (tracking(nn.InstanceNorm2d), IMAGES),
    "InstanceNorm3d": (tracking(nn.InstanceNorm3d), VOLUMES),
}


def pretrained(norm):
    """With weights, and statistics of some public data."""
    with torch.no_grad():
        norm.running_mean.normal_().mul_(3)
        norm.running_var.uniform_(0.5, 4)
        for p in norm.parameters():
            p.normal_()
    return norm


class Net(nn.Module):
    """A norm behind a convolution of one position, whatever the norm's shape."""

    def __init__(self, norm, shape):
        super().__init__()
        self.first, self.norm, self.shape = nn.Conv1d(WIDTH, WIDTH, 1), norm, shape

    def forward(self, x):
        h = self.first(x.flatten(2) if x.dim() > 2 else x[:, :, None])
        return torch.tanh(self.norm(h.view(len(x), *self.shape)))


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("trained", ["weight and bias", "weight", "bias"])
@pytest.mark.parametrize("name", STATISTICS)
def test_frozen_norms(name, trained):
    torch.manual_seed(0)
    kind, shape = STATISTICS[name]
    norm = pretrained(kind(WIDTH))
    norm.weight.requires_grad_("weight" in trained)
    norm.bias.requires_grad_("bias" in trained)
    net = dptrain.freeze_batchnorm(Net(norm, shape)).train()
    check_like_loop(case(net, torch.randn(ROWS, *shape)))


@pytest.mark.parametrize("name", ["BatchNorm1d of rows", "BatchNorm2d"])
def test_frozen_norms_a_few_examples_at_a_time(name, monkeypatch):
    monkeypatch.setattr(cache, "CACHE", 1)
    test_frozen_norms(name, "weight and bias")


WITHOUT_BIAS = {
    "GroupNorm": (lambda: nn.GroupNorm(2, WIDTH, bias=False), SEQUENCES),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(WIDTH, affine=True, bias=False), SEQUENCES),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(WIDTH, affine=True, bias=False), IMAGES),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(WIDTH, affine=True, bias=False), VOLUMES),
    "a fixed BatchNorm2d": (
        lambda: dptrain.fix(nn.BatchNorm2d(WIDTH, bias=False), report=str),
        IMAGES,
    ),
    "a fixed InstanceNorm2d": (
        lambda: dptrain.fix(tracking(nn.InstanceNorm2d)(WIDTH, bias=False), report=str),
        IMAGES,
    ),
    "a frozen BatchNorm2d": (
        lambda: dptrain.freeze_batchnorm(pretrained(nn.BatchNorm2d(WIDTH, bias=False))),
        IMAGES,
    ),
}


@pytest.mark.skipif(
    "bias" not in inspect.signature(nn.GroupNorm).parameters, reason="torch before 2.13"
)
@pytest.mark.parametrize("name", WITHOUT_BIAS)
def test_norms_without_a_bias(name):
    torch.manual_seed(0)
    build, shape = WITHOUT_BIAS[name]
    norm = build()
    nn.init.normal_(norm.weight)
    assert norm.bias is None
    check_like_loop(case(Net(norm, shape), torch.randn(ROWS, *shape)))


class Activated(nn.BatchNorm2d):
    """As timm has it: a forward of its own, and a layer within."""

    def __init__(self, width):
        super().__init__(width)
        self.act = nn.Dropout(0.5)

    def forward(self, x):
        mean, variance = self.running_mean, self.running_var
        x = F.batch_norm(x, mean, variance, self.weight, self.bias, self.training, 0.1, self.eps)
        return F.silu(x) if not self.training else self.act(x)


def test_a_subclass_with_a_forward_of_its_own():
    torch.manual_seed(0)
    net = dptrain.freeze_batchnorm(Net(pretrained(Activated(WIDTH)), IMAGES))
    check_like_loop(case(net, torch.randn(ROWS, *IMAGES)))
    net.train()
    assert net.norm.act.training
    assert not net.norm.training


class Pretrained(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, WIDTH, 3), pretrained(nn.BatchNorm2d(WIDTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def images():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 1, 5, 5, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.arange(8) % 3)


def by_hand(net, data, bound):
    """The sum of clipped gradients, one example at a time, of batch norm written out."""
    norm, total = net.norm, 0
    trained = [p for p in net.parameters() if p.requires_grad]
    for x, y in data:
        h = net.conv(x[None])
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        h = (h - norm.running_mean[:, None, None]) * scale[:, None, None]
        logits = net.head(torch.relu(h + norm.bias[:, None, None]).mean((2, 3)))
        found = torch.autograd.grad(F.cross_entropy(logits, y[None]), trained)
        gradient = torch.cat([g.flatten() for g in found])
        total = total + gradient * min(1.0, bound / (float(gradient.norm()) + 1e-6))
    return total


@pytest.mark.parametrize("affine", [False, True])
def test_a_run_releases_the_sum_of_clipped_gradients(mode, affine):
    torch.manual_seed(0)
    net = dptrain.freeze_batchnorm(Pretrained().double(), affine=affine)
    if mode != "bookkeeping" and not affine:
        with pytest.raises(ValueError, match=r"'norm' is a BatchNorm2d.*affine=True"):
            make(net, images(), mode, scheme=everything_every_step(8, 1))
        return
    data, before = images(), copy.deepcopy(net.state_dict())
    wanted = by_hand(net, data, 0.5)
    run = {"scheme": everything_every_step(8, 2), "noise_multiplier": 0.0, "max_grad_norm": 0.5}
    private = make(net, data, mode, **run)
    for x, y in private.loader:
        private.module.train()
        private.optimizer.zero_grad()
        F.cross_entropy(private.module(x), y).backward()
        private.optimizer.step()
        break
    torch.testing.assert_close(released(private, 8), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(net.norm.running_mean, before["norm.running_mean"])
    assert torch.equal(net.norm.weight, before["norm.weight"]) == affine
    private.detach()
    assert not net.train().norm.training


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "within a run"])
def test_copies_stay_frozen_and_are_no_run_of_the_first(way):
    net = dptrain.freeze_batchnorm(Pretrained().double())
    private = make(net, images(), None, scheme=everything_every_step(8, 1))
    if way != "within a run":
        private.detach()
    if way == "pickle":
        other = pickle.loads(pickle.dumps(net))
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(net)
    assert other.state_dict().keys() == Pretrained().state_dict().keys()
    net.norm.training = True
    other.train()
    assert not other.norm.training
    assert net.norm.training
    other.norm.training = True
    other.norm.train()
    assert not other.norm.training


def test_the_state_of_one_that_was_not_frozen_is_loaded():
    old = Pretrained().double()
    net = dptrain.freeze_batchnorm(Pretrained().double())
    net.load_state_dict(old.state_dict())
    x = images().tensors[0]
    assert torch.equal(net.train()(x), old.eval()(x))


def test_a_model_frozen_so_is_not_repaired():
    net = dptrain.freeze_batchnorm(Pretrained())
    lines = []
    norm = net.norm
    assert dptrain.fix(net, report=lines.append).norm is norm
    assert lines == ["dptrain.fix: nothing to change"]


def test_what_cannot_be_frozen():
    with pytest.raises(ValueError, match="no batch norm"):
        dptrain.freeze_batchnorm(nn.Linear(2, 2))
    bare = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(ValueError, match=r"layer '0' is a BatchNorm1d without statistics"):
        dptrain.freeze_batchnorm(bare)
    assert bare[0].training
    with pytest.raises(TypeError, match="module=3 must be a torch"):
        dptrain.freeze_batchnorm(3)
    with pytest.raises(TypeError, match="affine=1 must be True or False"):
        dptrain.freeze_batchnorm(Pretrained(), affine=1)
    net = dptrain.freeze_batchnorm(Pretrained().double())
    private = make(net, images(), None, scheme=everything_every_step(8, 1))
    with pytest.raises(ValueError, match=r"call dptrain.freeze_batchnorm\(model\) before"):
        dptrain.freeze_batchnorm(net)
    private.detach()
