"""The mean over a user's examples is clipped once, however many there are: one user at a time."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Automatic, Gradients, PerLayer, PerUser, Poisson
from dptrain.clipping.base.row_groups import RowGroups, side_by_side
from dptrain.clipping.bookkeeping.combine import Parted, folded, merge, norms_of_sum
from dptrain.clipping.bookkeeping.uses.arranged import Stacked, Viewed
from dptrain.clipping.bookkeeping.uses.gathered import Gathered
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.clipping.bookkeeping.uses.routed import Routed
from dptrain.clipping.bookkeeping.uses.use import Materialized, chunked_norms
from dptrain.sampling import MinSep
from tests.helpers.engine import flat, make, small_net, wire
from tests.sampling.users.test_per_user import graph_with

MODES = ["bookkeeping", "hooks", "functorch"]
SIZES = (1, 4, 2, 3, 1, 6)
GRAPH = graph_with(SIZES, seed=4)
N = GRAPH.examples
BOUND = 0.5
STABILITY = 1e-6


def everybody(group_size=99, steps=1):
    users = Poisson(probability=1.0, dataset_size=GRAPH.users, steps=steps)
    return PerUser(graph=GRAPH, users=users, group_size=group_size)


class Tied(nn.Module):
    """An embedding that is the output layer too, between them what mixes positions."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.mix = nn.GRU(6, 6, batch_first=True)

    def forward(self, ids):
        return (self.mix(self.table(ids))[0] @ self.table.weight.T).mean(1)


