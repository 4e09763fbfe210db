"""Products by either library are products, whatever the strides."""

import pytest
import torch

from dptrain.clipping.base import products
from dptrain.clipping.base.products import Squashed, add_product, outer_product, product

SHAPES = [(3, 5, 4), (64, 300, 200), (300, 64, 1000)]  # the last two are not small
LAYOUTS = {
    "as it is": lambda t: t.contiguous(),
    "transposed": lambda t: t.t().contiguous().t(),
    "a part of longer rows": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "every second row": lambda t: t.repeat_interleave(2, 0)[::2],
}


@pytest.mark.sample(every=9)
@pytest.mark.parametrize("by_onednn", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape, first, second, dtype, by_onednn, monkeypatch):
    monkeypatch.setattr(products, "_onednn_is_faster", lambda threads: by_onednn)
    torch.manual_seed(0)
    m, k, n = shape
    x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    total, bias = torch.randn(m, n).to(dtype), torch.randn(n).to(dtype)
    exact = x.double() @ w.double().t()
    x, w = LAYOUTS[first](x), LAYOUTS[second](w)
    # k products are added up, and the result is rounded.
    unit = torch.finfo(torch.float32 if dtype == torch.bfloat16 else dtype).eps
    allowed = k * unit * (x.double().abs() @ w.double().abs().t() + 4)
    allowed = allowed + torch.finfo(dtype).eps * (exact.abs() + 4)
    for found, right in (
        (product(x, w), exact),
        (product(x, w, bias), exact + bias.double()),
        (add_product(total.clone(), x, w), exact + total.double()),
        (outer_product(x.t(), w.t()), exact),
        (outer_product(w.t(), x.t()), exact.t()),
    ):
        assert found.dtype == dtype
        limit = allowed if found.shape == allowed.shape else allowed.t()
        assert bool(((found.double() - right).abs() <= limit).all())


@pytest.mark.parametrize("rows", [64, 7])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("squash", ["sigmoid", "tanh"])
def test_squashed_products(squash, bias, rows):
    """Near 0 tanh is as exact as far from it, also for fewer rows than were announced."""
    torch.manual_seed(0)
    x, w = torch.randn(rows, 300), torch.randn(200, 300)
    x[::2] *= 1e-5
    b = 1e-5 * torch.randn(200) if bias else None
    inside = x.double() @ w.double().t() + (0.0 if b is None else b.double())
    right = getattr(torch, squash)(inside)
    found = Squashed(w, b, squash, 64)(x)
    # σ and tanh have slopes of 1 at most; what they add is a few roundings of their value.
    unit = torch.finfo(torch.float32).eps
    allowed = 301 * unit * (x.double().abs() @ w.double().abs().t()) + 4 * unit * right.abs()
    assert bool(((found.double() - right).abs() <= allowed + 1e-10 * unit).all())


def test_rows_do_not_mix(monkeypatch):
    monkeypatch.setattr(products, "_onednn_is_faster", lambda threads: True)
    x, w = torch.randn(64, 300), torch.randn(200, 300)
    right = product(x, w)
    x[3] = torch.nan
    found = product(x, w)
    assert bool(found[3].isnan().all())
    assert torch.equal(found[:3], right[:3])
    assert torch.equal(found[4:], right[4:])


def test_what_is_measured_is_measured_once(monkeypatch):
    calls = []
    monkeypatch.setattr(products, "_shortest", lambda run: calls.append(run) or len(calls))
    products._onednn_is_faster.cache_clear()
    first = products._onednn_is_faster(1)
    assert products._onednn_is_faster(1) == first
    assert len(calls) in (0, 2)
    products._onednn_is_faster.cache_clear()
