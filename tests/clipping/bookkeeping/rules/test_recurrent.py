"""torch's recurrent layers: its own outputs, and gradients of one example at a time."""

import contextlib
import copy
import random

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

from dptrain import Gradients, Poisson, PrivacyEngine
from dptrain.clipping.base import products
from dptrain.clipping.bookkeeping.layer_tap import LayerTap
from dptrain.clipping.bookkeeping.rules.table import RULES
from dptrain.losses import TokenCrossEntropy
from dptrain.testing import check_layer_rule
from tests.helpers.bookkeeping_runs import backward, case, check, check_like_loop, run_of, take
from tests.helpers.clipping_oracle import reference

ROWS, LENGTH, WIDTH, HIDDEN = 5, 7, 3, 4
KINDS = [nn.LSTM, nn.GRU, nn.RNN]
CELLS = [nn.LSTMCell, nn.GRUCell, nn.RNNCell]


class Recurrent(nn.Module):
    """A recurrent layer of which all outputs are used, between layers that have the rows first.

    Args:
        layer: any of torch's.
        packed: ``None``, or whether packed sequences have to come sorted.
        states: whether initial states are made of the input.
    """

    def __init__(self, layer, *, packed=None, states=False):
        super().__init__()
        self.layer, self.packed = layer, packed
        self.before = nn.Linear(WIDTH, layer.input_size)
        self.sides = (2 if layer.bidirectional else 1) * layer.num_layers
        out = layer.proj_size or layer.hidden_size
        self.widths = [out, layer.hidden_size] if isinstance(layer, nn.LSTM) else [out]
        wide = self.sides * sum(self.widths)
        self.initial = nn.Linear(WIDTH, wide) if states else None
        self.last = nn.Linear(out * (2 if layer.bidirectional else 1), 2)

    def forward(self, x, lengths=None):
        rows, first = len(x), self.layer.batch_first
        hx = None
        if self.initial is not None:
            given = self.initial(x.mean(1)).split([self.sides * w for w in self.widths], 1)
            hx = tuple(
                state.reshape(rows, self.sides, width).transpose(0, 1).contiguous()
                for state, width in zip(given, self.widths, strict=True)
            )
            hx = hx if isinstance(self.layer, nn.LSTM) else hx[0]
        h = self.before(x)
        h = h if first else h.transpose(0, 1)
        if self.packed is None:
            output, states = self.layer(h, hx)
            output = output if first else output.transpose(0, 1)
        else:
            steps = pack_padded_sequence(
                h, lengths.cpu(), batch_first=first, enforce_sorted=self.packed
            )
            output, states = self.layer(steps, hx)
            output, _ = pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])
        states = states if isinstance(states, tuple) else (states,)
        parts = [self.last(output), *(state.transpose(0, 1) for state in states)]
        return torch.cat([part.flatten(1) for part in parts], 1)


class Output(nn.Module):
    """The states after each step."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def random_layer(rng):
    kind = rng.choice(KINDS)
    options = {
        "num_layers": rng.choice([1, 1, 2, 3]),
        "bidirectional": rng.random() < 0.5,
        "bias": rng.random() < 0.7,
        "batch_first": rng.random() < 0.5,
    }
    if kind is nn.RNN:
        options["nonlinearity"] = rng.choice(["tanh", "relu"])
    if kind is nn.LSTM and rng.random() < 0.4:
        options["proj_size"] = 2
    return kind(rng.randint(1, 4), HIDDEN, **options)


def lengths_of(rng, rows, longest, ordered):
    lengths = [rng.randint(1, longest) for _ in range(rows)]
    return torch.tensor(sorted(lengths, reverse=True) if ordered else lengths)


@pytest.mark.sample(every=21)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(24))
def test_every_recurrent_layer(seed, dtype):
    """Layouts, packed sequences, layers, directions, projections, states, and what is frozen."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    packed = rng.choice([None, True, False])
    module = Recurrent(random_layer(rng), packed=packed, states=rng.random() < 0.5)
    if rng.random() < 0.5:
        for p in list(module.layer.parameters()):
            p.requires_grad_(rng.random() < 0.6)
    rows = rng.choice([2, ROWS])
    longest = rng.choice([1, 6, LENGTH])
    inputs = [torch.randn(rows, longest, WIDTH)]
    if packed is not None:
        inputs.append(lengths_of(rng, rows, longest, packed))
    a = case(module, *inputs, dtype=dtype)
    expected = copy.deepcopy(a.module)(*a.inputs)
    private = check_like_loop(a)
    inputs, _ = take(private)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(private.module(*inputs), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["output", "hidden"])