class Own(nn.Module):
    """A layer that there is no rule for."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(5))
        self.b = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        return (torch.sin(x * self.a) @ self.b).cumsum(1)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.norm(x + self.attention(x, x, x, need_weights=False)[0])).mean(1)


def numbers(*shape):
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(3)).double()


def ids(*shape):
    return torch.randint(0, 7, (N, *shape), generator=torch.Generator().manual_seed(3))


def sequential(*layers):
    return lambda: nn.Sequential(*copy.deepcopy(layers))


# What there is a use of its own for, small and large: where gradients are not formed one by one.
MODELS = {
    "convolution": (small_net, lambda: numbers(1, 4, 4)),
    "linear": (sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), lambda: numbers(5)),
    "positions": (
        sequential(
            nn.Linear(5, 900), nn.Tanh(), nn.Linear(900, 900), nn.Flatten(), nn.Linear(1800, 3)
        ),
        lambda: numbers(2, 5),
    ),
    "large convolution": (
        sequential(
            nn.Conv2d(2, 300, 3), nn.ReLU(), nn.Conv2d(300, 300, 3), nn.Flatten(), nn.Linear(300, 3)
        ),
        lambda: numbers(2, 5, 5),
    ),
    "groups": (
        sequential(
            nn.Conv1d(4, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(32, 3)
        ),
        lambda: numbers(4, 6),
    ),
    "embedding": (
        sequential(nn.Embedding(7, 5), nn.Flatten(), nn.Linear(20, 3)),
        lambda: ids(4),
    ),
    "bags": (sequential(nn.EmbeddingBag(7, 5), nn.Linear(5, 3)), lambda: ids(4)),
    "largest of a bag": (
        sequential(nn.EmbeddingBag(7, 5, mode="max"), nn.Linear(5, 3)),
        lambda: ids(4),
    ),
    "tied, recurrent": (Tied, lambda: ids(3)),
    "attention": (Attending, lambda: numbers(3, 6)),
    "own layer": (Own, lambda: numbers(5)),
}
ELSEWHERE = ("convolution", "linear", "groups", "embedding")  # what Opacus's modes take too


def module_of(name):
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def labels():
    return torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(8))


def gradient(module, data, row):
    """Of the loss of one row, flat."""
    x, y = data[row]
    parameters = list(module.parameters())
    loss = nn.functional.cross_entropy(module(x[None]), y[None])
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(grads, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def user_sum(module, data, groups, bound=BOUND):
    """Σ_u clip(mean over the user's rows, R), one autograd call a row."""
    total = torch.zeros_like(flat(module))
    for rows in groups:
        mean = sum(gradient(module, data, row) for row in rows) / len(rows)
        total += mean * min(1.0, bound / (float(mean.norm()) + STABILITY))
    return total


def by_user(rows):
    owners = GRAPH.members[np.asarray(rows, dtype=np.int64)]
    return [np.asarray(rows)[owners == u].tolist() for u in dict.fromkeys(owners.tolist())]


def released(model, data, *, scheme, reduction="sum", mode="bookkeeping", after=None, **options):
    """The last release, times B̄ for a mean, the rows of each step, and the run."""
    gradients = options.pop("gradients", Gradients())
    private = wire(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data=data,
        scheme=scheme,
        noise_multiplier=options.pop("noise_multiplier", 0.0),
        max_grad_norm=options.pop("max_grad_norm", BOUND),
        seed=1,
        gradients=dataclasses.replace(gradients, mode=mode, loss=reduction),
        **options,
    )
    model, optimizer, loader = private
    rows = {}
    for x, y in loader:
        batch = loader.current
        rows.setdefault(batch.step, []).extend(batch.indices.tolist())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
        if batch.last:
            scale = optimizer.expected_batch_size if reduction == "mean" else 1.0
            found = torch.cat([p.grad.flatten() for p in optimizer.params]) * scale
            if after is not None:
                after(found, rows[batch.step])
    return found, rows, private


@pytest.mark.sample(every=17)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("micro", [None, 6])
@pytest.mark.parametrize(
    ("mode", "name"),
    [("bookkeeping", name) for name in MODELS]
    + [(mode, name) for mode in ("hooks", "functorch") for name in ELSEWHERE],
)
def test_the_mean_over_a_users_examples_is_clipped(mode, name, micro, reduction):
    model, data = module_of(name), TensorDataset(MODELS[name][1](), labels())
    expected = user_sum(copy.deepcopy(model), data, by_user(range(N)))
    found, rows, private = released(
        model,
        data,
        scheme=everybody(6),
        mode=mode,
        reduction=reduction,
        max_physical_batch_size=micro,
    )
    assert sorted(rows[0]) == list(range(N))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert float(expected.norm()) > 0.1
    assert private.optimizer.expected_batch_size == len(SIZES)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro", [None, 3])
def test_every_step_releases_the_sum_over_whom_it_drew(mode, micro):
    """Steps with some users, some of their examples, and none at all."""
    model, data = small_net().double(), TensorDataset(numbers(1, 4, 4), labels())
    frozen, sizes = copy.deepcopy(model), set()
    users = MinSep(probability=0.2, min_sep=2, dataset_size=GRAPH.users, steps=16)
    scheme = PerUser(graph=GRAPH, users=users, group_size=2)

    def check(found, rows):
        groups = by_user(rows)
        sizes.update(map(len, groups))
        sizes.add(f"{len(groups)} users")
        expected = user_sum(frozen, data, groups)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)

    _, rows, private = released(
        model,
        data,
        scheme=scheme,
        mode=mode,
        reduction="mean",
        max_physical_batch_size=micro,
        accountant="gaussian",
        after=check,
    )
    assert {1, 2, "0 users", "1 users", "2 users"} <= sizes
    assert rows == {
        t: by_user_order(scheme, batch) for t, batch in enumerate(scheme.stream(seed_of(private)))
    }


def seed_of(private):
    return int(private.state_dict()["private"]["loader"]["seed"], 16)


