"""Modules and inputs of kinds that PyTorch has and a private run does not train, or does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dptrain import Gradients
from tests.helpers.bookkeeping_runs import ROWS, case, check_like_loop
from tests.helpers.engine import everything_every_step, make

WIDTH = 8
DATA = TensorDataset(torch.eye(ROWS, WIDTH), torch.arange(ROWS) % 2)
ONE = everything_every_step(ROWS, 1)


def step(private):
    for x, y in private.loader:
        private.optimizer.zero_grad()
        F.cross_entropy(private.module(x), y).backward()
        private.optimizer.step()


SCRIPTED = {
    "a scripted layer": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(WIDTH, 4)), nn.Linear(4, 2)),
        r"'0' is a TorchScript module \(of Linear\)",
    ),
    "a traced model": (
        lambda: torch.jit.trace(nn.Linear(WIDTH, 2), torch.zeros(1, WIDTH)),
        r"'\(the module itself\)' is a TorchScript module \(of Linear\)",
    ),
    "a scripted model": (
        lambda: torch.jit.script(nn.Sequential(nn.Linear(WIDTH, 2))),
        r"'\(the module itself\)' is a TorchScript module \(of Sequential\)",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", SCRIPTED)
def test_torchscript_is_not_trained(mode, name):
    build, match = SCRIPTED[name]
    with pytest.raises(ValueError, match=f"{match}.*script copy.deepcopy"):
        make(build(), DATA, mode, scheme=ONE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_frozen_torchscript_is_a_fixed_map(mode):
    torch.manual_seed(0)
    frozen = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)).eval().requires_grad_(False)
    head = nn.Linear(4, 2)
    x, y = DATA.tensors
    wanted = 0
    for row, label in zip(x, y, strict=True):
        loss = F.cross_entropy(head(frozen(row[None])), label[None])
        gradient = torch.autograd.grad(loss, list(head.parameters()))
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        wanted = wanted + gradient[0] * min(1.0, 0.3 / float(norm))
    net = nn.Sequential(torch.jit.script(frozen), head)
    private = make(net, DATA, mode, scheme=ONE, noise_multiplier=0.0, max_grad_norm=0.3)
    step(private)
    torch.testing.assert_close(head.weight.grad * ROWS, wanted, rtol=1e-4, atol=1e-5)


def test_complex_parameters_are_named(mode):
    net = nn.Sequential(nn.Linear(WIDTH, 2, dtype=torch.cfloat))
    with pytest.raises(ValueError, match=r"'0.weight' is complex \(torch.complex64\).*two real"):
        make(net, DATA, mode, scheme=ONE)


class Joined(nn.Module):
    """The remedy: two real parameters, of which forward() makes a complex one."""

    def __init__(self):
        super().__init__()
        self.real, self.imaginary = (nn.Parameter(torch.randn(2, WIDTH)) for _ in range(2))

    def forward(self, x):
        return (torch.fft.fft(x) @ torch.complex(self.real, self.imaginary).T).abs()


class Filter(nn.Module):
    """Frequencies by frequencies, as in a Fourier neural operator."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.weight), n=WIDTH)


@pytest.mark.parametrize("kind", [Joined, Filter])
def test_real_parameters_of_complex_numbers_train(kind):
    torch.manual_seed(0)
    check_like_loop(case(nn.Sequential(nn.Linear(WIDTH, WIDTH), kind()), torch.randn(ROWS, WIDTH)))


def collate(layout):
    def collated(items):
        x = torch.stack([x for x, _ in items])
        y = torch.stack([y for _, y in items])
        if layout == "jagged":
            return torch.nested.nested_tensor([row[None] for row in x], layout=torch.jagged), y
        return (x.to_sparse() if layout == "coo" else x.to_sparse_csr()), y

    return collated


@pytest.mark.filterwarnings("ignore:.*beta|.*prototype")
@pytest.mark.parametrize("probe", ["shapes", "off"])
@pytest.mark.parametrize(
    ("layout", "match"),
    [
        ("coo", r"torch.sparse_coo\).*x.to_dense\(\)"),
        ("csr", r"torch.sparse_csr\).*x.to_dense\(\)"),
        ("jagged", r"a nested tensor.*to_padded_tensor"),
    ],
)
def test_inputs_without_rows_are_named(mode, layout, match, probe):
    data = DataLoader(DATA, batch_size=ROWS, collate_fn=collate(layout))
    net = nn.Sequential(nn.Linear(WIDTH, 2))
    private = make(net, data, mode, scheme=ONE, gradients=Gradients(probe=probe))
    with pytest.raises(RuntimeError, match=match):
        step(private)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch before 2.13")
def test_a_loss_with_weights_of_its_own():
    """As a layer of the module, which returns a loss for every example."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(WIDTH, 5)
            self.loss = nn.LinearCrossEntropyLoss(5, 3, reduction="none")

        def forward(self, x, y):
            return self.loss(self.body(x).tanh(), y)[:, None]

    torch.manual_seed(0)
    check_like_loop(case(Model(), torch.randn(ROWS, WIDTH), torch.arange(ROWS) % 3))
