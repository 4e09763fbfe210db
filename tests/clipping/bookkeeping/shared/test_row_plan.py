"""Layers on positions, with the examples in the second dimension."""

import pytest
import torch
from torch import nn

from tests.helpers.architectures import Architecture
from tests.helpers.architectures_runs import backward, one_batch
from tests.helpers.clipping_oracle import reference
from tests.helpers.one_layer import ROWS, WIDTH, architecture, check, one


def second(run):
    """With (positions, rows, width) in the place of (rows, positions, width)."""
    return lambda m, h: run(m, h.transpose(0, 1)).transpose(0, 1)


def looked_up(m, h):
    return h + m.f(h[..., 0].detach().abs().long() % 5)


def written(m, h):
    h = m.f(h)
    h /= 3.0
    h[:2] *= 2.0
    return h


LAYERS = {
    "linear": one(lambda: nn.Linear(WIDTH, 3), second(lambda m, h: m.f(h))),
    "linear, written into": one(lambda: nn.Linear(WIDTH, 3), second(written)),
    "no bias": one(lambda: nn.Linear(WIDTH, 3, bias=False), second(lambda m, h: m.f(h))),
    "layer norm": one(lambda: nn.LayerNorm(WIDTH), second(lambda m, h: m.f(h))),
    "rms norm": one(lambda: nn.RMSNorm(WIDTH), second(lambda m, h: m.f(h))),
    "embedding": one(lambda: nn.Embedding(5, WIDTH), second(looked_up)),
    "several": one(
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.LayerNorm(8)),
        second(lambda m, h: m.f(h)),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_loop(name, dtype):
    check(architecture(LAYERS[name], dtype))


@pytest.mark.parametrize("name", LAYERS)
def test_as_many_positions_as_rows(name):
    """Of a square, passes over other numbers of rows tell which side is which."""
    check(architecture(LAYERS[name], rows=4))


def test_views_of_an_example():
    a = architecture(LAYERS["several"], rows=4)
    a = Architecture(module=a.module, inputs=a.inputs, targets=a.targets, views=2)
    check(a, reference(a.module, a.inputs, a.targets, views=2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint(reentrant):
    def run(m, h):
        return torch.utils.checkpoint.checkpoint(m.f, h, use_reentrant=reentrant)

    check(architecture(one(lambda: nn.Linear(WIDTH, 3), second(run)), rows=4))


@pytest.mark.parametrize(
    "run",
    [
        second(lambda m, h: m.f(h - h.mean(1, keepdim=True))),
        second(lambda m, h: m.f(h) + h[:, :1]),
        second(lambda m, h: m.f(h.roll(1, 1))),
    ],
)
def test_what_mixes_the_second_dimension_is_refused(run):
    a = architecture(one(lambda: nn.Linear(WIDTH, WIDTH), run))
    private = one_batch(a, "bookkeeping", reduction="mean")
    with pytest.raises(RuntimeError, match="no example's contribution can be bounded"):
        backward(private, a)


def test_a_norm_over_the_rows_is_refused():
    """Its weight belongs to the second dimension, in which the examples are."""
    a = architecture(one(lambda: nn.LayerNorm((ROWS, WIDTH)), second(lambda m, h: m.f(h))))
    private = one_batch(a, "bookkeeping", reduction="mean")
    with pytest.raises(RuntimeError, match=r"layer 'f'|cannot be run on a few rows"):
        backward(private, a)


def test_now_first_and_now_second_is_refused():
    def run(m, h):
        return m.f(h) + m.f(h.transpose(0, 1)).transpose(0, 1)

    a = architecture(one(lambda: nn.Linear(WIDTH, 3), run))
    private = one_batch(a, "bookkeeping", reduction="mean")
    with pytest.raises(RuntimeError, match="layer 'f'"):
        backward(private, a)
