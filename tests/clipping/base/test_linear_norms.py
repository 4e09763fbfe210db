"""Norms of sums of outer products: never below the norm in float64, and not far above it."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, PrivacyEngine
from dptrain.clipping.base import linear_norms
from dptrain.clipping.base.linear_norms import Gram, gram_squares, gram_stripes, outer_norms
from dptrain.clipping.bookkeeping.combine import norms_of_sum
from dptrain.clipping.bookkeeping.uses.gathered import Gathered
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from tests.helpers.engine import MODES, everything_every_step

LOOSE = 1.02  # of squares
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
    # At most 1 % by what products in float32 may be off by, and what is always added.
    assert (found <= (LOOSE * exact**2 + 1.5e-6 * lengths**2).sqrt() * (1 + 1e-6)).all()
    if kind == "cancelling":
        assert (found <= (exact**2 + 1.5e-6 * lengths**2).sqrt() * (1 + 1e-6)).all()
    # Sides that other sums share too.
    shared = Gram(b)
    for grams in ((shared, None), (None, Gram(a)), (shared, Gram(a))):
        assert torch.equal(outer_norms(b, a, grams=grams), found)
    if kind == "random":
        torch.testing.assert_close(found.double(), exact, rtol=2e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["random", "cancelling", "unequal", "positive"])
def test_squares_are_off_by_no_more_than_is_stated(kind, shape, dtype):
    """Of exact integers: the numbers are rounded to 2^-8 of their largest, so float64 has no error.

    A bound that covered everything would not be one: of random numbers it is a few units.
    """
    positions, *sizes = shape
    a, b = (torch.round(side * 2**8 / side.abs().max()) for side in vectors(kind, *shape))
    # Sums of at most positions · 2^8 · 2^8 < 2^53, and of as many squares of these.
    exact = torch.einsum("ntk,ntj->nkj", b.double(), a.double()).square().sum((1, 2))
    found = gram_squares(gram_stripes(b, dtype), gram_stripes(a, dtype), tuple(reversed(sizes)))
    assert ((found.value - exact).abs() <= found.off).all()
    lengths = (a.double().norm(dim=2) * b.double().norm(dim=2)).sum(1).square()
    assert (found.length >= lengths).all()
    assert (found.length <= lengths * 1.02 + 1e-12).all()
    unit = torch.finfo(dtype).eps / 2
    most = 1.1 * (1.1 * sum(sizes) + 2 * positions + 24) * unit * lengths
    assert (found.off <= most + 1e-12).all()
    if kind == "random" and dtype == torch.float32:
        assert (found.off <= 5e-3 * exact).all()


@pytest.mark.parametrize(("numbers", "positions"), [(16, 2), (64, 2), (160, 100), (700, 30)])
def test_numbers_that_rounding_swallows_are_covered(numbers, positions):
    """Every square of 2^-12 is half a unit of the 1 that it is added to, and rounds to nothing."""
    side = torch.full((1, positions, numbers), 2.0**-12)
    side[:, :, 0] = 1.0
    exact = (positions * (1 + (numbers - 1) * 2.0**-24)) ** 2
    grams = gram_stripes(side, torch.float32)
    found = gram_squares(grams, grams, (numbers, numbers))
    assert abs(float(found.value) - exact) <= float(found.off)
    assert float(outer_norms(side, side).double()) >= exact**0.5


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_sides_without_numbers_have_norms_of_nothing(sizes):
    left, right = (torch.randn(3, 4, size) for size in sizes)
    assert float(outer_norms(left, right).max()) < 1e-12


def test_only_rows_that_cancel_are_computed_again(monkeypatch):
    """In float64, whose products take twice as long and more."""
    rows = []

    def counted(side, dtype):
        if dtype == torch.float64:
            rows.append(len(side))
        return gram_stripes(side, dtype)

    monkeypatch.setattr(linear_norms, "gram_stripes", counted)
    right, left = vectors("random", 150, 64, 24)
    outer_norms(left, right)
    assert rows == []
    right[2], left[2] = (side[2] for side in vectors("cancelling", 150, 64, 24))
    right[4, 3] = float("nan")
    left[0] = 0.0
    norms = outer_norms(left, right)
    assert rows == [2, 2]  # two rows, two sides
    assert float(norms[0]) == 0.0


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-10, 1.0, 1e10, 1e18])
def test_norms_of_any_scale_are_found(scale):
    """Products of two such numbers are no float32 numbers at either end."""
    a, b = vectors("random", 40, 32, 70)
    b *= scale
    exact = torch.einsum("ntk,ntj->nkj", b.double(), a.double()).flatten(1).norm(dim=1)
    found = outer_norms(b, a).double()
    assert (found >= exact).all()
    assert (found <= exact * 1.01).all()


def test_kinds_of_positions_have_matrices_of_their_own():
    a, b = vectors("random", 40, 32, 70)
    kinds = torch.arange(40).expand(6, -1) % 3
    exact = torch.stack(
        [
            torch.einsum("ntk,ntj->nkj", b.double() * own, a.double()).flatten(1).norm(dim=1)
            for own in ((kinds == kind)[:, :, None] for kind in range(3))
        ]
    ).norm(dim=0)
    found = outer_norms(b, a, kinds=kinds).double()
    assert (found >= exact).all()
    assert (found <= exact * 1.001).all()


@pytest.mark.parametrize("cancel", [False, True])
def test_a_table_and_a_linear_layer_that_share_their_weight(cancel):
    """Also where one takes away what the other adds, but for 1e-4 of it."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 50, (4, 30), generator=generator)
    b = torch.randn(4, 30, 16, generator=generator)
    left = torch.randn(4, 30, 50, generator=generator)
    right = torch.randn(4, 30, 16, generator=generator)
    if cancel:
        left = torch.zeros(4, 30, 50).scatter_(2, ids[:, :, None], 1.0) + 1e-4 * left
        right = -b
    tables = torch.zeros(4, 50, 16, dtype=torch.float64)
    for row in range(4):
        tables[row].index_add_(0, ids[row], b[row].double())
    exact = (tables + torch.einsum("ntk,ntj->nkj", left.double(), right.double())).flatten(1)
    exact = exact.norm(dim=1)
    found = norms_of_sum([Gathered(ids, b, 50), OuterProducts(left, right)]).double()
    assert (found >= exact).all()
    lengths = b.double().norm(dim=2).sum(1)
    lengths += (left.double().norm(dim=2) * right.double().norm(dim=2)).sum(1)
    assert (found <= (LOOSE * exact**2 + 17 * 2.0**-24 * lengths**2).sqrt() * (1 + 1e-6)).all()


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
    assert (found <= (LOOSE * exact**2 + 17 * 2.0**-24 * lengths**2).sqrt() * (1 + 1e-7)).all()


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
    b[0], b[1], a[1, 2, 0] = 0.0, 0.0, float("nan")  # 0 · NaN is NaN
    norms = outer_norms(b, a)
    assert torch.isfinite(norms).tolist() == [True, False, False, True, False, True]
    assert float(norms[0]) == 0.0


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