def by_user_order(scheme, batch):
    return scheme.grouped(batch)[0].tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_padding_to_constant_sizes_changes_nothing(mode, reduction):
    model, data = small_net().double(), TensorDataset(numbers(1, 4, 4), labels())
    users = Poisson(probability=1.0, dataset_size=GRAPH.users, steps=2, max_batch_size=8)
    scheme = PerUser(graph=GRAPH, users=users, group_size=6)
    expected = user_sum(copy.deepcopy(model), data, by_user(range(N)))
    found, _, private = released(
        model, data, scheme=scheme, mode=mode, reduction=reduction, accountant="gaussian"
    )
    assert private.mechanism.scheme.physical_batch_size == 48
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_views_of_the_examples_of_a_user(mode, reduction):
    """K rows an example: the mean over all rows of a user."""
    x = numbers(3, 1, 4, 4)

    model, y = small_net().double(), labels()
    frozen = copy.deepcopy(model)
    flattened = TensorDataset(x.flatten(0, 1), y.repeat_interleave(3))
    groups = [[3 * e + k for e in rows for k in range(3)] for rows in by_user(range(N))]
    expected = user_sum(frozen, flattened, groups)
    private = make(
        model,
        TensorDataset(x, y),
        mode,
        lr=0.0,
        scheme=everybody(),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        gradients=Gradients(views=3, loss=reduction),
    )
    for images, targets in private.loader:
        private.optimizer.zero_grad()
        out = private.module(images.flatten(0, 1))
        targets = targets.repeat_interleave(3)
        nn.functional.cross_entropy(out, targets, reduction=reduction).backward()
        private.optimizer.step()
    scale = len(SIZES) if reduction == "mean" else 1.0
    found = torch.cat([p.grad.flatten() for p in private.optimizer.params]) * scale
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_example_takes_its_user_out_and_no_other(mode, bad):
    x, y = numbers(1, 4, 4), labels()
    groups = by_user(range(N))
    broken = next(rows for rows in groups if len(rows) == 3)
    x[broken[1], 0, 0, 0] = bad
    model, data = small_net().double(), TensorDataset(x, y)
    others = [rows for rows in groups if rows is not broken]
    expected = user_sum(copy.deepcopy(model), data, others)
    found, _, private = released(model, data, scheme=everybody(), mode=mode)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    assert private.nonfinite_examples == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clipping", [PerLayer(), Automatic()])
def test_other_styles_clip_the_mean(mode, clipping):
    model, data = small_net().double(), TensorDataset(numbers(1, 4, 4), labels())
    frozen = copy.deepcopy(model)
    layers = {}
    for name, p in frozen.named_parameters():
        layers.setdefault(name.rpartition(".")[0], []).append(p.numel())
    expected = torch.zeros_like(flat(model))
    for rows in by_user(range(N)):
        mean = sum(gradient(frozen, data, row) for row in rows) / len(rows)
        if isinstance(clipping, Automatic):
            expected += mean * BOUND / (mean.norm() + clipping.gamma)
            continue
        share, parts = BOUND / len(layers) ** 0.5, mean.split([sum(n) for n in layers.values()])
        expected += torch.cat(
            [part * min(1.0, share / (float(part.norm()) + STABILITY)) for part in parts]
        )
    found, _, _ = released(
        model, data, scheme=everybody(), mode=mode, gradients=Gradients(clipping=clipping)
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_user_moves_the_sum_by_the_bound_at_most(mode, reduction):
    """All examples of a user in one direction, and gone: whatever their number, the bound it is.

    Clipped one by one, six of them would move the sum by six times that. Examples of zeros have
    gradient zero, which is what the neighboring run has of the user.
    """
    for user, size in enumerate(SIZES):
        sums = []
        for present in (True, False):
            x = torch.zeros(N, 5, dtype=torch.float64)
            x[GRAPH.members == user] = 1e3 * present
            torch.manual_seed(0)
            model = nn.Linear(5, 3, bias=False).double()
            data = TensorDataset(x, torch.zeros(N, dtype=torch.long))
            options = {"mode": mode, "reduction": reduction}
            sums.append(released(model, data, scheme=everybody(), **options)[0])
        moved = float((sums[0] - sums[1]).norm())
        assert moved <= BOUND
        assert moved == pytest.approx(BOUND, rel=1e-5), size


def test_in_float32_no_user_is_longer_than_the_bound():
    """Many nearly equal rows, whose mean is taken, undone and taken again in float32."""
    users = Poisson(probability=1.0, dataset_size=1, steps=1)
    for size in (1, 7, 61):
        graph = graph_with((size,))
        data = TensorDataset(torch.full((size, 9), 0.7234567), torch.zeros(size, dtype=torch.long))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 3))
        found, _, _ = released(
            model,
            data,
            scheme=PerUser(graph=graph, users=users, group_size=size),
            max_grad_norm=1e-3,
            reduction="mean",
        )
        assert float(found.double().norm()) <= 1e-3 * (1 + 1e-6)


