"""nn.EmbeddingBag in every way it can be called, and PReLU and Bilinear, against the loop."""

import itertools

import pytest
import torch
from torch import nn

from dptrain.clipping.bookkeeping.uses.gathered import Bagged
from dptrain.testing import check_layer_rule
from tests.helpers.bookkeeping_runs import ROWS, backward, case, check_like_loop, run_of

VOCABULARY, LENGTH, WIDTH = 9, 6, 3


def ids(rows=ROWS):
    found = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(2))
    found[:, 1] = found[:, 0]  # an id that a bag has twice
    found[1] = 4  # the padding alone, where there is one
    return found


class Bags(nn.Module):
    """A bag of each row's ids, of which the first are no part, called in the given way."""

    def __init__(self, mode, way, *, padding_idx=None):
        super().__init__()
        last = way == "offsets and the last"
        self.bag = nn.EmbeddingBag(
            VOCABULARY, WIDTH, mode=mode, padding_idx=padding_idx, include_last_offset=last
        )
        self.way, self.head = way, nn.Linear(WIDTH, 2)
        self.importance = nn.Embedding(VOCABULARY, 1)

    def forward(self, x):
        if self.way == "two dimensions":
            return self.head(self.bag(x))
        if self.way == "weights":
            return self.head(self.bag(x, per_sample_weights=self.importance(x)[..., 0]))
        # As many of a row's ids as the first one says: none of some.
        lengths = x[:, 0].clamp(max=LENGTH - 1)
        some = torch.arange(1, LENGTH) <= lengths[:, None]
        flat, starts = x[:, 1:][some], lengths.cumsum(0) - lengths
        if self.way == "offsets and the last":
            starts = torch.cat([starts, lengths.sum()[None]])
        weights = None
        if self.way == "offsets and weights":
            weights = self.importance(x)[:, 1:, 0][some]
        return self.head(self.bag(flat, starts, per_sample_weights=weights))


WAYS = ["two dimensions", "offsets", "offsets and the last"]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("mode", "way", "padding_idx"),
    [
        *itertools.product(["sum", "mean", "max"], WAYS, [None, 4]),
        *itertools.product(["sum"], ["weights", "offsets and weights"], [None, 4]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bags_are_those_of_the_loop(mode, way, padding_idx, dtype):
    torch.manual_seed(1)
    x = ids()
    x[0, 0] = 0  # an empty bag, where lengths count
    model = Bags(mode, way, padding_idx=padding_idx)
    nn.init.normal_(model.bag.weight)  # the padding's row too
    check_like_loop(case(model, x, dtype=dtype))


class Twice(nn.Module):
    """One table, for bags and in other ways."""

    def __init__(self, other):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean")
        self.other = other
        if other == "embedding":
            self.table = nn.Embedding(VOCABULARY, WIDTH)
            self.table.weight = self.bag.weight
        elif other == "head":
            self.head = nn.Linear(WIDTH, VOCABULARY)
            self.head.weight = self.bag.weight

    def forward(self, x):
        h = self.bag(x)
        if self.other == "embedding":
            return h + self.table(x).cos().sum(1)
        if self.other == "head":
            return self.head(h)
        return h + self.bag(x[:, :2]).sin()


@pytest.mark.parametrize("other", ["bag", "embedding", "head"])
def test_a_table_that_is_used_twice(other):
    torch.manual_seed(1)
    check_like_loop(case(Twice(other), ids()))


def test_a_tables_frozen_weights_leave_the_importances():
    model = Bags("sum", "weights")
    model.bag.weight.requires_grad_(False)
    check_like_loop(case(model, ids()))


def test_nothing_is_as_large_as_all_that_is_looked_up():
    """The use holds ids, a number for each, and one vector an example."""
    a = case(Bags("sum", "two dimensions"), ids())
    private = run_of(a)
    backward(private)
    (use,) = private.optimizer.clipper._held[id(a.module.bag.weight)].uses
    assert isinstance(use, Bagged)
    assert use.vectors.shape == (ROWS, WIDTH)
    assert use.coefficients.shape == (ROWS, LENGTH)


def test_frequencies_are_refused_and_hooks_name_the_remedy():
    a = case(nn.Sequential(nn.EmbeddingBag(VOCABULARY, 3, scale_grad_by_freq=True)), ids())
    with pytest.raises(ValueError, match="scale_grad_by_freq=True"):
        run_of(a)
    a = case(nn.Sequential(nn.EmbeddingBag(VOCABULARY, 3)), ids())
    with pytest.raises(ValueError, match=r"EmbeddingBag.*Gradients\(mode='bookkeeping'\)"):
        run_of(a, mode="hooks")


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("parameters", "shape"),
    [(1, ()), (1, (4,)), (4, (4,)), (1, (4, 5)), (4, (4, 5)), (3, (3, 4, 2)), (1, (3, 4, 2, 2))],
)
def test_prelu(parameters, shape):
    torch.manual_seed(0)
    layer = nn.PReLU(parameters)
    nn.init.normal_(layer.weight)
    check_layer_rule(layer, torch.randn(5, *shape))


class Product(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, y):
        return self.layer(x, y)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("positions", [(), (3,), (40,)])
def test_bilinear_layers(positions):
    torch.manual_seed(0)
    layer = nn.Bilinear(5, 6, 4)
    check_layer_rule(layer, (torch.randn(4, *positions, 5), torch.randn(4, *positions, 6)))


def test_bilinear_layers_that_are_large_keep_no_gradients():
    """Of 40 · 50 · 60 numbers an example none are kept: 40 · 50 are, and 60."""
    torch.manual_seed(0)
    layer = nn.Bilinear(50, 60, 40)
    a = case(Product(layer), torch.randn(ROWS, 50), torch.randn(ROWS, 60))
    check_like_loop(a)
    private = run_of(case(Product(nn.Bilinear(50, 60, 40)), *a.inputs))
    backward(private)
    (use,) = private.optimizer.clipper._held[id(private.optimizer.params[0])].uses
    assert use.use.left.shape == (ROWS, 1, 2000)
    assert use.use.right.shape == (ROWS, 1, 60)
