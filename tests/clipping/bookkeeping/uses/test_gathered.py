"""Ways to use an embedding table: each is right, against one example at a time, or refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dptrain.clipping.bookkeeping.uses.gathered import Gathered
from tests.helpers.architectures import Architecture
from tests.helpers.bookkeeping_runs import ROWS, backward, case, check, check_like_loop, run_of
from tests.helpers.clipping_oracle import reference

WIDTH, ITEMS, STEPS = 4, 7, 3


class Tables(nn.Module):
    """A table of items, one of positions, a linear layer, and a function of these and the input."""

    def __init__(self, run, items=None):
        super().__init__()
        self.run = run
        self.user = nn.Linear(WIDTH, WIDTH)
        self.item = nn.Embedding(ITEMS, WIDTH) if items is None else items
        self.position = nn.Embedding(STEPS, WIDTH)
        self.register_buffer("chosen", torch.tensor([4, 0, 4, 6, 1]))

    def forward(self, *inputs):
        return self.run(self, *inputs)


def every(m):
    return m.item(torch.arange(ITEMS))


def normed(m, x):
    items = every(m)
    return (m.user(x)[:, None] * (items / items.norm())).sum(-1)


def written(m, x):
    items = every(m)
    items[1:3] *= 2
    return m.user(x) @ items.T


def in_a_list(m, x):
    u = m.user(x)
    return torch.stack([(u * m.item(torch.tensor(k))).sum(1) for k in range(ITEMS)], dim=1)


# Of inputs of shape (ROWS, WIDTH).
SHARED = {
    "scores by .T": lambda m, x: m.user(x) @ every(m).T,
    "scores by transpose": lambda m, x: m.user(x) @ every(m).transpose(-2, -1),
    "scores by F.linear": lambda m, x: F.linear(m.user(x), every(m)),
    "scores by einsum": lambda m, x: torch.einsum("bd,kd->bk", m.user(x), every(m)),
    "scores by a product of each": lambda m, x: (m.user(x)[:, None] * every(m)).sum(-1),
    "scores by cdist": lambda m, x: torch.cdist(m.user(x), every(m)),
    "scores by cosines": lambda m, x: F.cosine_similarity(
        m.user(x)[:, None], every(m)[None], dim=-1
    ),
    "scores of normalized items": lambda m, x: m.user(x) @ F.normalize(every(m), dim=-1).T,
    "items by the norm of all": normed,
    "items written into": written,
    "ids of one row": lambda m, x: (m.user(x)[:, None] * m.item(torch.arange(ITEMS)[None])).sum(-1),
    "ids in a column": lambda m, x: m.user(x) * m.item(torch.arange(2)[:, None]).sum(0),
    "ids of three dimensions": lambda m, x: (
        m.user(x) * m.item(torch.arange(6).view(1, 2, 3)).flatten(0, 2).prod(0)
    ),
    "ids of no dimension": lambda m, x: m.user(x) + m.item(torch.tensor(2)),
    "ids of one number": lambda m, x: m.user(x) + m.item(torch.tensor([2])),
    "ids of no dimension, each in turn": in_a_list,
    "ids as many as the rows": lambda m, x: m.user(x) @ m.item(torch.arange(ROWS)).T,
    "ids that a buffer holds": lambda m, x: m.user(x) @ m.item(m.chosen).T,
    "ids given twice": lambda m, x: m.user(x) @ m.item(torch.tensor([1, 1, 3])).T,
    "the mean of all": lambda m, x: m.user(x) - every(m).mean(0),
    "expanded": lambda m, x: m.user(x) * m.item(torch.arange(2)).expand(len(x), -1, -1).sum(1),
    "repeated": lambda m, x: m.user(x) * m.item(torch.arange(2)).repeat(len(x), 1, 1).sum(1),
    "through a layer": lambda m, x: m.user(x) @ m.user(every(m)).T,
    "through a nonlinearity": lambda m, x: m.user(x) @ torch.tanh(every(m)).T,
    "all attributes: the weight": lambda m, x: m.user(x) @ m.item.weight.T,
    "the weight with F.linear": lambda m, x: F.linear(m.user(x), m.item.weight),
    "the weight with F.embedding": lambda m, x: (
        m.user(x) @ F.embedding(torch.arange(ITEMS), m.item.weight).T
    ),
    "the weight with one more dimension": lambda m, x: (
        m.user(x)[:, None] * m.item.weight[None]
    ).sum(-1),
    "rows of the weight by ids": lambda m, x: m.user(x) @ m.item.weight[m.chosen].T,
    "rows of the weight by a slice": lambda m, x: m.user(x) @ m.item.weight[2:6].T,
    "a row of the weight": lambda m, x: m.user(x) + m.item.weight[3],
    "rows of the weight by index_select": lambda m, x: (
        m.user(x) @ m.item.weight.index_select(0, m.chosen).T
    ),
    "table and ids of the examples'": lambda m, x: (
        m.user(x) @ every(m).T + m.item((x[:, 0] > 0).long()).sum(1, keepdim=True)
    ),
    "table twice": lambda m, x: (m.user(x) @ every(m).T) @ every(m) + m.item(torch.tensor(0)),
}

# Of inputs of shape (ROWS, STEPS, WIDTH).
POSITIONS = {
    "one row": lambda m, x: m.user(x + m.position(torch.arange(STEPS)).unsqueeze(0)),
    "no row": lambda m, x: m.user(x + m.position(torch.arange(STEPS))),
    "as many as the input is long": lambda m, x: m.user(
        x + m.position(torch.arange(x.shape[1], device=x.device))
    ),
    "ids of one row": lambda m, x: m.user(x + m.position(torch.arange(STEPS)[None])),
    "ids of every row": lambda m, x: m.user(x + m.position(torch.arange(STEPS).expand(len(x), -1))),
    "backwards": lambda m, x: m.user(x + m.position(torch.arange(STEPS).flip(0))),
    "the weight": lambda m, x: m.user(x + m.position.weight),
    "the weight, as many": lambda m, x: m.user(x + m.position.weight[: x.shape[1]]),
    "after the layer": lambda m, x: m.user(x) + m.position(torch.arange(STEPS)),
    "beside it": lambda m, x: torch.cat(
        [m.user(x), m.position(torch.arange(STEPS)).expand(len(x), -1, -1)], dim=-1
    ),
    "a class token": lambda m, x: torch.cat(
        [m.item(torch.zeros(1, dtype=torch.long)).expand(len(x), 1, -1), m.user(x)], dim=1
    ),
    "queries": lambda m, x: F.scaled_dot_product_attention(
        m.item(torch.arange(2)).expand(len(x), -1, -1), m.user(x), x
    ),
    "dot products of queries": lambda m, x: m.item(torch.arange(2)) @ m.user(x).transpose(1, 2),
    "a codebook": lambda m, x: torch.cdist(m.user(x), every(m)).softmax(-1) @ every(m),
}

INPUTS = {"shared": (ROWS, WIDTH), "positions": (ROWS, STEPS, WIDTH)}
WAYS = [*(("shared", how) for how in SHARED), *(("positions", how) for how in POSITIONS)]


def made(kind, how, shape=None):
    torch.manual_seed(0)
    run = (SHARED if kind == "shared" else POSITIONS)[how]
    return case(Tables(run), torch.randn(shape or INPUTS[kind]))


@pytest.mark.sample(every=7)
@pytest.mark.parametrize(("kind", "how"), WAYS)
def test_a_table_that_all_examples_share(kind, how):
    check_like_loop(made(kind, how))


# What only passes over few rows show; as many ids as there are rows may be one an example.
UNSEEN = {
    "ids as many as the rows": "one id per example",
    "ids that a buffer holds": "one id per example",
    "table and ids of the examples'": "one id per example",
    "ids given twice": "neither consecutive, as positions are, nor all equal",
    **dict.fromkeys(
        [how for how in [*SHARED, *POSITIONS] if "the weight" in how], "used outside the layer"
    ),
}


@pytest.mark.parametrize(("kind", "how"), WAYS)
def test_without_a_probe(kind, how):
    """The same function, with the same gradients, or the true reason."""
    a = made(kind, how)
    if how not in UNSEEN:
        check_like_loop(a, probe="off")
        return
    with pytest.raises(RuntimeError, match=UNSEEN[how]):
        check_like_loop(a, probe="off")


REFUSED = {
    "a row for each example": (
        lambda m, x: m.user(x) + m.position.weight[: len(x)],
        "positions counted along it",
    ),
    "ids that the batch decides": (
        lambda m, x: m.user(x) @ m.item((x.max() > 0).long() + torch.arange(3)).T,
        "for one example (changed when|on) another",
    ),
    "one id that an example decides": (
        lambda m, x: m.user(x) + m.item((x[0, 0] > 0).long()),
        "for one example (changed when|on) another|was changed",
    ),
    "ids that count the rows": (
        lambda m, x: m.user(x) + m.item(torch.tensor(len(x) % 2)),
        "was left out of the batch",
    ),
    "the mean of the batch's ids": (
        lambda m, x: m.user(x) + m.item((x[:, 0] > 0).long()).mean(0),
        "was changed",
    ),
    "a number for the table's frequencies": (
        lambda m, x: m.user(x) + m.item(torch.arange(3)).mean(0) * m.user(x).mean(),
        "was changed|no row for each example",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_mixes_the_examples_is_refused(how):
    run, reason = REFUSED[how]
    torch.manual_seed(0)
    items = nn.Embedding(ROWS, WIDTH)
    a = case(Tables(run, items), torch.randn(ROWS, WIDTH))
    a.module.position = nn.Embedding(ROWS, WIDTH).double()
    with pytest.raises(RuntimeError, match=reason):
        check_like_loop(a)


@pytest.mark.parametrize("padding", [1, -2, None])
def test_padding(padding):
    torch.manual_seed(0)
    items = nn.Embedding(ITEMS, WIDTH, padding_idx=padding)
    run = SHARED["table and ids of the examples'"]
    check_like_loop(case(Tables(run, items), torch.randn(ROWS, WIDTH)))


def test_sparse_gradients():
    """As dense ones: the loop wants these."""
    a = made("shared", "scores by .T")
    wanted = reference(a.module, a.inputs, a.targets)
    a.module.item.sparse = True
    private = run_of(a)
    backward(private)
    check(private, wanted)


def test_several_rows_an_example():
    torch.manual_seed(0)
    a = Architecture(
        module=Tables(POSITIONS["one row"]).double(),
        inputs=(torch.randn(2 * ROWS, STEPS, WIDTH, dtype=torch.float64),),
        targets=torch.randn(2 * ROWS, dtype=torch.float64),
        views=2,
    )
    wanted = reference(a.module, a.inputs, a.targets, 2)
    private = run_of(a)
    backward(private)
    check(private, wanted)


def test_few_of_many_rows_take_no_memory_for_the_others(monkeypatch):
    """Nothing has a row for each example and each word."""
    torch.manual_seed(0)
    a = case(
        Tables(lambda m, x: m.user(x) + m.item(torch.tensor([[7, 3]])).sum(1), nn.Embedding(9, 4)),
        torch.randn(ROWS, WIDTH),
    )
    made_of = []
    compact = Gathered.compact
    monkeypatch.setattr(Gathered, "compact", lambda use: made_of.append(use) or compact(use))
    check_like_loop(a)
    assert made_of
    assert all(use.gradients.shape == (use.rows, 2, WIDTH) for use in made_of)
