"""Per-example convolution gradients against autograd, one example at a time."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from dptrain.clipping.base.linear_norms import ROUNDING
from dptrain.clipping.base.row_groups import RowGroups
from dptrain.clipping.bookkeeping.convolution import direct as convolution_direct
from dptrain.clipping.bookkeeping.convolution import grouped as convolution_grouped
from dptrain.clipping.bookkeeping.convolution.convolution import weighted_sum
from dptrain.clipping.bookkeeping.convolution.direct import ChannelsFirst, ChannelsLast
from dptrain.clipping.bookkeeping.convolution.gram import squared_norms
from dptrain.clipping.bookkeeping.convolution.grouped import gradients_in_groups
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape
from dptrain.clipping.bookkeeping.uses import convolved as uses_convolved
from dptrain.clipping.bookkeeping.uses.convolved import Convolved
from dptrain.clipping.bookkeeping.uses.formed import form_gradients

KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# How much larger products between pixels may make norms in float32: test_gram.py.
ROUNDED_UP = 1e-2
MODES = ("zeros", "reflect", "replicate", "circular")


def one_at_a_time(layer: nn.Module, a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The oracle: shape (B, *weight.shape)."""
    rows = [
        torch.autograd.grad(layer(a[i : i + 1]), layer.weight, g[i : i + 1])[0]
        for i in range(len(a))
    ]
    return torch.stack(rows) if rows else layer.weight.new_zeros(0, *layer.weight.shape)


