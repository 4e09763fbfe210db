"""Gradients of convolutions that are formed in bfloat16, and clipped as they came out."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, PrivacyEngine
from dptrain.clipping.base import products
from dptrain.clipping.base.rows import row_norms_error
from dptrain.clipping.bookkeeping.convolution.convolution import costs
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape
from dptrain.clipping.bookkeeping.rules import rule
from dptrain.clipping.bookkeeping.uses import convolved, formed
from dptrain.clipping.bookkeeping.uses.convolved import Convolved
from dptrain.clipping.bookkeeping.uses.formed import Formed, form_gradients, kept_gradients
from dptrain.clipping.bookkeeping.uses.use import Materialized
from tests.helpers.engine import everything_every_step, flat

ROWS = 7
HALF = 2.0**-8  # what rounding to bfloat16 changes a number by at most, relative to it
UNIT = 2.0**-24  # of float32, which sums are taken in

LAYERS = {
    "channels last": (nn.Conv2d(16, 8, 3, padding=1), (6, 6)),
    "channels first": (nn.Conv2d(3, 8, 3, padding=1), (6, 6)),
    "strided": (nn.Conv2d(1, 8, 8, stride=2, padding=3), (12, 12)),
    "pointwise": (nn.Conv2d(5, 8, 1), (4, 4)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), (5, 5)),
    "one dimension": (nn.Conv1d(3, 4, 3, padding="same"), (9,)),
    "two sides": (nn.Conv3d(16, 4, (1, 3, 3), padding=(0, 1, 1)), (2, 4, 4)),
    "mirrored border": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (5, 5)),
}


@pytest.fixture(autouse=True)
def units(monkeypatch):
    """As on a processor that has them; without, the same numbers take longer."""
    for module in (products, rule, formed, convolved):
        monkeypatch.setattr(module, "multiplies_bfloat16", lambda t: t.dtype == torch.bfloat16)


def _seen(name: str) -> tuple[ConvShape, torch.Tensor, torch.Tensor]:
    """What a layer saw, inputs in float32, as a net's first one has them within autocast."""
    layer, sizes = LAYERS[name]
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(ROWS, layer.in_channels, *sizes, generator=generator)
    g = torch.randn(layer(a).shape, generator=generator).bfloat16()
    return ConvShape.of(layer), a, g


def _formed(name: str) -> Formed:
    shape, a, g = _seen(name)
    return kept_gradients(a, g, shape)


@pytest.mark.parametrize("name", LAYERS)
def test_every_gradient_is_rounded_once(name):
    shape, a, g = _seen(name)
    kept = kept_gradients(a, g, shape)
    assert {block.storage.dtype for block in kept.blocks} == {torch.bfloat16}
    # Factors of eight digits: their products are exact, and sums in float32 nearly so.
    a, g = a.bfloat16().double(), g.double()
    exact = form_gradients(a, g, shape).per_example()
    terms = form_gradients(a.abs(), g.abs(), shape).per_example()
    positions = g[0, 0].numel()
    found = kept.per_example()
    assert found.dtype == torch.float32
    off = (found.double() - exact).abs()
    allowed = 2 * positions * UNIT * terms
    assert bool((off <= HALF * exact.abs() + (1 + HALF) * allowed).all())
    assert bool((off > 4 * allowed).any())  # they are rounded