def test_norms_are_those_of_users():
    model, data = small_net().double(), TensorDataset(numbers(1, 4, 4), labels())
    _, _, private = released(model, data, scheme=everybody())
    assert private.last_norms.shape == (len(SIZES),)


def test_a_loss_that_mixes_rows_is_refused_within_a_user_too():
    """The probe looks at examples: what keeps these apart keeps users apart."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Linear(5, 3)

        def forward(self, x):
            return self.own(x - x.mean(0))

    model, data = Mixing().double(), TensorDataset(numbers(5), labels())
    with pytest.raises(RuntimeError, match="examples"):
        released(model, data, scheme=everybody())


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit():
    data = TensorDataset(numbers(1, 4, 4).float(), labels())
    users = MinSep(probability=0.4, min_sep=2, dataset_size=GRAPH.users, steps=8)
    options = {
        "scheme": PerUser(graph=GRAPH, users=users, group_size=2),
        "accountant": "gaussian",
        "max_physical_batch_size": 3,
        "noise_multiplier": 1.0,
    }

    def go(private, until=None):
        for x, y in private.loader:
            private.optimizer.zero_grad()
            nn.functional.cross_entropy(private.module(x), y).backward()
            private.optimizer.step()
            if private.steps_executed == until:
                return

    whole = make(small_net(), data, "bookkeeping", **options)
    go(whole)
    first = make(small_net(), data, "bookkeeping", **options)
    go(first, until=3)
    state = copy.deepcopy(first.state_dict())
    second = make(small_net(), data, "bookkeeping", **{**options, "seed": 77})
    second.load_state_dict(state)
    go(second)
    assert torch.equal(flat(second.module), flat(whole.module))
    other = {**options, "scheme": PerUser(graph=GRAPH, users=users, group_size=3)}
    with pytest.raises(ValueError, match="mechanism"):
        make(small_net(), data, "bookkeeping", **other).load_state_dict(state)


def test_row_groups_against_loops():
    generator = torch.Generator().manual_seed(1)
    for sizes in ([3], [1, 1, 1], [2, 5, 1, 4], [4, 4]):
        rows = torch.randn(sum(sizes), 2, 3, generator=generator)
        groups, parts = RowGroups(sizes), torch.split(rows, sizes)
        expected = torch.stack([part.sum(0) for part in parts])
        torch.testing.assert_close(groups.summed(rows), expected)
        padded = side_by_side(rows, groups)
        assert padded.shape == (len(sizes), max(sizes), 2, 3)
        for table, part in zip(padded, parts, strict=True):
            assert torch.equal(table[: len(part)], part)
            assert not table[len(part) :].any()
        values = torch.arange(len(sizes))
        assert groups.spread(values).tolist() == np.repeat(np.arange(len(sizes)), sizes).tolist()
        start, stop = groups.span(0, len(sizes))
        assert (start, stop) == (0, sum(sizes))
        index = torch.tensor([len(sizes) - 1, 0])
        assert torch.equal(rows[groups.rows_of(index)], torch.cat([parts[-1], parts[0]]))
        assert groups.part(0, 1).sizes.tolist() == sizes[:1]


def products(rows, positions=3):
    generator = torch.Generator().manual_seed(rows)
    left = torch.randn(rows, positions, 700, generator=generator).double()
    return OuterProducts(left, torch.randn(rows, positions, 800, generator=generator).double())


def looked_up(rows, positions=3):
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, 700, (rows, positions), generator=generator)
    return Gathered(ids, torch.randn(rows, positions, 800, generator=generator).double(), 700)


def expert(rows, positions=3):
    generator = torch.Generator().manual_seed(rows)
    left = torch.randn(rows, positions, 70, generator=generator).double()
    right = torch.randn(rows, positions, 80, generator=generator).double()
    return Routed(left, right, torch.randint(0, 4, (rows, positions), generator=generator), 4)


UNEVEN = [9, 1, 3, 1, 2, 8, 4, 1, 5]
FORMS = {
    "products": lambda n: [products(n)],
    "products, twice": lambda n: [products(n), products(n, 1)],
    "table": lambda n: [looked_up(n)],
    "tied": lambda n: [looked_up(n), products(n)],
    "experts": lambda n: [expert(n)],
    "of another shape": lambda n: [Viewed(products(n), torch.Size((70, 10, 800)))],
    "stacked": lambda n: [Stacked([products(n), products(n, 1)])],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_parts_of_about_the_same_size_are_the_whole(name):
    """Records of 1 to 9 rows in five parts, against the sums of gradients that are all formed."""
    groups, rows = RowGroups(UNEVEN), sum(UNEVEN)
    uses = [folded(use, groups).compact() for use in FORMS[name](rows)]
    assert all(isinstance(use, Parted) for use in uses)
    whole = sum(use.per_example(0, rows) for use in FORMS[name](rows))
    expected = torch.stack([part.sum(0) for part in whole.split(UNEVEN)])
    flat_rows = expected.flatten(1)

    def check(found, exact):
        torch.testing.assert_close(sum(use.per_example(0, use.rows) for use in found), exact)
        torch.testing.assert_close(norms_of_sum(list(found)), exact.flatten(1).norm(dim=1))
        assert (norms_of_sum(list(found)) >= exact.flatten(1).norm(dim=1) * (1 - 1e-12)).all()
        factors = torch.linspace(0.5, 2.0, len(exact), dtype=torch.float64)
        total = sum(use.weighted_sum(factors) for use in found)
        torch.testing.assert_close(total.flatten(), factors @ exact.flatten(1))

    torch.testing.assert_close(chunked_norms(uses), flat_rows.norm(dim=1))
    for start, stop in ((0, 1), (2, 7), (8, 9)):
        some = sum(use.per_example(start, stop) for use in uses)
        torch.testing.assert_close(some, expected[start:stop])
    held: list[torch.Tensor] = []
    for use in uses:
        use.keep(lambda tensor: held.append(tensor) or tensor.clone())
    for tensor in held:  # nothing reads them any more
        tensor.fill_(math.nan if tensor.is_floating_point() else 0)
    index = torch.tensor([0, 3, 4, 8])
    check([use.select(index) for use in uses], expected[index])
    check(uses, expected)
    for use in uses:  # nothing is left of a batch whose records are all broken
        nothing = use.select(torch.zeros(0, dtype=torch.int64))
        assert not nothing.weighted_sum(torch.zeros(0, dtype=torch.float64)).any()


def test_parts_take_in_gradients_and_leave_even_groups_alone():
    groups, rows = RowGroups(UNEVEN), sum(UNEVEN)
    one, other = folded(products(rows), groups), torch.randn(9, 700, 800).double()
    together = merge([Materialized(other), one])
    assert len(together) == 1
    expected = folded(products(rows), groups).per_example(0, 9) + other
    torch.testing.assert_close(together[0].per_example(0, 9), expected)
    assert isinstance(folded(products(12), RowGroups([3, 4, 3, 2])), Parted)
    assert isinstance(folded(products(10), RowGroups([3, 4, 3])), OuterProducts)
    assert isinstance(folded(products(12), 3), OuterProducts)
    assert isinstance(folded(Materialized(torch.randn(rows, 4)), groups), Materialized)


def test_parts_of_small_layers_become_gradients():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(sum(UNEVEN), 3, k, generator=generator).double() for k in (4, 5))
    use = folded(OuterProducts(left, right), RowGroups(UNEVEN)).compact()
    assert isinstance(use, Materialized)
    each = torch.einsum("rtm,rtn->rmn", left, right)
    torch.testing.assert_close(
        use.gradients, torch.stack([part.sum(0) for part in each.split(UNEVEN)])
    )
