"""Under every style an example moves the clipped sum by at most R, and pays for what it moves."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from dptrain import Automatic, Flat, PerGroup, PerLayer
from dptrain.clipping import PerExampleClipper
from dptrain.clipping.base.styles import LEAST_GAMMA
from dptrain.clipping.base.weights import clip_factors
from dptrain.engine.optimizer import NORM_PAD

NAMES = ["a.weight", "a.bias", "b.weight", "c"]
SHAPES = [(2, 3), (2,), (4,), (1,)]
NUMBERS = sum(math.prod(shape) for shape in SHAPES)
STYLES = [
    Flat(),
    PerLayer(),
    PerGroup({"a": ("a.*",), "rest": ("b.*", "c")}),
    PerGroup({"a": ("a.*", "c"), "b": ("b.*",)}, {"a": 1e-3, "b": 1.0}),
    Automatic(),
    Automatic(LEAST_GAMMA),
]
UNDERFLOW = 1e-12  # what squares below the least float32 may hide, in units of R

ordinary = st.floats(-4, 4)
extreme = st.sampled_from(
    [0.0, 1e-30, -1e-23, 1e-19, 1e-7, 1e7, -1e18, 3e38, math.nan, math.inf, -math.inf]
)


def gradients(rows):
    numbers = st.one_of(ordinary, extreme)
    drawn = arrays.arrays(np.float64, (rows, NUMBERS), elements=numbers)
    # Most rows of independent draws would have a NaN somewhere.
    return st.tuples(
        drawn, arrays.arrays(np.float64, (rows, NUMBERS), elements=ordinary), st.booleans()
    ).map(lambda drawn: drawn[0] if drawn[2] else drawn[1])


def summed(style, rows, bound, dtype, admit=None, scales=None):
    """The clipped sum of these gradients, in float64."""
    parameters = [nn.Parameter(torch.zeros(s, dtype=dtype)) for s in SHAPES]
    flat = torch.tensor(rows).to(dtype)
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters], 1), strict=True):
        p.grad_sample = part.reshape(len(flat), *p.shape)
    clipper = PerExampleClipper(parameters, style=style, groups=style.groups(NAMES))
    sums = clipper.clipped_sum(
        max_grad_norm=bound,
        weights=torch.ones(len(flat), dtype=dtype),
        scales=scales,
        admit=admit,
    )
    return torch.cat([s.flatten() for s in sums]).double()


@pytest.mark.parametrize("style", STYLES, ids=str)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(gradients(5), st.integers(0, 4), st.floats(1e-3, 1e3))
def test_neighboring_batches_have_sums_within_the_bound(style, rows, removed, bound):
    kept = np.delete(rows, removed, axis=0)
    moved = summed(style, rows, bound, torch.float64) - summed(style, kept, bound, torch.float64)
    assert torch.isfinite(moved).all()
    assert float(moved.norm()) <= bound * (1 + 1e-12)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("style", STYLES, ids=str)
@settings(derandomize=True, deadline=None, max_examples=50)
@given(gradients(1), st.floats(1e-3, 1e3))
def test_the_filter_charges_no_less_than_is_contributed(style, row, bound):
    charged = []

    def admit(norms):  # as PrivateOptimizer._admit
        charged.append(float((norms.double() * NORM_PAD / bound).clamp(max=1.0)))
        return torch.ones_like(norms)

    moved = float(summed(style, row, bound, torch.float32, admit).norm()) / bound
    assert moved <= 1 + 5e-7  # float32
    if charged[0] < 1:
        assert moved <= charged[0] + UNDERFLOW
    if np.abs(row).max() < 1e34:  # above, a factor may be no normal number, and is 0
        assert charged[0] <= moved * (1 + 4e-6) + 2e-6 / bound + UNDERFLOW  # nor much more


@pytest.mark.parametrize("style", [s for s in STYLES if s != Flat()], ids=str)
@settings(derandomize=True, deadline=None, max_examples=10)
@given(gradients(4), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_scaled_gradients_are_clipped_within_the_bound(style, rows, removed, seed):
    """Σ clip(s ⊙ g) is that of gradients which were scaled beforehand."""
    generator = torch.Generator().manual_seed(seed)
    scales = [
        10 ** torch.randn(s, generator=generator, dtype=torch.float64).clamp(-3, 3) for s in SHAPES
    ]
    whole = torch.cat([s.flatten() for s in scales])
    kept = np.delete(rows, removed, axis=0)
    moved = summed(style, rows, 0.8, torch.float64, scales=scales)
    moved -= summed(style, kept, 0.8, torch.float64, scales=scales)
    assert float(moved.norm()) <= 0.8 * (1 + 1e-12)
    by_hand = summed(style, rows * whole.numpy(), 0.8, torch.float64)
    by_hand -= summed(style, kept * whole.numpy(), 0.8, torch.float64)
    torch.testing.assert_close(moved, by_hand, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("style", [Flat(), PerLayer(), Automatic()])
def test_factors_too_small_for_float32_do_not_exceed_the_bound(style):
    """R/‖g‖ is below the least normal number here, and would be rounded up by up to 1e-3."""
    p = nn.Parameter(torch.zeros(1))
    for norm in np.linspace(1e36, 3.4e38, 101):
        p.grad_sample = torch.tensor([[norm]], dtype=torch.float32)
        clipper = PerExampleClipper([p], style=style)
        (moved,) = clipper.clipped_sum(max_grad_norm=1e-3, weights=torch.ones(1))
        assert float(moved) <= 1e-3 * (1 + 5e-7)


def test_a_bound_that_is_too_large_for_one_group_would_be_noticed(monkeypatch):
    """The property above can fail: R for each of three groups moves the sum by √3 R."""

    class _Wrong(PerLayer):
        def clip(self, norms, max_grad_norm):
            return super().clip(norms, max_grad_norm * math.sqrt(norms.shape[1]))

    row = np.full((1, NUMBERS), 5.0)
    with pytest.raises(ValueError, match="longer than"):
        summed(_Wrong(), row, 1.0, torch.float64)
    monkeypatch.setattr("dptrain.clipping.base.weights._check_clipped", lambda *given: None)
    moved = summed(_Wrong(), row, 1.0, torch.float64)
    assert float(moved.norm()) == pytest.approx(math.sqrt(3), rel=1e-6)


@dataclasses.dataclass(frozen=True)
class _Own(Flat):
    """A style of somebody else's, as it should be or with one of the promises broken."""

    wrong: str = ""

    def clip(self, norms, max_grad_norm):
        factors, contributed = super().clip(norms, max_grad_norm)
        match self.wrong:
            case "longer than":
                return torch.ones_like(norms), norms[:, 0]
            case "than the norm that it states":
                return factors, contributed / 2
            case "when it is alone":
                return factors * norms.min() / norms.max(), contributed
            case "returned tensors of shapes":
                return factors[:, 0], contributed
        return factors, contributed


