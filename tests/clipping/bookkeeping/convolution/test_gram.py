"""Norms of convolution gradients are never too small, whatever the rounding errors do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dptrain.clipping.bookkeeping.convolution import convolution
from dptrain.clipping.bookkeeping.convolution.convolution import costs
from dptrain.clipping.bookkeeping.convolution.gram import squared_norms
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape
from dptrain.clipping.bookkeeping.uses.formed import form_gradients

KINDS = ["random", "positive", "equal", "alternating", "cancelling", "unequal"]


def example_of(
    kind: str, channels: int, side: int, rows: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and output gradients of a 3×3 convolution, float32."""
    generator = torch.Generator().manual_seed(channels + side)
    a = torch.randn(rows, channels, side, side, generator=generator)
    g = torch.randn(rows, channels, side, side, generator=generator)
    if kind == "positive":
        return a.abs(), g.abs()
    if kind in ("equal", "alternating"):
        a, g = a[..., :1, :1].expand_as(a), g[..., :1, :1].expand_as(g).clone()
        if kind == "alternating":
            g[..., 1::2] *= -1
    if kind == "cancelling":  # positions of equal inputs whose output gradients sum up to 0
        a = a[..., :1, :1].expand_as(a) + 1e-4 * a
        g = g - g.mean((2, 3), keepdim=True)
    if kind == "unequal":
        scales = torch.logspace(-6, 0, side)
        a, g = a * scales, g * scales.flip(0)[:, None]
    return a.contiguous(), g.contiguous()


def exact_squares(a: torch.Tensor, g: torch.Tensor, shape: ConvShape) -> torch.Tensor:
    """Of the gradients in float64, without what is added for rounding errors."""
    return form_gradients(a.double(), g.double(), shape).per_example().flatten(1).square().sum(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("channels", "side"), [(1, 16), (3, 32), (32, 8), (64, 16), (256, 4)])
def test_squares_are_not_too_small_and_hardly_too_large(kind, channels, side):
    shape = ConvShape.of(nn.Conv2d(channels, channels, 3, padding=1))
    a, g = example_of(kind, channels, side)
    exact, found = exact_squares(a, g, shape), squared_norms(a, g, shape).double()
    assert bool((found >= exact).all())
    patches = nn.functional.unfold(a.double(), 3, padding=1).norm(dim=1)
    lengths = (patches * g.double().flatten(2).norm(dim=1)).sum(1)
    unit = torch.finfo(torch.float32).eps / 2
    # By what products in float32 may be off by, what is added (16), and the rounding of the square.
    assert bool((found <= 1.02 * exact * (1 + 1e-6) + 17 * unit * lengths.square()).all())


def test_a_gradient_that_the_products_cannot_see():
    # Every input is 1 and the output gradients sum up to 1e-3 at each tap: Gram alone may give 0.
    shape = ConvShape.of(nn.Conv2d(8, 8, 1))
    a = torch.ones(50, 8, 16, 16)
    g = torch.randn(50, 8, 16, 16, generator=torch.Generator().manual_seed(0))
    g = g - g.mean((2, 3), keepdim=True)
    exact = exact_squares(a, g, shape)
    assert float(exact.max()) < 1e-6  # g alone has squares of 2048
    assert bool((squared_norms(a, g, shape) > exact).all())


@pytest.mark.parametrize(("rate", "formed"), [(1.0, "products"), (2.0, "groups")])
def test_costs_choose_gradients_for_many_positions_and_ghosts_for_few(rate, formed, monkeypatch):
    monkeypatch.setattr(convolution, "product_rate", lambda: rate)
    layers = [(3, 32, 32), (32, 32, 32), (32, 64, 16), (64, 64, 16), (64, 128, 8), (128, 128, 8)]
    found = [
        costs(ConvShape.of(nn.Conv2d(c, p, 3, padding=1)), (side, side)).cheaper
        for c, p, side in layers
    ]
    assert found[:4] == [formed] * 4
    assert found[5] == "gram"
    # Depthwise, small output gradients are kernels; of large ones, or with several channels for
    # each, a group has no vectors to fill: products, wherever they are made.
    depthwise = ConvShape.of(nn.Conv2d(40, 40, 7, padding=3, groups=40))
    assert costs(depthwise, (16, 16)).cheaper == "groups"
    assert costs(depthwise, (32, 32)).cheaper == "products"
    twice = ConvShape.of(nn.Conv2d(40, 80, 7, padding=3, groups=40))
    assert costs(twice, (16, 16)).cheaper == "products"
