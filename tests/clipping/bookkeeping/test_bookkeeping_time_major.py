"""Modules that are fed tensors of (steps, rows, ...), as torch's recurrent layers take them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from dptrain import Poisson
from tests.helpers.bookkeeping_runs import backward, case, check, run_of, take
from tests.helpers.clipping_oracle import reference
from tests.helpers.engine import make

ROWS, LENGTH, WIDTH, HIDDEN = 5, 7, 3, 4
KINDS = [nn.LSTM, nn.GRU, nn.RNN]


class Tagger(nn.Module):
    """An embedding, a recurrent layer and a linear one.

    Args:
        layer: with ``batch_first=False``.
        take: makes (rows, ...) of the recurrent layer, what is looked up, and the lengths.
    """

    def __init__(self, layer, take):
        super().__init__()
        self.look_up = nn.Embedding(11, layer.input_size)
        self.norm = nn.LayerNorm(layer.input_size)
        self.layer, self.take = layer, take
        out = layer.hidden_size * (2 if layer.bidirectional else 1)
        self.last = nn.Linear(out, 2)

    def forward(self, ids, lengths):
        return self.take(self, self.norm(self.look_up(ids)), lengths)


def packed(m, x, lengths):
    steps = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
    output, _ = pad_packed_sequence(m.layer(steps)[0], total_length=len(x))
    return m.last(output)[0]


def final_state(m, x, lengths):
    steps = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
    states = m.layer(steps)[1]
    state = states[0] if isinstance(states, tuple) else states
    return m.last(torch.cat([*state[-m.layer.bidirectional - 1 :]], 1))


def last_step(m, x, lengths):
    output, _ = m.layer(x)
    return m.last(output[lengths - 1, torch.arange(len(lengths))])


def mean(m, x, lengths):
    output, _ = m.layer(x)
    there = torch.arange(len(x))[:, None] < lengths
    return m.last((output * there[:, :, None]).sum(0) / lengths[:, None])


TAKES = [packed, final_state, last_step, mean]


class Net(nn.Module):
    """Layers by name, and what is made of them and the arguments."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs):
        return self.run(self, *inputs)


class First(nn.Module):
    """A module with the rows first, made of one that takes, and may return, them second."""

    def __init__(self, module, back, others=()):
        super().__init__()
        self.inner, self.back, self.others = module, back, others

    def forward(self, x, *inputs):
        return self.back(self.inner(x.transpose(0, 1), *inputs, *self.others), x)


def rows_first(output, _):
    return output


def rows_second(output, _):
    return output.transpose(0, 1)


def flattened(output, x):
    return output.unflatten(0, (x.shape[1], len(x))).transpose(0, 1)


def check_time_major(
    module, *inputs, back=rows_first, dtype=torch.float64, views=1, others=(), **options
):
    """One batch, given as (rows, steps, ...), against the loop over its examples."""
    a = case(module, *inputs, dtype=dtype)
    a.views = views
    wanted = reference(First(copy.deepcopy(a.module), back, others), a.inputs, a.targets, views)
    private = run_of(a, **options)
    backward(private, First(private.module, back, others))
    check(private, wanted)
    return private


def words(rows=ROWS, length=LENGTH):
    return torch.randint(11, (rows, length)), torch.randint(1, length + 1, (rows,))


def floats(rows=ROWS, length=LENGTH, width=WIDTH):
    return torch.randn(rows, length, width)


@pytest.mark.followed
@pytest.mark.sample(every=34)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("take", TAKES)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_lengths(kind, take, dtype):
    torch.manual_seed(0)
    layer = kind(WIDTH, HIDDEN, 2, bidirectional=True)
    check_time_major(Tagger(layer, take), *words(), dtype=dtype)


def every_step(layer=nn.LSTM):
    layers = {"before": nn.Linear(WIDTH, WIDTH), "f": layer(WIDTH, HIDDEN)}
    return Net(lambda m, x: m.last(m.f(m.before(x))[0]), **layers, last=nn.Linear(HIDDEN, 2))


@pytest.mark.followed
@pytest.mark.parametrize("length", [1, 2, 3, ROWS, ROWS + 1, 12])
def test_lengths_and_as_many_steps_as_rows(length):
    """Of a square, the batch that it was made of tells which side is which."""
    torch.manual_seed(0)
    private = check_time_major(every_step(), floats(length=length), back=rows_second)
    assert private.optimizer.owners.findings.why is None


def test_views_of_an_example():
    torch.manual_seed(0)
    check_time_major(every_step(nn.GRU), floats(6), back=rows_second, views=2)