@pytest.mark.parametrize("name", LAYERS)
def test_norms_are_of_what_is_kept(name):
    kept = _formed(name)
    rows = kept.per_example().double().flatten(1)
    error = row_norms_error(rows.shape[1], torch.float32) + 1e-7 * len(kept.blocks)
    assert kept.norms().dtype == torch.float32
    torch.testing.assert_close(kept.norms().double(), rows.norm(dim=1), rtol=error, atol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_sums_have_factors_of_all_their_digits(name):
    """A third in bfloat16 is .2 % too large: an example clipped by it would exceed R by as much."""
    kept = _formed(name)
    rows = kept.per_example().double()
    factors = torch.full((ROWS,), 1 / 3)
    factors[1] = 0
    rows[1] = 0
    total = kept.weighted_sum(factors)
    assert total.dtype == torch.float32
    terms = rows.abs().sum(0) / 3
    off = (total.double() - rows.sum(0) * factors[0].double()).abs()
    assert bool((off <= 2 * ROWS * UNIT * terms + 1e-30).all())
    torch.testing.assert_close(kept.per_example().double(), rows, rtol=0, atol=0)


def test_what_is_not_finite_stays_where_it_is():
    shape, a, g = _seen("channels last")
    clean = kept_gradients(a, g, shape)
    a[2] = float("nan")
    broken = kept_gradients(a, g, shape)
    assert broken.norms().isnan().tolist() == [i == 2 for i in range(ROWS)]
    factors = torch.ones(ROWS)
    factors[2] = 0
    torch.testing.assert_close(broken.weighted_sum(factors), clean.weighted_sum(factors))


def test_two_calls_of_a_layer_are_added_in_float32():
    kept = _formed("two sides")
    joint = kept.merged(_formed("two sides"))
    assert joint is not None
    expected = 2 * kept.per_example().double()
    both = joint.per_example(0, ROWS).double()
    torch.testing.assert_close(both, expected, rtol=2 * UNIT, atol=0)


def test_what_is_not_kept_is_formed_in_float32():
    """Norms of sums with other uses stand for what float32 adds up."""
    shape, a, g = _seen("channels last")
    use = Convolved(a, g, shape)
    assert use.per_example(0, ROWS).dtype == torch.float32
    exact = form_gradients(a.double(), g.double(), shape).per_example()
    terms = form_gradients(a.double().abs(), g.double().abs(), shape).per_example()
    off = (use.per_example(0, ROWS).double() - exact).abs()
    assert bool((off <= 2 * g[0, 0].numel() * UNIT * terms).all())
    assert use.weighted_sum(torch.ones(ROWS)).dtype == torch.float32


def test_depthwise_layers_keep_the_kernels_of_float32():
    layer = nn.Conv2d(64, 64, 5, padding=2, groups=64)
    generator = torch.Generator().manual_seed(5)
    a, g = (torch.randn(40, 64, 16, 16, generator=generator).bfloat16() for _ in range(2))
    use = Convolved(a, g, ConvShape.of(layer)).compact()
    if not torch.backends.mkldnn.is_available():
        pytest.skip("these kernels are oneDNN's")
    assert isinstance(use, Materialized)
    assert use.gradients.dtype == torch.float32
    exact = form_gradients(a.double(), g.double(), ConvShape.of(layer)).per_example()
    torch.testing.assert_close(use.gradients.double(), exact, rtol=0, atol=1e-3 * HALF * 256)


def test_products_pay_for_more_layers():
    shape, (_, sizes) = ConvShape.of(nn.Conv2d(64, 64, 3, padding=1)), LAYERS["channels last"]
    assert costs(shape, sizes, half=True).products < costs(shape, sizes).products
    assert costs(shape, sizes, half=True).gram == costs(shape, sizes).gram


@pytest.mark.parametrize("sides", [2, 3])
def test_views_of_an_example_are_summed_before_rounding(sides):
    layer, sizes = LAYERS["channels last"]
    generator = torch.Generator().manual_seed(4)
    a = torch.randn(2 * sides, 16, *sizes, generator=generator).bfloat16()
    g = torch.randn(2 * sides, 8, *sizes, generator=generator).bfloat16()
    use = Convolved(a, g, ConvShape.of(layer)).folded(sides).compact()
    exact = form_gradients(a.double(), g.double(), ConvShape.of(layer)).per_example()
    exact = exact.unflatten(0, (2, sides)).sum(1)
    found = use.per_example(0, 2).double()
    assert bool(((found - exact).abs() <= HALF * exact.abs() + 1e-3 * HALF).all())


def test_a_step_within_autocast_releases_what_it_clipped():
    """No example adds more than R, and several add up to what each alone would add."""
    torch.manual_seed(0)
    layers = nn.Conv2d(16, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 3))
    x = torch.randn(ROWS, 16, 6, 6)
    start = flat(model).clone()

    def released(rows: torch.Tensor) -> torch.Tensor:
        torch.nn.utils.vector_to_parameters(start.clone(), model.parameters())
        private = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data=TensorDataset(rows),
            scheme=everything_every_step(len(rows), 1),
            noise_multiplier=0.0,
            max_grad_norm=0.5,
            gradients=Gradients(loss="sum", mode="bookkeeping"),
        )
        for (batch,) in private.loader:
            with torch.autocast("cpu", torch.bfloat16):
                logits = private.module(batch)
            logits.float().square().sum().backward()
            private.optimizer.step()
        private.detach()
        return start - flat(model)

    alone = torch.stack([released(x[i : i + 1]) for i in range(ROWS)])
    assert bool((alone.norm(dim=1) <= 0.5 * (1 + 1e-5)).all())
    assert bool((alone.norm(dim=1) > 0.499).any())
    # Rows of a batch are multiplied in other blocks than one alone.
    torch.testing.assert_close(released(x), alone.sum(0), rtol=0, atol=0.5 * HALF)


def test_only_by_units_that_onednn_may_use(monkeypatch):
    monkeypatch.undo()
    half, whole = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    present = torch.backends.mkldnn.is_available()
    known = {"avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    for sets, units in itertools.product(
        ("ALL", "AVX512_CORE_BF16", "AVX512_CORE_AMX", "AVX10_1_512", "avx512_core_bf16"),
        (True, False),
    ):
        known["avx512_bf16"] = units
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", sets)
        products._bfloat16_units.cache_clear()
        assert products.multiplies_bfloat16(half) is (units and present)
        assert not products.multiplies_bfloat16(whole)
    known["avx512_bf16"] = True
    for narrow in ("AVX2", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX", "SSE41"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", narrow)
        products._bfloat16_units.cache_clear()
        assert not products.multiplies_bfloat16(half)
    products._bfloat16_units.cache_clear()
