"""Norms of sums of outer products: never below the norm in float64, and not far above it."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, PrivacyEngine
from dptrain.clipping.base.linear_norms import Gram, outer_norms
from tests.helpers.engine import MODES, everything_every_step

SHAPES = [
    (1, 3, 2),
    (2, 16, 8),
    (40, 32, 70),
    (64, 9, 5),
    (129, 9, 5),
    (150, 64, 24),
    (12, 600, 300),
]


def vectors(kind, positions, width_in, width_out):
    generator = torch.Generator().manual_seed(5)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    a, b = randn(6, positions, width_in), randn(6, positions, width_out)
    if kind == "cancelling":  # equal inputs, output gradients that add up to about nothing
        a = a[:, :1] * 3.0 + 1e-4 * a
        b = 50.0 * (b - b.mean(1, keepdim=True)) + 1e-4 * b
    if kind == "unequal":
        a, b = a * (2 * randn(6, positions, 1)).exp(), b * (2 * randn(6, positions, 1)).exp()
    if kind == "positive":
        a, b = a.abs(), b.abs()
    return a, b


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["random", "cancelling", "unequal", "positive"])
def test_norms_are_rounded_up(kind, shape):
    a, b = vectors(kind, *shape)
    found = outer_norms(b, a)
    exact = torch.einsum("ntk,ntj->nkj", b.double(), a.double()).flatten(1).norm(dim=1)
    lengths = (a.double().norm(dim=2) * b.double().norm(dim=2)).sum(1)
    assert (found >= exact).all()
    assert (found <= (exact**2 + 1.5e-6 * lengths**2).sqrt() * (1 + 1e-6)).all()
    # Sides that other sums share too, a few rows at a time.
    shared = Gram(b, most=shape[0] * shape[2] * 5)
    for grams in ((shared, None), (None, Gram(a)), (shared, Gram(a))):
        assert torch.equal(outer_norms(b, a, grams=grams), found)
    if kind == "random":
        torch.testing.assert_close(found.double(), exact, rtol=2e-4, atol=0)


@pytest.mark.parametrize(
    "shape", [(2, 1000, 500), (2, 4096, 2048), (3, 4096, 2048), (64, 1000, 64)]
)
def test_equal_numbers_that_cancel_are_not_lost(shape):
    """Sums of equal products are rounded the same way each time: in float32 by 107 S² u here."""
    positions, width_in, width_out = shape
    values = torch.linspace(0.1, 1.0, 40)[:, None, None]
    signs = 1 - 2 * (torch.arange(positions) % 2).float()
    signs[0] = 1 + 2e-3  # what is left: a thousandth of S where there are two positions
    a = values.expand(-1, positions, width_in).contiguous()
    b = (values.flip(0) * signs[:, None]).expand(-1, -1, width_out).contiguous()
    left = (b.double()[:, :, 0] * a.double()[:, :, 0]).sum(1).abs()  # every entry of the gradient
    exact = left * (width_in * width_out) ** 0.5
    found = outer_norms(b, a).double()
    lengths = (a.double().norm(dim=2) * b.double().norm(dim=2)).sum(1)
    assert (found >= exact).all()
    assert (found <= (exact**2 + 17 * 2.0**-24 * lengths**2).sqrt() * (1 + 1e-7)).all()


def test_tiny_numbers_beside_large_ones_are_not_lost():
    """Squares of 1e-23 are no float32 numbers, and the gradient is 6e-3 a row of a mean."""
    a, b = torch.full((3, 1, 1000), 5e17), torch.full((3, 1, 1000), 1e-23)
    exact = 1000 * 5e17 * 1e-23
    assert (outer_norms(b, a).double() >= exact).all()
    assert (outer_norms(b.expand(-1, 2, -1), a.expand(-1, 2, -1)).double() >= 2 * exact).all()


def test_without_positions_norms_are_products():
    a, b = vectors("random", 1, 900, 700)
    expected = a[:, 0].double().norm(dim=1) * b[:, 0].double().norm(dim=1)
    found = outer_norms(b, a).double()
    assert (found >= expected).all()
    assert (found <= expected * (1 + 1.2e-6)).all()  # rounded up by 16 units, and rounded


def test_norms_of_broken_rows_are_not_finite():
    a, b = vectors("random", 5, 4, 3)
    b[2, 1, 0] = float("nan")
    a[4, 0, 0] = float("inf")
    norms = outer_norms(b, a)
    assert torch.isfinite(norms).tolist() == [True, True, False, True, False, True]


class Weighted(nn.Module):
    """Σ_t c_t ⟨W, x_t⟩ with coefficients that are part of the data."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return (self.layer(x[..., :16]) * x[..., 16:]).sum((1, 2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1.0, 1e2, 1e3, 1e4])
def test_cancelling_positions_do_not_escape_clipping(mode, scale):
    """Two positions with coefficients +1 and -1 whose inputs differ a little: the bound is 0.1."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(1, 1, 16, generator=generator) * scale
    second = first + 0.3 * torch.randn(1, 1, 16, generator=generator)
    signs = torch.tensor([1.0, -1.0]).view(1, 2, 1)
    x = torch.cat([torch.cat([first, second], dim=1), signs], dim=2)
    model = Weighted()
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data=TensorDataset(x),
        scheme=everything_every_step(1, 1),
        noise_multiplier=0.0,
        max_grad_norm=0.1,
        seed=1,
        gradients=Gradients(mode=mode, loss="sum"),
    )
    wrapped, optimizer, loader = private
    for (rows,) in loader:
        wrapped(rows).sum().backward()
        optimizer.step()
    found = float(model.layer.weight.grad.double().norm())
    assert 0 < found <= 0.1 * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", ["convolution", "normalization"])
def test_other_layers_with_long_gradients(layer, mode):
    """3e5 equal numbers: Opacus's float32 norm is 1e-4 off."""
    torch.manual_seed(0)
    size = 300_000
    if mode == "bookkeeping" and layer == "convolution":
        size = 30_000  # its rule goes through the taps one by one
    x = torch.ones(2, 1, size)
    model = {
        "convolution": nn.Sequential(nn.Conv1d(1, 1, size, bias=False), nn.Flatten()),
        "normalization": nn.Sequential(nn.LayerNorm(size), nn.Flatten()),
    }[layer]
    if layer == "normalization":
        x[:, 0, ::2] = -1.0  # normalized, it is itself: gradients of the weight are ±1
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data=TensorDataset(x),
        scheme=everything_every_step(2, 1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        seed=1,
        gradients=Gradients(mode=mode, loss="sum"),
    )
    wrapped, optimizer, loader = private
    for (rows,) in loader:
        wrapped(rows).sum().backward()
        optimizer.step()
    total = torch.cat([p.grad.flatten() for p in optimizer.params]).double().norm()
    assert float(total) == pytest.approx(2.0, rel=3e-6)  # two equal examples