def test_one_of_the_outputs_alone(kind, part):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(WIDTH, HIDDEN, 2, bidirectional=True, batch_first=True)

        def forward(self, x):
            output, states = self.layer(x)
            states = states[0] if isinstance(states, tuple) else states
            return output[:, 2] if part == "output" else states[1]

    torch.manual_seed(0)
    check_like_loop(case(Part(), torch.randn(ROWS, LENGTH, WIDTH)))


def test_the_cells_of_an_lstm_alone():
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(WIDTH, HIDDEN, batch_first=True)

        def forward(self, x):
            return self.layer(x)[1][1][0]

    torch.manual_seed(0)
    check_like_loop(case(Cells(), torch.randn(ROWS, LENGTH, WIDTH)))


class Steps(nn.Module):
    """A cell over the steps of a sequence; the state starts from the input, or from zeros."""

    def __init__(self, cell, states):
        super().__init__()
        self.cell, self.initial = cell, nn.Linear(WIDTH, HIDDEN) if states else None

    def forward(self, x):
        state = None
        if self.initial is not None:
            state = self.initial(x[:, 0])
            state = (state, state.sin()) if isinstance(self.cell, nn.LSTMCell) else state
        for step in x.unbind(1):
            state = self.cell(step, state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("trained", [("",), ("weight_hh",), ("bias_ih", "weight_ih"), ("bias",)])
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind, states, trained):
    torch.manual_seed(0)
    cell = kind(WIDTH, HIDDEN)
    for name, p in cell.named_parameters():
        p.requires_grad_(name.startswith(trained))
    check_like_loop(case(Steps(cell, states), torch.randn(ROWS, 3, WIDTH)))


def test_cells_of_other_kinds():
    torch.manual_seed(0)
    x = torch.randn(ROWS, 3, WIDTH)
    check_like_loop(case(Steps(nn.RNNCell(WIDTH, HIDDEN, nonlinearity="relu"), True), x))
    check_like_loop(case(Steps(nn.LSTMCell(WIDTH, HIDDEN, bias=False), True), x))


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trained", [["weight_hh_l0"], ["bias_hh_l0"], ["weight_ih_l1", "bias"]])
def test_what_is_frozen(kind, trained):
    torch.manual_seed(0)
    module = Recurrent(kind(WIDTH, HIDDEN, 2, batch_first=True))
    for p in module.parameters():
        p.requires_grad_(False)
    for name, p in module.layer.named_parameters():
        p.requires_grad_(name.startswith(tuple(trained)))
    check_like_loop(case(module, torch.randn(ROWS, LENGTH, WIDTH)))


def test_biases_alone_keep_no_inputs():
    torch.manual_seed(0)
    module = nn.GRU(WIDTH, HIDDEN, batch_first=True)
    for name, p in module.named_parameters():
        p.requires_grad_(name.startswith("bias"))

    check_like_loop(case(Output(module), torch.randn(ROWS, LENGTH, WIDTH)))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("length", [2, 40])  # products are kept, or gradients
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_used_twice(kind, length):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(WIDTH, WIDTH, batch_first=True)

        def forward(self, x):
            return self.layer(self.layer(x)[0])[0]

    torch.manual_seed(0)
    check_like_loop(case(Twice(), torch.randn(ROWS, length, WIDTH)))