def steps_of_a_cell(m, x):
    state = x.new_zeros(x.shape[1], HIDDEN)
    for step in x:
        state = m.f(step, state)
    return state


def encoded(m, x, hidden):
    return m.f(x, src_key_padding_mask=hidden)


ENCODER = (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), 2)
OTHERS = {
    "cell": (lambda: Net(steps_of_a_cell, f=nn.GRUCell(WIDTH, HIDDEN)), [floats], rows_first),
    "attention": (
        lambda: Net(lambda m, x: m.f(x, x, x)[0], f=nn.MultiheadAttention(WIDTH, 1)),
        [floats],
        rows_second,
    ),
    "encoder": (
        lambda: Net(
            encoded, f=nn.TransformerEncoder(*copy.deepcopy(ENCODER), enable_nested_tensor=False)
        ),
        [
            lambda: floats(width=4),
            lambda: torch.arange(LENGTH) >= torch.tensor([1, 7, 3, 4, 6])[:, None],
        ],
        rows_second,
    ),
    "convolution": (
        lambda: Net(lambda m, x: m.f(x.permute(1, 2, 0)).mean(2), f=nn.Conv1d(WIDTH, 2, 3)),
        [floats],
        rows_first,
    ),
    "bag": (
        lambda: Net(lambda m, ids: m.f(ids.t()), f=nn.EmbeddingBag(11, 2)),
        [lambda: words()[0]],
        rows_first,
    ),
    "logits of all steps, flattened": (
        lambda: Net(
            lambda m, ids: m.last(m.f(m.look_up(ids))[0]).view(-1, 11),
            look_up=nn.Embedding(11, WIDTH),
            f=nn.LSTM(WIDTH, HIDDEN),
            last=nn.Linear(HIDDEN, 11),
        ),
        [lambda: words()[0]],
        flattened,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers(name):
    torch.manual_seed(0)
    build, inputs, back = OTHERS[name]
    check_time_major(build(), *(draw() for draw in inputs), back=back)


class By(nn.Module):
    """A module by a function of it and what it is given."""

    def __init__(self, module, call):
        super().__init__()
        self.inner, self.call = module, call

    def forward(self, *inputs):
        return self.call(self.inner, *inputs)


def check_by(call, module, *inputs):
    """One batch that the module is given in another way, against the loop over its examples."""
    a = case(module, *inputs)
    wanted = reference(By(copy.deepcopy(a.module), call), a.inputs, a.targets)
    private = run_of(a)
    backward(private, By(private.module, call))
    check(private, wanted)


def test_states_that_the_module_is_given():
    """They have the rows second in any case, as torch's layers take them."""
    torch.manual_seed(0)
    module = Net(lambda m, x, h: m.f(x, h)[0], f=nn.GRU(WIDTH, HIDDEN, 2, batch_first=True))

    def call(m, x, h):
        return m(x, h.transpose(0, 1).contiguous())

    check_by(call, module, floats(), floats(length=2, width=HIDDEN))


def test_what_all_examples_share_may_be_as_long_by_chance():
    """As a table of positions for every head is."""
    torch.manual_seed(0)
    table = torch.randn(2, ROWS, ROWS).double()

    def attend(m, x, table):
        h = m.f(x)[:, None]
        return (h @ h.transpose(2, 3) + table).softmax(3) @ h

    check_by(lambda m, x: m(x, table), Net(attend, f=nn.Linear(WIDTH, 2)), floats(length=ROWS))


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return x * self.scale


def flat(m, x):
    return m.f(x.reshape(-1, WIDTH)).unflatten(0, x.shape[:2])


REFUSED = {
    "batch_first": (lambda m, x: m.f(x)[0], lambda: nn.LSTM(WIDTH, 2, batch_first=True)),
    "flat": (flat, lambda: nn.Linear(WIDTH, 2)),
    "bilinear": (lambda m, x: m.f(x, x), lambda: nn.Bilinear(WIDTH, WIDTH, 2)),
    "less the mean": (lambda m, x: m.f(x - x.mean(1, keepdim=True)), lambda: nn.Linear(WIDTH, 2)),
    "scan": (lambda m, x: m.f(x.cumsum(1)), lambda: nn.Linear(WIDTH, 2)),
    "last row": (lambda m, x: m.f(x) + m.f(x)[:, -1:], lambda: nn.Linear(WIDTH, 2)),
    "share of the rows": (lambda m, x: m.f(x) / x.shape[1], lambda: nn.Linear(WIDTH, 2)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_right_is_refused_by_the_argument(name):
    torch.manual_seed(0)
    run, layer = REFUSED[name]
    a = case(Net(run, f=layer()), floats())
    private = run_of(a)
    with pytest.raises(RuntimeError) as error:
        backward(private, First(private.module, rows_second))
    assert (
        "Of the module's arguments, '0' of shape (7, 5, 3) has the batch's 5 rows in the second "
        "dimension"
    ) in str(error.value)
    assert "transpose" in str(error.value)


def test_bare_parameters_are_refused():
    torch.manual_seed(0)
    a = case(Net(lambda m, x: m.f(x), f=Bare()), floats())
    private = run_of(a)
    with pytest.raises(RuntimeError, match=r"layer 'f', a Bare.*in the first dimension"):
        backward(private, First(private.module, rows_second))


class TimeMajor(nn.Module):
    def __init__(self):
        super().__init__()
        self.look_up, self.f = nn.Embedding(11, WIDTH), nn.LSTM(WIDTH, HIDDEN)
        self.last = nn.Linear(HIDDEN, 11)

    def forward(self, ids):
        return self.last(self.f(self.look_up(ids))[0])


def private_run(data, steps):
    torch.manual_seed(0)
    scheme = Poisson(probability=0.5, dataset_size=12, steps=steps)
    return make(TimeMajor(), data, mode="bookkeeping", scheme=scheme)


def take_step(private, ids):
    private.optimizer.zero_grad()
    private.module(ids).square().mean().backward()
    private.optimizer.step()


def run_over(data, turned):
    """A run on batches of many sizes, some of them of as many rows as steps."""
    private = private_run(data, 30)
    found = set()
    for batch in private.loader:
        ids = turned(batch)
        take_step(private, ids)
        found.add(ids.shape[1])
    assert {LENGTH - 1, LENGTH, LENGTH + 1} <= found
    return private.optimizer.owners.findings


def turn(items):
    return pad_sequence([ids for (ids,) in items])


@pytest.mark.followed
def test_batches_of_all_sizes():
    data = TensorDataset(torch.randint(11, (12, LENGTH)))
    assert run_over(data, lambda batch: batch[0].t()).why is None


@pytest.mark.followed
def test_batches_that_a_collate_function_turns():
    data = DataLoader(
        TensorDataset(torch.randint(11, (12, LENGTH))),
        batch_size=6,
        collate_fn=turn,
    )
    assert "tensor without a row each" in run_over(data, lambda batch: batch).why


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("collate", [None, turn])
@pytest.mark.followed
def test_a_loss_that_divides_by_the_batchs_tokens_is_refused(collate, flat):
    ids = torch.randint(11, (12, LENGTH + 1))
    ids[::2, 4:] = 0
    data = DataLoader(TensorDataset(ids), batch_size=6, collate_fn=collate)
    private = private_run(data, 3)
    batch = next(iter(private.loader))
    batch = batch if collate else batch[0].t()
    logits = private.module(batch[:-1])
    targets = batch[1:]
    logits, targets = (
        (logits.flatten(0, 1), targets.flatten()) if flat else (logits.movedim(2, 1), targets)
    )
    loss = F.cross_entropy(logits, targets, ignore_index=0)
    with pytest.raises(RuntimeError, match=r"dptrain\.losses"):
        loss.backward()


@pytest.mark.usefixtures("_unfollowed")
def test_such_a_loss_is_recognized_where_nothing_is_followed():
    ids = torch.randint(11, (12, LENGTH + 1))
    ids[::2, 4:] = 0
    a = case(TimeMajor(), ids)
    private = run_of(a)
    (given,), _ = take(private)
    logits = private.module(given.t()[:-1])
    loss = F.cross_entropy(logits.flatten(0, 1), given.t()[1:].flatten(), ignore_index=0)
    with pytest.raises(RuntimeError, match="the examples' shares of it differ and add up to 1"):
        loss.backward()


@pytest.mark.followed
def test_a_square_with_the_rows_first_is_refused_whatever_came_before():
    """Where a step is followed, as the loader says whose they are."""
    private = private_run(TensorDataset(torch.randint(11, (12, LENGTH))), 50)
    loader = iter(private.loader)
    for (ids,) in loader:
        private.optimizer.owners._due = True  # the next step is followed
        if len(ids) == LENGTH:
            break
        take_step(private, ids.t())
    with pytest.raises(RuntimeError, match="no example's contribution can be bounded"):
        take_step(private, ids)