def _by_the_mean(norms, factors, kept):
    return factors * torch.cat([torch.ones_like(norms[:1]), 1 / (1 + norms[1:].mean() - norms[1:])])


def _by_the_last(norms, factors, kept):
    return factors / (1 + norms[-1])


def _by_the_place(norms, factors, kept):
    return factors * 0.5 ** torch.arange(len(norms)).to(norms)[:, None]


def _by_the_size(norms, factors, kept):
    return factors / len(norms)


def _by_the_one_before(norms, factors, kept):
    found = []
    for norm, factor in zip(norms, factors, strict=True):
        found.append(factor / (1 + kept.get("norm", 0.0)))
        kept["norm"] = float(norm.sum())
    return torch.stack(found)


def _by_coins(norms, factors, kept):
    return factors * torch.rand_like(factors)


def _written_into(norms, factors, kept):
    norms.zero_()
    return torch.ones_like(factors)


@dataclasses.dataclass(frozen=True)
class _Tied(Flat):
    """A style that makes factors of more than an example's own norm."""

    of: object = None
    kept: dict = dataclasses.field(default_factory=dict, compare=False)

    def clip(self, norms, max_grad_norm):
        factors, contributed = super().clip(norms, max_grad_norm)
        return self.of(norms, factors, self.kept).clamp(max=factors), contributed


TIES = [
    _by_the_mean,
    _by_the_last,
    _by_the_place,
    _by_the_size,
    _by_the_one_before,
    _by_coins,
]


@pytest.mark.parametrize("tie", TIES)
def test_no_factor_of_a_style_of_ones_own_is_of_others(tie):
    """Also where the first example's is its own, or not finite."""
    for first in (0.5, math.nan):
        norms = torch.tensor([[first], [2.0], [0.3], [4.0], [1.5]])
        with pytest.raises(ValueError, match="when it is alone"):
            clip_factors(norms, 1.0, torch.ones(5), style=_Tied(of=tie))


def test_a_style_of_ones_own_may_write_into_the_norms_that_it_is_given():
    """What is checked and counted are the norms as they are."""
    norms = torch.tensor([[0.5], [2.0], [3.0]])
    style = _Tied(of=_written_into)
    style.clip(norms.clone(), 1.0)
    factors, _ = clip_factors(norms, 1.0, torch.ones(3), style=style)
    assert norms.tolist() == [[0.5], [2.0], [3.0]]
    assert float((factors * norms).max()) <= 1 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_style_of_ones_own_may_not_break_the_bound(dtype):
    norms = torch.tensor([[0.3], [2.0], [0.0], [math.nan], [1e30]], dtype=dtype)
    weights = torch.ones(5, dtype=dtype)
    ours = clip_factors(norms, 1.0, weights)[0]
    assert torch.equal(clip_factors(norms, 1.0, weights, style=_Own())[0], ours)
    small = norms[:2]
    for wrong in (
        "longer than",
        "than the norm that it states",
        "when it is alone",
        "returned tensors of shapes",
    ):
        with pytest.raises(ValueError, match=wrong):
            clip_factors(small, 1.0, weights[:2], style=_Own(wrong))
