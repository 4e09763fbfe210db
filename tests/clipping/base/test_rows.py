"""Norms of long gradients: torch's own, in one pass on a CPU, are too short by up to 0.8 %."""

import pytest
import torch
from torch import nn

from dptrain.clipping import PerExampleClipper
from dptrain.clipping.base.rows import row_norms

WIDTHS = [0, 1, 255, 257, 784, 1023, 1024, 1025, 70_001, 3_000_000]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["equal", "normal", "steep"])
def test_norms_are_exact_to_less_than_the_pad_on_charges(width, kind):
    generator = torch.Generator().manual_seed(3)
    rows = {
        "equal": torch.full((2, width), 0.1),
        "normal": torch.randn(2, width, generator=generator),
        "steep": torch.logspace(0, -8, width).expand(2, -1),
    }[kind]
    exact = rows.double().square().sum(1).sqrt()
    torch.testing.assert_close(row_norms(rows).double(), exact, rtol=4e-7, atol=0)


@pytest.mark.parametrize("width", [1, 256, 257, 784, 1024, 65_536])
@pytest.mark.parametrize("layout", ["rows", "columns", "expanded"])
def test_norms_of_equal_numbers_are_within_the_pad_however_they_lie(width, layout):
    """Squares of equal numbers are rounded the same way every time: the worst case there is."""
    generator = torch.Generator().manual_seed(4)
    first = 0.1 + torch.rand(500, 1, generator=generator)
    rows = first.expand(-1, width)
    if layout != "expanded":
        rows = rows.contiguous()
    if layout == "columns":
        rows = rows.T.contiguous().T
    exact = first[:, 0].double() * width**0.5
    torch.testing.assert_close(row_norms(rows).double(), exact, rtol=7e-7, atol=0)


def test_the_dtype_is_that_of_the_sums():
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        for width in (3, 600):
            norms = row_norms(torch.ones(2, width, dtype=dtype))
            assert norms.dtype == expected
            assert norms.tolist() == pytest.approx([width**0.5] * 2, rel=1e-6)


def test_what_is_not_finite_stays_so():
    rows = torch.ones(3, 700)
    rows[0, 650], rows[1, 3] = float("nan"), float("inf")
    assert torch.isfinite(row_norms(rows)).tolist() == [False, False, True]


@pytest.mark.parametrize("split", [1, 64])
def test_a_long_gradient_is_clipped_to_the_bound(split):
    """2e6 equal numbers in one parameter, or in many that are added up."""
    parameters = [nn.Parameter(torch.zeros(2_000_000 // split)) for _ in range(split)]
    for p in parameters:
        p.grad_sample = torch.full((1, len(p)), 0.1)
    sums = PerExampleClipper(parameters).clipped_sum(max_grad_norm=1.0, weights=torch.ones(1))
    norm = torch.cat(sums).double().norm()
    assert float(norm) == pytest.approx(1.0, rel=1e-6)