def sum_of_lengths(layer: nn.Module, a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """S = Σ_t ‖patch_t‖ ‖g_t‖ over output positions, shape (B,)."""
    with torch.no_grad():
        patches = type(layer)(
            1,
            1,
            layer.kernel_size,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            bias=False,
            padding_mode=layer.padding_mode,
        ).double()
        nn.init.ones_(patches.weight)
        squares = patches(a.square().sum(1, keepdim=True)) * g.square().sum(1, keepdim=True)
    return squares.sqrt().flatten(1).sum(1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    dims = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    groups = draw(st.integers(1, 3))
    kernel, dilation, stride = each(1, 3), each(1, 2), each(1, 3)
    padding = draw(st.sampled_from(["same", "valid", "numbers"]))
    if padding == "same":
        stride = (1,) * dims
    # Sizes from the smallest on that give an output; padding below the size for "reflect".
    sizes = tuple(
        d * (k - 1) + 1 + draw(st.integers(2, 4)) for d, k in zip(dilation, kernel, strict=True)
    )
    torch.manual_seed(draw(st.integers(0, 2**31)))
    layer = KINDS[dims - 1](
        groups * draw(st.integers(1, 3)),
        groups * draw(st.integers(1, 3)),
        kernel,
        stride=stride,
        padding=each(0, 2) if padding == "numbers" else padding,
        dilation=dilation,
        groups=groups,
        bias=False,
        padding_mode=draw(st.sampled_from(MODES)),
    ).double()
    a = torch.randn(draw(st.integers(1, 4)), layer.in_channels, *sizes, dtype=torch.float64)
    if draw(st.booleans()) and dims == 2:
        a = a.to(memory_format=torch.channels_last)
    return layer, a, torch.randn_like(layer(a).detach())


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(max_examples=50, deadline=None, derandomize=True)
@given(cases(), st.integers(1, 3))
def test_equals_autograd_one_example_at_a_time(case, at_once):
    layer, a, g = case
    shape, expected = ConvShape.of(layer), one_at_a_time(layer, a, g)
    factors = torch.rand(len(a), dtype=torch.float64)
    total = torch.einsum("b,b...->...", factors, expected)
    squares = expected.flatten(1).square().sum(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution_direct, "product_size", lambda tensor, numbers: at_once)
        formed = form_gradients(a, g, shape)
    near = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(formed.per_example(), expected, **near)
    torch.testing.assert_close(formed.norms(), squares.sqrt(), **near)
    torch.testing.assert_close(formed.weighted_sum(factors), total, **near)
    torch.testing.assert_close(squared_norms(a, g, shape), squares, **near)
    torch.testing.assert_close(weighted_sum(a, g, factors, shape), total, **near)

    a, g, factors = a.float(), g.float(), factors.float()
    near = {"rtol": 1e-5, "atol": 1e-5 * float(squares.max().sqrt() + 1), "check_dtype": False}
    formed = form_gradients(a, g, shape)
    torch.testing.assert_close(formed.per_example(), expected, **near)
    torch.testing.assert_close(formed.norms(), squares.sqrt(), **near)
    torch.testing.assert_close(formed.weighted_sum(factors), total, **near)
    torch.testing.assert_close(weighted_sum(a, g, factors, shape), total, **near)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution_grouped, "chunk_size", lambda tensor, numbers: at_once)
        gradients, norms = gradients_in_groups(a, g, shape)
    torch.testing.assert_close(gradients, expected, **near)
    torch.testing.assert_close(norms, squares.sqrt(), **near)
    excess = squared_norms(a, g, shape).double() - squares
    allowance = 2 * ROUNDING * 2.0**-24 * sum_of_lengths(layer, a.double(), g.double()).square()
    assert bool((excess >= -1e-12 * squares).all()), excess
    assert bool((excess <= allowance + 0.02 * squares).all()), (excess, allowance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(max_examples=50, deadline=None, derandomize=True)
@given(cases(), st.lists(st.integers(1, 3), min_size=2, max_size=3), st.data())
def test_groups_of_rows_along_a_dimension_are_sums_of_rows(case, sizes, data):
    """Views of one number, and records of several, whether gradients are formed or not."""
    layer, a, _ = case
    even = data.draw(st.booleans())
    sizes = sizes[:1] * len(sizes) if even else sizes
    a = torch.randn(sum(sizes), *a.shape[1:], dtype=torch.float64)
    g = torch.randn_like(layer(a).detach())
    rows = one_at_a_time(layer, a, g)
    expected = torch.stack([part.sum(0) for part in rows.split(sizes)])
    factors = torch.rand(len(sizes), dtype=torch.float64)
    factors[0] = 0
    total = torch.einsum("b,b...->...", factors, expected)
    norms = expected.flatten(1).norm(dim=1)
    near = {"rtol": 1e-9, "atol": 1e-9}
    use = Convolved(a, g, ConvShape.of(layer)).folded(sizes[0] if even else RowGroups(sizes))
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            patch.setattr(uses_convolved, "FEW", 0)
            patch.setattr(uses_convolved, "_HELD", 0)
        small = use.compact()
    for form in (use, small):
        assert (form.rows, form.shape) == (len(sizes), layer.weight.shape)
        torch.testing.assert_close(form.per_example(0, form.rows), expected, **near)
        torch.testing.assert_close(form.per_example(1, form.rows), expected[1:], **near)
        torch.testing.assert_close(form.norms(), norms, **near)
        index = torch.arange(len(sizes) - 1, -1, -2)
        some = form.select(index)
        torch.testing.assert_close(some.per_example(0, some.rows), expected[index], **near)
    magnitudes, terms = use.magnitudes(0, use.rows)
    bound = torch.stack([part.sum(0) for part in _magnitudes(layer, a, g).split(sizes)])
    torch.testing.assert_close(magnitudes, bound, **near)
    assert terms >= max(sizes) * math.prod(g.shape[2:])
    for form in (use, small):  # what adds up is spent then
        torch.testing.assert_close(form.weighted_sum(factors), total, **near)


def _magnitudes(layer: nn.Module, a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Sums of absolute values: gradients of absolute inputs and output gradients."""
    return one_at_a_time(layer, a.abs(), g.abs())


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("order", [ChannelsFirst, ChannelsLast])
@settings(max_examples=50, deadline=None, derandomize=True)
@given(case=cases(), at_once=st.integers(1, 3))
def test_both_orders_of_copies_have_the_gradients(order, case, at_once):
    layer, a, g = case
    shape, expected = ConvShape.of(layer), one_at_a_time(layer, a, g)
    assume(order is ChannelsFirst or shape.groups == 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution_direct, "product_size", lambda tensor, numbers: at_once)
        patch.setattr(convolution_direct, "cheaper_order", order)
        formed = form_gradients(a, g, shape)
    near = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(formed.per_example(), expected, **near)
    torch.testing.assert_close(formed.per_example(1, 3), expected[1:3], **near)
    torch.testing.assert_close(formed.norms(), expected.flatten(1).norm(dim=1), **near)
    index = torch.arange(len(a) - 1, -1, -2)
    torch.testing.assert_close(formed.select(index).per_example(), expected[index], **near)
    torch.testing.assert_close(formed.merged(formed).per_example(), 2 * expected, **near)
    factors = torch.rand(len(a), dtype=torch.float64)
    factors[0] = 0
    total = torch.einsum("b,b...->...", factors, expected)
    torch.testing.assert_close(formed.weighted_sum(factors), total, **near)


@pytest.mark.parametrize(
    ("layer", "order"),
    [
        (nn.Conv2d(1, 16, 8, 2, padding=3), ChannelsLast),  # 8 taps of one row, 16 of two
        (nn.Conv2d(16, 32, 4, 2), ChannelsLast),  # taps overlap
        (nn.Conv2d(64, 64, 3, padding=1), ChannelsLast),
        (nn.Conv2d(3, 40, 4, 4), ChannelsLast),  # 12 of one row, 48 of four
        (nn.Conv1d(1, 8, 16, 16), ChannelsLast),
        (nn.Conv2d(3, 64, 3, padding=1), ChannelsFirst),  # 9 however they are taken
        (nn.Conv2d(64, 128, 1, 2), ChannelsFirst),  # three quarters of the input are not read
        (nn.Conv2d(64, 128, 1), ChannelsFirst),  # no copies
        (nn.Conv2d(64, 128, 2, 2), ChannelsFirst),
        (nn.Conv2d(64, 64, 3, padding=1, groups=2), ChannelsFirst),
    ],
    ids=str,
)
def test_channels_go_last_where_taps_overlap_or_have_to_share_a_product(layer, order):
    a = torch.randn(2, layer.in_channels, *(16,) * len(layer.kernel_size))
    g = torch.randn_like(layer(a).detach())
    assert type(convolution_direct.cheaper_order(a, g, ConvShape.of(layer), g.dtype)) is order


LAYERS = {
    "plain": nn.Conv2d(3, 4, 3, padding=1),
    "pointwise": nn.Conv2d(3, 4, 1),
    "strided": nn.Conv2d(4, 2, 5, stride=2, padding=2, groups=2),
    "1d": nn.Conv1d(3, 4, 3, padding="same"),
    "depthwise": nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "many channels": nn.Conv2d(6, 4, 3, padding=1),
    "one channel": nn.Conv2d(1, 4, 8, stride=2, padding=3),
}


def example_of(name: str, rows: int = 5) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    layer = LAYERS[name]
    torch.manual_seed(0)
    a = torch.randn(rows, layer.in_channels, *(7,) * len(layer.kernel_size))
    return layer, a, torch.randn_like(layer(a).detach())


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["a", "g"])
def test_a_row_that_is_not_finite_stays_by_itself(name, bad, where):
    layer, a, g = example_of(name)
    shape = ConvShape.of(layer)
    expected = one_at_a_time(layer, a, g)
    (a if where == "a" else g)[2, 0, :5] = bad
    others = torch.tensor([0, 1, 3, 4])
    formed, squares = form_gradients(a, g, shape), squared_norms(a, g, shape)
    assert not squares[2].isfinite()
    assert not formed.norms()[2].isfinite()
    torch.testing.assert_close(formed.per_example()[others], expected[others], rtol=1e-5, atol=1e-5)
    gradients, norms = gradients_in_groups(a, g, shape)
    assert not norms[2].isfinite()
    torch.testing.assert_close(gradients[others], expected[others], rtol=1e-5, atol=1e-5)
    norms = expected.flatten(1).norm(dim=1)
    torch.testing.assert_close(
        squares[others].sqrt(), norms[others].to(squares.dtype), rtol=ROUNDED_UP, atol=0
    )
    factors = torch.tensor([0.5, 1.0, 0.0, 0.25, 2.0])
    total = torch.einsum("b,b...->...", factors[others], expected[others])
    for found in (weighted_sum(a, g, factors, shape), formed.weighted_sum(factors)):
        torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_no_examples(name):
    layer, a, g = example_of(name, rows=0)
    shape = ConvShape.of(layer)
    assert form_gradients(a, g, shape).per_example().shape == (0, *layer.weight.shape)
    assert squared_norms(a, g, shape).shape == (0,)
    nothing = torch.zeros_like(layer.weight)
    torch.testing.assert_close(weighted_sum(a, g, torch.zeros(0), shape), nothing)
    torch.testing.assert_close(form_gradients(a, g, shape).weighted_sum(torch.zeros(0)), nothing)


@pytest.mark.parametrize("name", LAYERS)
def test_all_factors_zero(name):
    layer, a, g = example_of(name)
    total = weighted_sum(a * float("nan"), g, torch.zeros(5), ConvShape.of(layer))
    torch.testing.assert_close(total, torch.zeros_like(layer.weight))


@pytest.mark.parametrize("name", LAYERS)
def test_output_gradients_may_be_scaled_in_memory_of_the_callers(name):
    layer, a, g = example_of(name)
    shape = ConvShape.of(layer)
    factors = torch.rand(5)
    expected, kept = weighted_sum(a, g, factors, shape), g.clone()
    scratch = torch.empty_like(g)
    torch.testing.assert_close(weighted_sum(a, g, factors, shape, scratch), expected)
    assert torch.equal(g, kept)
    torch.testing.assert_close(weighted_sum(a, g, factors, shape, g), expected)
    torch.testing.assert_close(g, scratch)


@pytest.mark.parametrize("name", LAYERS)
def test_half_precision_is_summed_in_float32(name):
    layer, a, g = example_of(name)
    shape, a, g = ConvShape.of(layer), a.bfloat16(), g.bfloat16()
    expected = one_at_a_time(layer, a.float(), g.float())
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(form_gradients(a, g, shape).per_example(), expected, **near)
    norms = expected.flatten(1).norm(dim=1)
    torch.testing.assert_close(
        squared_norms(a, g, shape).sqrt(), norms.double(), rtol=ROUNDED_UP, atol=0
    )
    total = weighted_sum(a, g, torch.ones(5), shape)
    torch.testing.assert_close(total, expected.sum(0), **near)


def test_what_does_not_belong_together_is_refused():
    layer, a, g = example_of("plain")
    shape = ConvShape.of(layer)
    for pair in [(a, g[:, :, 1:]), (a[:, :2], g), (a[0], g[0]), (a[:3], g)]:
        for function in (form_gradients, squared_norms):
            with pytest.raises(ValueError, match="pass the batched input"):
                function(*pair, shape)
        with pytest.raises(ValueError, match="pass the batched input"):
            weighted_sum(*pair, torch.ones(5), shape)
    for other in (nn.Linear(2, 2), nn.ConvTranspose2d(2, 2, 3)):
        with pytest.raises(TypeError, match="register your own rule"):
            ConvShape.of(other)


def test_the_shape_says_what_torch_computes():
    for kernel, stride, dilation in itertools.product([1, 2, 3], [1, 2, 3], [1, 2]):
        layer = nn.Conv2d(2, 4, kernel, stride=stride, dilation=dilation, padding=1, groups=2)
        shape = ConvShape.of(layer)
        assert shape.weight_shape == tuple(layer.weight.shape)
        for size in range(5, 9):
            assert shape.output_sizes((size, 6)) == layer(torch.zeros(1, 2, size, 6)).shape[2:]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(6, 6, 7, padding=3, groups=6),
        nn.Conv2d(6, 6, 7, padding=9, groups=6),
        nn.Conv2d(5, 5, 3, padding=2, stride=2, dilation=2, groups=5),
        nn.Conv2d(5, 5, (5, 2), stride=(3, 1), padding="valid", groups=5),
        nn.Conv2d(4, 4, (2, 4), padding="same", groups=4),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", groups=4),
        nn.Conv2d(1, 1, 3),
        nn.Conv1d(7, 7, 4, padding=3, groups=7),
        nn.Conv3d(3, 3, 2, stride=(1, 2, 1), padding=1, groups=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [7, 12])
def test_channels_alone_are_convolved_with_the_output_gradient(layer, size):
    torch.manual_seed(0)
    a = torch.randn(3, layer.in_channels, *(size,) * len(layer.kernel_size))
    g = torch.randn_like(layer(a).detach())
    shape = ConvShape.of(layer)
    assert convolution_grouped.channels_alone(shape, tuple(a.shape[2:]))
    gradients, norms = gradients_in_groups(a, g, shape)
    # Sums of at most as many products as there are outputs, of normal numbers.
    expected = one_at_a_time(layer.double(), a.double(), g.double())
    layer.float()
    terms = g[0, 0].numel()
    near = {"rtol": 0, "atol": 2 * terms**2 * 2.0**-24, "check_dtype": False}
    torch.testing.assert_close(gradients, expected, **near)
    own = gradients.double().flatten(1).norm(dim=1)
    torch.testing.assert_close(norms.double(), own, rtol=1e-5, atol=0)


def test_only_small_outputs_are_kernels():
    shape = ConvShape.of(nn.Conv2d(8, 8, 3, padding=1, groups=8))
    assert convolution_grouped.channels_alone(shape, (24, 24))
    assert not convolution_grouped.channels_alone(shape, (24, 25))
    several = ConvShape.of(nn.Conv2d(8, 16, 3, padding=1, groups=8))
    assert not convolution_grouped.channels_alone(several, (8, 8))


@pytest.mark.parametrize(
    ("channels", "groups"), [((1, 1), 1), ((3, 16), 1), ((16, 20), 1), ((32, 64), 1), ((7, 7), 7)]
)
def test_rows_in_groups_are_functions_of_their_own_example_to_the_bit(channels, groups):
    c, p = channels
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(5, c, 9, 9, generator=generator)
    g = torch.randn(5, p, 9, 9, generator=generator)
    shape = ConvShape.of(nn.Conv2d(c, p, 3, padding=1, groups=groups))
    kept, kept_norms = gradients_in_groups(a, g, shape)
    for bad in (float("nan"), float("inf"), 3e38, 0.0):
        a[2], g[2] = bad, bad
        found, norms = gradients_in_groups(a, g, shape)
        others = torch.tensor([0, 1, 3, 4])
        assert torch.equal(found[others], kept[others])
        assert torch.equal(norms[others], kept_norms[others])


@pytest.mark.parametrize(
    ("known", "isa", "rate"),
    [
        ({"avx512_f": True, "cpu_name": "AMD EPYC"}, None, 2.0),
        ({"avx512_f": True, "cpu_name": "AMD EPYC", "avx512_vp2intersect": True}, None, 2.0),
        ({"avx512_f": True, "cpu_name": "AMD EPYC", "avx512_vp2intersect": False}, None, 1.3),
        ({"avx512_f": True, "cpu_name": "AMD EPYC"}, "AVX2", 1.0),
        ({"avx512_f": True, "cpu_name": "AMD EPYC"}, "avx512_core", 2.0),
        ({"avx512_f": False, "cpu_name": "AMD EPYC"}, None, 1.0),
        ({"avx512_f": True, "cpu_name": "Intel(R) Xeon(R) Processor"}, None, 1.0),
        ({"architecture": "aarch64"}, None, 1.0),
    ],
)
def test_products_are_slow_where_only_convolutions_have_wide_vectors(known, isa, rate, monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if isa:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert convolution_grouped.product_rate.__wrapped__() == rate
