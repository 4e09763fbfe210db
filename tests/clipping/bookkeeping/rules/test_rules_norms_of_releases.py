"""Norm and release are of the same numbers, for every rule, on inputs that make this hard."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from dptrain.clipping.base.row_groups import RowGroups
from dptrain.clipping.bookkeeping.combine import norms_of_sum
from dptrain.clipping.bookkeeping.convolution.shape import ConvShape
from dptrain.clipping.bookkeeping.rules.layers import register_imported
from dptrain.clipping.bookkeeping.rules.rule import GradientRule, LayerRule
from dptrain.clipping.bookkeeping.rules.table import RULES, register_layer
from dptrain.clipping.bookkeeping.uses.arranged import Viewed
from dptrain.clipping.bookkeeping.uses.convolved import Convolved
from dptrain.clipping.bookkeeping.uses.gathered import Bagged, Gathered, Picked
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.clipping.bookkeeping.uses.routed import Routed
from dptrain.clipping.bookkeeping.uses.use import Folded, Materialized, chunked_norms
from dptrain.testing import check_norms_of_releases
from dptrain.testing.norms_of_releases import check_uses

register_imported()
EVERY = set(RULES)


def images(*shape, rows=3):
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(1))


def ids(positions, rows=3):
    return torch.randint(0, 7, (rows, positions), generator=torch.Generator().manual_seed(1))


# A use keeps its inputs or, where that is less, its gradients: the check looks at both.
def frozen(norm):
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return norm.eval()


CASES = {
    "linear, one position": (lambda: nn.Linear(40, 30), images(40)),
    "linear, many positions": (lambda: nn.Linear(6, 5), images(9, 6)),
    "linear, few positions": (lambda: nn.Linear(90, 80), images(3, 90)),
    "linear, more dimensions": (lambda: nn.Linear(6, 5), images(3, 2, 6)),
    "linear of torch's attention": (
        lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(6, 5),
        images(4, 6),
    ),
    "bilinear": (lambda: nn.Bilinear(6, 5, 4), (images(6), images(5))),
    "bilinear, many positions": (lambda: nn.Bilinear(6, 5, 4), (images(9, 6), images(9, 5))),
    "Conv1D": (lambda: Conv1D(5, 6), images(4, 6)),
    "attention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), (images(5, 6),) * 3),
    "attention to another": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True, kdim=5, vdim=3, add_bias_kv=True),
        (images(2, 8), images(4, 5), images(4, 3)),
    ),
    "LSTM": (lambda: nn.LSTM(6, 5, batch_first=True), images(9, 6)),
    "LSTM, two layers, projected": (
        lambda: nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True, proj_size=3),
        images(3, 6),
    ),
    "GRU": (lambda: nn.GRU(6, 5, batch_first=True), images(9, 6)),
    "GRU, few steps": (lambda: nn.GRU(90, 80, batch_first=True), images(3, 90)),
    "RNN": (lambda: nn.RNN(6, 5, batch_first=True), images(9, 6)),
    "LSTMCell": (lambda: nn.LSTMCell(6, 5), images(6)),
    "GRUCell": (lambda: nn.GRUCell(6, 5), (images(6), images(5))),
    "RNNCell": (lambda: nn.RNNCell(6, 5), images(6)),
    "embedding, table": (lambda: nn.Embedding(7, 4), ids(9)),
    "embedding, looked up": (lambda: nn.Embedding(50, 4, padding_idx=2), ids(9)),
    "bag, sums": (lambda: nn.EmbeddingBag(7, 4, mode="sum"), ids(9)),
    "bag, means": (lambda: nn.EmbeddingBag(50, 4, mode="mean", padding_idx=2), ids(9)),
    "bag, largest": (lambda: nn.EmbeddingBag(7, 4, mode="max"), ids(9)),
    "PReLU": (lambda: nn.PReLU(), images(9, 4)),
    "PReLU, channels": (lambda: nn.PReLU(4), images(4, 5, 5)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, groups=2), images(4, 9)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1), images(3, 6, 6)),
    "Conv2d, few pixels": (lambda: nn.Conv2d(30, 20, 3, padding=1), images(30, 3, 3)),
    "Conv2d, circular": (
        lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        images(3, 5, 5),
    ),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), images(2, 3, 4, 3)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(6, 4, 3, stride=2, groups=2), images(6, 5)),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1),
        images(4, 4, 4),
    ),
    "ConvTranspose2d, few pixels": (
        lambda: nn.ConvTranspose2d(30, 20, 3, padding=1),
        images(30, 3, 3),
    ),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(3, 2, 2), images(3, 3, 3, 2)),
    "LayerNorm": (lambda: nn.LayerNorm(6), images(5, 6)),
    "LayerNorm, long": (lambda: nn.LayerNorm(300), images(220, 300)),
    "RMSNorm": (lambda: nn.RMSNorm(6), images(5, 6)),
    "GroupNorm": (lambda: nn.GroupNorm(4, 4), images(4, 5, 5)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True), images(3, 5)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True), images(3, 4, 4)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(3, affine=True), images(3, 2, 3, 2)),
    "BatchNorm1d, frozen": (lambda: frozen(nn.BatchNorm1d(3)), images(3, 5)),
    "BatchNorm2d, frozen": (lambda: frozen(nn.BatchNorm2d(3)), images(3, 4, 4)),
    "BatchNorm3d, frozen": (lambda: frozen(nn.BatchNorm3d(3)), images(3, 2, 3, 2)),
    "SyncBatchNorm, frozen": (lambda: frozen(nn.SyncBatchNorm(3)), images(3, 4, 4)),
}


def test_every_rule_is_among_the_cases():
    assert {type(build()) for build, _ in CASES.values()} == EVERY


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_norm_is_of_one_number_and_the_release_another(name):
    build, inputs = CASES[name]
    torch.manual_seed(0)
    layer = build()
    for p in layer.parameters():
        nn.init.normal_(p)
    check_norms_of_releases(layer, inputs)


class Scale(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return x * self.weight


def right(layer, inputs, gradient):
    return {"weight": (inputs[0] * gradient).sum(1)}


class Longer(Materialized):
    """Releases the gradients, and takes the norms of something shorter."""

    def norms(self):
        return super().norms() * (1 - 1e-3)

    def select(self, index):
        return Longer(self.gradients[index])


class Wrong(LayerRule):
    def uses(self, layer, inputs, gradient):
        return {"weight": Longer((inputs[0] * gradient).sum(1))}


@pytest.fixture
def _own_rules():
    kept = dict(RULES)
    yield
    RULES.clear()
    RULES.update(kept)


@pytest.mark.usefixtures("_own_rules")
def test_registered_layers_get_the_same_check():
    register_layer(Scale, GradientRule(right))
    check_norms_of_releases(Scale(), images(5, 4))
    register_layer(Scale, Wrong())
    with pytest.raises(AssertionError, match=r"'weight'.*float32.*is released while .* its norm"):
        check_norms_of_releases(Scale(), images(5, 4))


def test_a_layer_without_a_rule_is_refused():
    with pytest.raises(ValueError, match="Scale has no rule"):
        check_norms_of_releases(Scale(), images(5, 4))


def cancelling(*shape, spread=1e-3):
    """Equal numbers whose signs alternate over dimension 1, and a little beside them."""
    signs = (1 - 2 * (torch.arange(shape[0]) % 2)).view(1, -1, *[1] * (len(shape) - 1))
    return 0.7234567 * 1e3 * signs * (1 + spread * images(*shape))


def tied(positions):
    """An embedding's table that is the head's weight too, and cancels what it does."""
    k, b = ids(positions), cancelling(positions, 300, spread=0.0)
    picked = nn.functional.one_hot(k, 400).float()
    return [Gathered(k, b, 400), OuterProducts(-picked, b * (1 + 1e-6))]


def convolved(**options):
    layer = nn.Conv2d(60, 70, 3, padding=1, **options)
    a = torch.full((6, 60, 3, 3), 0.7234567)
    g = cancelling(70, 9)[:1].expand(6, -1, -1).unflatten(2, (3, 3)).transpose(2, 3).contiguous()
    return Convolved(a, g, ConvShape.of(layer))


def bagged(rows=3):
    """With ids that are there several times, and cancel."""
    k = ids(6, rows)
    k[:, 3:] = k[:, :3]
    c = torch.full((rows, 6), 0.7234567)
    c[:, 3:] *= -1 + 1e-6
    return Bagged(k, c, cancelling(30)[:1].expand(rows, -1).contiguous(), 40)


def routed(rows=3):
    """Positions that cancel, with one expert and with others."""
    experts = torch.tensor([0, 0, 2, 0]).expand(rows, -1).contiguous()
    left = cancelling(4, 50)[:1].expand(rows, -1, -1).contiguous()
    return Routed(left, torch.full((rows, 4, 60), 0.7234567), experts, 3)


USERS = RowGroups([1, 3, 2])  # of six rows

USES = {
    "experts": lambda: [routed()],
    "experts, twice": lambda: [routed(), routed()],
    "experts, views": lambda: [routed(6).folded(2)],
    "scalars": lambda: [Materialized(cancelling(1)[:, 0])],
    "bags": lambda: [bagged()],
    "bags, merged": lambda: [bagged(), bagged()],
    "bags and a table": lambda: [bagged(), Gathered(ids(5), cancelling(5, 30), 40)],
    "bags and products": lambda: [
        bagged(),
        OuterProducts(torch.randn(3, 2, 40), torch.randn(3, 2, 30)),
    ],
    "bags, views": lambda: [bagged(6).folded(2)],
    "largest": lambda: [Picked(ids(30), cancelling(30), 40)],
    "largest, twice": lambda: [
        Picked(ids(30), cancelling(30), 40),
        Picked(ids(30), -cancelling(30) * (1 + 1e-6), 40),
    ],
    "largest, views": lambda: [Picked(ids(30, 6), cancelling(30).repeat(2, 1), 40).folded(2)],
    "products of another shape": lambda: [
        Viewed(
            OuterProducts(cancelling(4, 50), torch.full((3, 4, 60), 0.7234567)),
            torch.Size((5, 10, 60)),
        )
    ],
    "products of another shape, twice": lambda: [
        Viewed(
            OuterProducts(cancelling(2, 50), torch.full((3, 2, 60), sign * 0.7234567)),
            torch.Size((5, 10, 60)),
        )
        for sign in (1, -1)
    ],
    "products": lambda: [OuterProducts(cancelling(4, 500), torch.full((3, 4, 600), 0.7234567))],
    "products, merged": lambda: [
        OuterProducts(cancelling(2, 500), torch.full((3, 2, 600), 0.7234567)),
        OuterProducts(-cancelling(2, 500), torch.full((3, 2, 600), 0.7234567)),
    ],
    "tied, products": lambda: tied(5),
    "tied, gradients": lambda: [tied(5)[0], Materialized(tied(5)[1].per_example(0, 3))],
    "tied, gradients that have a norm": lambda: [
        Gathered(ids(5), cancelling(5, 30), 40),
        Materialized(torch.randn(3, 40, 30)),
    ],
    "three forms": lambda: [*tied(5), Materialized(torch.randn(3, 400, 300))],
    "convolution": lambda: [convolved()],
    "convolution, twice": lambda: [convolved(), convolved()],
    "convolution, views": lambda: [Folded(convolved(), 2)],
    "products, views": lambda: [
        OuterProducts(cancelling(4, 50), torch.full((3, 4, 60), 0.7234567)).folded(3)
    ],
    "table, views": lambda: [Gathered(ids(4, 6), cancelling(4, 50).repeat(2, 1, 1), 60).folded(2)],
    "experts, users": lambda: [routed(6).folded(USERS)],
    "bags, users": lambda: [bagged(6).folded(USERS)],
    "largest, users": lambda: [
        Picked(ids(30, 6), cancelling(30).repeat(2, 1), 40).folded(USERS),
    ],
    "convolution, users": lambda: [Folded(convolved(), USERS)],
    "convolution, views along a dimension": lambda: [convolved().folded(2)],
    "convolution, views, twice": lambda: [convolved().folded(2), convolved().folded(2)],
    "convolution, users along a dimension": lambda: [convolved().folded(USERS)],
    "products, users": lambda: [
        OuterProducts(cancelling(4, 50).repeat(2, 1, 1), torch.full((6, 4, 60), 0.7234567)).folded(
            USERS
        )
    ],
    "products, users, twice": lambda: [
        OuterProducts(
            sign * cancelling(4, 50).repeat(2, 1, 1), torch.full((6, 4, 60), 0.7234567)
        ).folded(USERS)
        for sign in (1, -1 - 1e-6)
    ],
    "table, users": lambda: [
        Gathered(ids(4, 6), cancelling(4, 50).repeat(2, 1, 1), 60).folded(USERS)
    ],
    "gradients, users": lambda: [Materialized(cancelling(50).repeat(2, 1)).folded(USERS)],
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", USES)
def test_forms_of_uses_and_what_they_are_together(name):
    torch.manual_seed(0)
    uses = USES[name]()
    check_uses(name, uses)


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("scaled", [False, True])
def test_norms_are_never_below_those_of_the_exact_gradients(name, scaled):
    torch.manual_seed(0)
    uses = USES[name]()
    scale = torch.rand(uses[0].shape) if scaled else None
    norms = norms_of_sum(list(uses)) if scale is None else chunked_norms(uses, scale)
    exact = sum(use.per_example(0, use.rows) for use in (doubled(use) for use in uses))
    exact = exact if scale is None else exact * scale
    # Norms of what has gradients only are exact up to rounding.
    assert (norms.double() >= exact.reshape(len(exact), -1).norm(dim=1) * (1 - 2e-6)).all()


def doubled(use):
    use = copy.copy(use)
    if isinstance(use, Folded | Viewed):
        use.use = doubled(use.use)
        return use
    for name in ("left", "right", "gradients", "vectors", "coefficients", "a", "g"):
        if name in vars(use):
            setattr(use, name, getattr(use, name).double())
    return use