@pytest.mark.parametrize("kind", KINDS)
def test_views_of_an_example(kind):
    torch.manual_seed(0)
    a = case(Recurrent(kind(WIDTH, HIDDEN, batch_first=True)), torch.randn(6, LENGTH, WIDTH))
    a.views = 2
    wanted = reference(a.module, a.inputs, a.targets, 2)
    private = run_of(a)
    backward(private)
    check(private, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_is_torchs(kind):
    """The very same numbers are dropped, as torch's generator is asked for them in its order."""
    torch.manual_seed(0)
    layer = kind(WIDTH, HIDDEN, 3, dropout=0.5, batch_first=True).double()
    plain = copy.deepcopy(layer)
    x = torch.randn(ROWS, LENGTH, WIDTH).double()
    a = case(Output(layer), x)
    private = run_of(a)
    inputs, _ = take(private)
    torch.manual_seed(7)
    found = private.module(*inputs)
    torch.manual_seed(7)
    torch.testing.assert_close(found, plain(x)[0], rtol=1e-12, atol=1e-12)
    layer.eval()
    torch.testing.assert_close(private.module(*inputs), plain.eval()(x)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_subclasses_and_layers_that_are_passed_by_name(kind):
    class Own(kind):
        pass

    class Named(Output):
        def forward(self, x):
            return self.layer(input=x, hx=None)[0]

    torch.manual_seed(0)
    check_like_loop(case(Named(Own(WIDTH, HIDDEN, batch_first=True)), torch.randn(ROWS, 4, WIDTH)))


@pytest.mark.slow
def test_the_rules_by_themselves():
    torch.manual_seed(0)
    x = torch.randn(4, 6, WIDTH)
    check_layer_rule(nn.LSTM(WIDTH, HIDDEN, 2, batch_first=True, bidirectional=True), x)
    check_layer_rule(nn.LSTM(WIDTH, HIDDEN, batch_first=True, proj_size=2, bias=False), x)
    check_layer_rule(nn.LSTMCell(WIDTH, HIDDEN), x[:, 0])
    check_layer_rule(nn.GRUCell(WIDTH, HIDDEN), (x[:, 0], torch.randn(4, HIDDEN)))
    check_layer_rule(nn.RNNCell(WIDTH, HIDDEN), x[:, 0])


class Second(nn.Module):
    """A layer with the rows in the second dimension, rightly or not."""

    def __init__(self, layer, right):
        super().__init__()
        self.layer, self.right = layer, right

    def forward(self, x):
        if self.right:
            return self.layer(x.transpose(0, 1))[0].transpose(0, 1)
        return self.layer(x)[0]


@pytest.mark.parametrize("probe", ["shapes", "off"])
@pytest.mark.parametrize("length", [1, 2, ROWS, ROWS + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_examples_that_are_taken_for_steps_are_refused(kind, length, probe):
    torch.manual_seed(0)
    a = case(Second(kind(WIDTH, HIDDEN), right=False), torch.randn(ROWS, length, WIDTH))
    private = run_of(a, probe=probe)
    with pytest.raises(RuntimeError, match=r"batch_first=False|(rows in|gradients for) a batch of"):
        backward(private)


@pytest.mark.parametrize("length", [1, 2, ROWS, ROWS + 1])
def test_as_many_steps_as_examples_are_no_obstacle_to_who_has_them_right(length):
    torch.manual_seed(0)
    a = case(Second(nn.GRU(WIDTH, HIDDEN), right=True), torch.randn(ROWS, length, WIDTH))
    check_like_loop(a)


def test_as_many_steps_as_examples_without_a_probe():
    torch.manual_seed(0)
    a = case(Second(nn.GRU(WIDTH, HIDDEN), right=True), torch.randn(ROWS, ROWS, WIDTH))
    with pytest.raises(RuntimeError, match=r"shape \(5, 5, 3\).*or examples. Use batch_first"):
        backward(run_of(a, probe="off"))


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_rows_that_the_model_reorders_itself_are_refused(enforce_sorted):
    class Sorted(Recurrent):
        def forward(self, x, lengths):
            order = lengths.argsort(descending=True)
            return super().forward(x[order], lengths[order])

    torch.manual_seed(0)
    layer = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
    a = case(
        Sorted(layer, packed=enforce_sorted),
        torch.randn(ROWS, LENGTH, WIDTH),
        torch.tensor([2, 7, 3, 5, 1]),
    )
    with pytest.raises(RuntimeError, match="changed when another example of the batch was changed"):
        backward(run_of(a))


def test_what_is_not_a_row_an_example_is_refused():
    x = torch.randn(ROWS, LENGTH, WIDTH).double()
    private = run_of(case(Output(nn.LSTM(WIDTH, HIDDEN, batch_first=True)), x))
    take(private)
    layer = private.module.layer
    with pytest.raises(
        RuntimeError, match=r"nn.LSTM is called on an input of shape \(7, 3\).*three"
    ):
        layer(x[0])
    with pytest.raises(RuntimeError, match="at least one time step"):
        layer(x[:, :0])
    with pytest.raises(RuntimeError, match=r"Expected hidden\[0\] size"):
        layer(x, (x.new_zeros(1, 1, HIDDEN),) * 2)
    private = run_of(case(Steps(nn.GRUCell(WIDTH, HIDDEN), False), x))
    take(private)
    with pytest.raises(
        RuntimeError, match=r"shapes \[\(5, 3\), \(1, 4\)\]: they must be \(rows, 3\)"
    ):
        private.module.cell(x[:, 0], x.new_zeros(1, HIDDEN))
    with pytest.raises(RuntimeError, match=r"nn.GRUCell is called with .* \[\(3,\)\]"):
        private.module.cell(x[0, 0])


def test_weights_that_are_one_parameter_are_refused():
    layer = nn.RNN(WIDTH, HIDDEN, batch_first=True)
    layer.bias_hh_l0 = layer.bias_ih_l0
    with pytest.raises(ValueError, match="'bias_ih_l0' and 'bias_hh_l0' are the same parameter"):
        run_of(case(Output(layer), torch.randn(ROWS, LENGTH, WIDTH)))


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_half_precision(kind, autocast):
    """Outputs have torch's dtype and are as near as that allows; norms are taken in float32."""
    torch.manual_seed(0)
    layer = kind(WIDTH, HIDDEN)
    cell = isinstance(layer, nn.RNNCellBase)
    x = torch.randn(ROWS, WIDTH) if cell else torch.randn(2, ROWS, WIDTH)
    if not autocast:
        layer, x = layer.bfloat16(), x.bfloat16()
    plain = copy.deepcopy(layer)
    tap = LayerTap(layer, RULES[kind], Book(ROWS), torch.zeros((), requires_grad=True))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, found = torchs_own(plain, x), layer(x)
    for ours, theirs in zip(flat(found), flat(expected), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        sum(t.float().square().sum() for t in flat(found)).backward()
    exact = copy.deepcopy(plain).double()
    for i in range(ROWS):
        one = (x[i : i + 1] if cell else x[:, i : i + 1]).double()
        loss = sum(t.square().sum() for t in flat(exact(one)))
        wanted = torch.autograd.grad(loss, list(exact.parameters()))
        for p, g in zip(layer.parameters(), wanted, strict=True):
            (use,) = tap.observe.book.uses[p]
            own = use.per_example(i, i + 1)[0]
            assert own.dtype == torch.float32
            assert (own - g).norm() <= 0.02 * sum(w.norm() for w in wanted)


def torchs_own(layer, x):
    """What torch computes; where oneDNN has no such LSTM for the processor, float64, rounded."""
    try:
        return layer(x)
    except RuntimeError as error:
        if "primitive descriptor" not in str(error):
            raise
    with torch.autocast("cpu", enabled=False):
        output, state = copy.deepcopy(layer).double()(x.double())
    return output.bfloat16(), tuple(t.bfloat16() for t in state)


def flat(output):
    return [t for part in output for t in flat(part)] if isinstance(output, tuple) else [output]


class Book:
    """Keeps what a tap reports."""

    def __init__(self, rows):
        self.number, self.uses = rows, {}

    def rows(self):
        return self.number

    def at_hand(self):
        return None

    def idle(self):
        return False

    def unseen(self):
        return contextlib.nullcontext()

    def doubt(self, layer):
        return None

    def saw(self, layer, inputs, gradient):
        return False

    def record(self, uses, since=None, doubt=None):
        for p, use in uses.items():
            self.uses.setdefault(p, []).append(use)


def test_create_graph_is_refused():
    x = torch.randn(ROWS, LENGTH, WIDTH).double()
    private = run_of(case(Output(nn.LSTM(WIDTH, HIDDEN, batch_first=True)), x))
    take(private)
    x.requires_grad_()
    loss = private.module(x).square().sum()
    with pytest.raises(RuntimeError, match=r"create_graph=True: .* gradient penalty"):
        torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"create_graph=True: .* gradient penalty"):
        loss.backward(create_graph=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_by_the_inputs_alone_reports_nothing(kind):
    torch.manual_seed(0)
    module = Output(kind(WIDTH, HIDDEN, batch_first=True))
    a = case(module, torch.randn(ROWS, LENGTH, WIDTH))
    wanted = reference(a.module, a.inputs, a.targets)
    plain = copy.deepcopy(a.module)
    private = run_of(a)
    backward(private)
    x = a.inputs[0].clone().requires_grad_()
    (found,) = torch.autograd.grad(private.module(x).square().sum(), x)
    (right,) = torch.autograd.grad(plain(x).square().sum(), x)
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)
    check(private, wanted)


class Tagger(nn.Module):
    """A tag for every word of a sentence that is not padding."""

    def __init__(self, words, tags):
        super().__init__()
        self.words = nn.Embedding(words, 8, padding_idx=0)
        self.sentence = nn.LSTM(8, 12, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(24, tags)

    def forward(self, ids, lengths):
        steps = pack_padded_sequence(
            self.words(ids), lengths, batch_first=True, enforce_sorted=False
        )
        h, _ = pad_packed_sequence(self.sentence(steps)[0], batch_first=True, total_length=9)
        return self.tags(h)


@pytest.mark.slow
def test_a_tagger_learns_from_packed_sentences():
    """The tag of a word is that of the word before it: nothing but the recurrence knows it."""
    torch.manual_seed(0)
    sentences, tags = 400, 3
    ids = torch.randint(1, 1 + tags, (sentences, 9))
    lengths = torch.randint(2, 10, (sentences,))
    ids[torch.arange(9) >= lengths[:, None]] = 0
    labels = torch.cat([torch.zeros(sentences, 1).long(), (ids[:, :-1] - 1).clamp(min=0)], 1)
    labels[ids == 0] = -100
    module = Tagger(1 + tags, tags)
    private = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.Adam(module.parameters(), lr=0.02),
        data=TensorDataset(ids, lengths, labels),
        scheme=Poisson(probability=0.25, dataset_size=sentences, steps=60),
        noise_multiplier=0.5,
        max_grad_norm=1.0,
        gradients=Gradients(mode="bookkeeping"),
        seed=1,
    )
    criterion = TokenCrossEntropy()
    for ids_, lengths_, labels_ in private.loader:
        private.optimizer.zero_grad()
        criterion(private.module(ids_, lengths_.cpu()), labels_).backward()
        private.optimizer.step()
    with torch.no_grad():
        found = private.module.eval()(ids, lengths).argmax(2)
    counted = labels >= 0
    accuracy = float((found == labels)[counted].double().mean())
    assert accuracy > 0.8
    assert private.get_epsilon(1e-5) < 100


class Learned(nn.Module):
    """Initial states that are parameters, the same for every example.

    Args:
        layer: any of torch's.
        copies: makes the rows of a parameter of shape (states, 1, width).
    """

    def __init__(self, layer, copies):
        super().__init__()
        self.layer, self.copies = layer, copies
        sides = (2 if layer.bidirectional else 1) * layer.num_layers
        two = isinstance(layer, nn.LSTM)
        self.initial = nn.ParameterList(torch.randn(sides, 1, HIDDEN) for _ in range(1 + two))

    def forward(self, x):
        hx = tuple(self.copies(p, len(x)) for p in self.initial)
        x = x if self.layer.batch_first else x.transpose(0, 1)
        output = self.layer(x, hx if isinstance(self.layer, nn.LSTM) else hx[0])[0]
        return output if self.layer.batch_first else output.transpose(0, 1)


COPIES = {
    "expand": lambda p, rows: p.expand(-1, rows, -1),
    "contiguous": lambda p, rows: p.expand(-1, rows, -1).contiguous(),
    "repeat": lambda p, rows: p.repeat(1, rows, 1),
    "tanh": lambda p, rows: torch.tanh(p).repeat(1, rows, 1),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_initial_states_that_are_learned(kind, copies, caplog):
    torch.manual_seed(0)
    for layers, first in ((1, True), (2, False)):
        layer = kind(WIDTH, HIDDEN, layers, bidirectional=layers == 2, batch_first=first)
        check_like_loop(case(Learned(layer, COPIES[copies]), torch.randn(ROWS, 3, WIDTH)))
    assert "run again" not in caplog.text


@pytest.mark.parametrize("length", [1, 4])
def test_a_first_step_that_is_learned(length):
    """With the rows second, a parameter of shape (1, 1, width) has them there, too."""

    class Started(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(WIDTH, HIDDEN)
            self.start = nn.Parameter(torch.randn(1, 1, WIDTH))

        def forward(self, x):
            states = self.layer(x.transpose(0, 1))[1]
            return self.layer(self.start.expand(length, len(x), -1), states)[0].transpose(0, 1)

    torch.manual_seed(0)
    check_like_loop(case(Started(), torch.randn(ROWS, 3, WIDTH)))


def test_initial_states_that_differ_from_row_to_row_are_refused():
    torch.manual_seed(0)

    def joined(p, rows):
        return torch.cat([p.expand(-1, rows - 1, -1), 2 * p], 1)

    def written(p, rows):
        copies = p.repeat(1, rows, 1)
        copies[:, 1:] = 0
        return copies

    def copied(p, rows):
        return written(p, rows).clone()

    for copies in (joined, written, copied):
        layer = nn.GRU(WIDTH, HIDDEN, batch_first=True)
        with pytest.raises(RuntimeError, match="mixes the examples"):
            backward(run_of(case(Learned(layer, copies), torch.randn(ROWS, 3, WIDTH))))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("seed", range(6))
def test_an_lstm_by_onednn(seed, monkeypatch):
    """Its gates come squashed from products of oneDNN, where that is the faster library."""
    calls = []
    once = products.Squashed.__call__
    monkeypatch.setattr(products, "_LEAST", 0)
    monkeypatch.setattr(products, "_onednn_is_faster", lambda threads: True)
    monkeypatch.setattr(
        products.Squashed, "__call__", lambda self, x: calls.append(len(x)) or once(self, x)
    )
    torch.manual_seed(seed)
    rng = random.Random(seed)
    packed = rng.choice([None, True, False])
    layer = nn.LSTM(
        3, HIDDEN, rng.choice([1, 2]), bidirectional=rng.random() < 0.5, bias=rng.random() < 0.5,
        batch_first=rng.random() < 0.5, proj_size=rng.choice([0, 2]),
    )  # fmt: skip
    module = Recurrent(layer, packed=packed, states=rng.random() < 0.5)
    inputs = [torch.randn(ROWS, LENGTH, WIDTH)]
    if packed is not None:
        inputs.append(lengths_of(rng, ROWS, LENGTH, packed))
    a = case(module, *inputs, dtype=torch.float32)
    expected = copy.deepcopy(a.module)(*a.inputs)
    private = check_like_loop(a)
    inputs, _ = take(private)
    torch.testing.assert_close(private.module(*inputs), expected, rtol=2e-6, atol=2e-6)
    assert calls
