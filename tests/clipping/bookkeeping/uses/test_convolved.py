"""Transposed convolutions: every option, against autograd on one example at a time."""

import pytest
import torch
from torch import nn

from dptrain.clipping.bookkeeping.convolution.shape import ConvShape
from dptrain.clipping.bookkeeping.uses.convolved import Convolved
from dptrain.clipping.bookkeeping.uses.formed import Formed, form_gradients
from dptrain.testing import check_layer_rule

KINDS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SIZES = {1: (5,), 2: (4, 3), 3: (3, 4, 3)}
OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "stride": {"stride": 3},
    "stride beyond the kernel": {"kernel_size": 2, "stride": 4},
    "padding": {"padding": 2},
    "padding beyond the kernel": {"kernel_size": 1, "padding": 1, "stride": 2},
    "output padding": {"stride": 2, "output_padding": 1, "padding": 1},
    "output padding without padding": {"stride": 3, "output_padding": 2},
    "dilation": {"dilation": 2, "stride": 2},
    "output padding beyond the stride": {"dilation": 3, "output_padding": 2, "padding": 1},
    "output padding beyond stride and padding": {"dilation": 4, "output_padding": 3, "stride": 2},
    "groups": {"groups": 2, "stride": 2},
    "depthwise": {"groups": 4},
}


@pytest.mark.sample(every=66)
@pytest.mark.parametrize("dimensions", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(dimensions, name):
    torch.manual_seed(1)
    layer = KINDS[dimensions](4, 8, **{"kernel_size": 3, **OPTIONS[name]})
    check_layer_rule(layer, torch.randn(3, 4, *SIZES[dimensions]))


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("size", [[9, 7], [10, 8], [9, 8]])
def test_an_output_size_that_a_call_asks_for(size):
    layer = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=0)
    check_layer_rule(layer, (torch.randn(3, 4, 4, 3), size))
    assert list(layer(torch.randn(3, 4, 4, 3), size).shape[2:]) == size


@pytest.mark.parametrize(
    ("options", "padding"),
    [
        ({"stride": 2, "padding": 1, "output_padding": 1}, ((1, 1), (1, 1))),
        ({"dilation": 3, "padding": 1, "output_padding": 2}, ((1, -1), (1, -1))),
    ],
)
def test_the_convolution_that_a_transposed_one_is_the_adjoint_of(options, padding):
    """⟨g, layer(x)⟩ = ⟨conv(g), x⟩, whose output has the size of x, with the same weight."""
    layer = nn.ConvTranspose2d(4, 6, 3, bias=False, **options).double()
    x = torch.randn(2, 4, 5, 4).double()
    y = layer(x)
    g = torch.randn_like(y)
    shape = ConvShape.adjoint(layer, tuple(x.shape[2:]), tuple(y.shape[2:]))
    assert shape.padding == padding
    assert shape.weight_shape == layer.weight.shape
    assert shape.output_sizes(tuple(y.shape[2:])) == tuple(x.shape[2:])
    gradients = form_gradients(g, x, shape).per_example()
    # ⟨gradient, W⟩ = ⟨g, layer(x)⟩, which is linear in W.
    found = (gradients * layer.weight).flatten(1).sum(1)
    torch.testing.assert_close(found, (g * y).flatten(1).sum(1), rtol=1e-12, atol=1e-12)


def test_norms_are_taken_of_products_where_gradients_are_large():
    """Both forms of the use are there: what the checks above see is not only one of them."""
    kinds = set()
    for width in (4, 160):
        layer = nn.ConvTranspose2d(width, width, 3)
        x = torch.randn(40, width, 2, 2)
        g = torch.randn(40, width, 4, 4)
        shape = ConvShape.adjoint(layer, (2, 2), (4, 4))
        kinds.add(type(Convolved(g, x, shape).compact()))
    assert kinds == {Convolved, Formed}
