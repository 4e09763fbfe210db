"""Layers that are called on what all examples share, against one example at a time."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from tests.helpers.bookkeeping_runs import ROWS, case, check_like_loop

WIDTH, STEPS = 4, 3


class Labels(nn.Module):
    """Scores of rows against labels, whose texts a layer reads: vectors, or ids of words."""

    def __init__(self, layer, read, labels, *, words):
        super().__init__()
        self.body, self.layer, self.read = nn.Linear(WIDTH, WIDTH), layer, read
        self.words = nn.Embedding(6, WIDTH) if words else None
        texts = torch.randint(6, (labels, STEPS)) if words else torch.randn(labels, STEPS, WIDTH)
        self.register_buffer("texts", texts)

    def forward(self, x):
        texts = self.texts if self.words is None else self.words(self.texts)
        return self.body(x) @ self.read(self.layer, texts).T


def states(layer, x):
    return layer(x)[0].mean(1)[:, :WIDTH]


def last(layer, x):
    final = layer(x)[1]
    return (final[0] if isinstance(final, tuple) else final)[-1]


def steps_first(layer, x):
    return layer(x.transpose(0, 1))[0].mean(0)


def attended(layer, x):
    return layer(x, x, x)[0].mean(1)


def attended_first(layer, x):
    x = x.transpose(0, 1)
    return layer(x, x[1:], x[1:], need_weights=False)[0].mean(0)


def encoded(layer, x):
    return layer(x).mean(1)


def encoded_first(layer, x):
    return layer(x.transpose(0, 1)).mean(0)


def decoded(layer, x):
    return layer(x, x[:, 1:]).mean(1)


def cell(layer, x):
    found = layer(x[:, 0])
    for step in x.unbind(1)[1:]:
        found = layer(step, found)
    return found[0] if isinstance(found, tuple) else found


def packed(layer, x):
    lengths = [1 + k % STEPS for k in range(len(x))]
    sequences = [each[:n] for each, n in zip(x, lengths, strict=True)]
    output = layer(pack_sequence(sequences, enforce_sorted=False))[0]
    return pad_packed_sequence(output, batch_first=True)[0].sum(1)


FIRST = {"batch_first": True}
TRANSFORMER = {"nhead": 2, "dim_feedforward": 8, "dropout": 0.0}
LAYERS = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), encoded),
    "GRU": (lambda: nn.GRU(WIDTH, WIDTH, **FIRST), states),
    "LSTM": (lambda: nn.LSTM(WIDTH, WIDTH, **FIRST), states),
    "RNN": (lambda: nn.RNN(WIDTH, WIDTH, **FIRST), states),
    "GRU, last state": (lambda: nn.GRU(WIDTH, WIDTH, **FIRST), last),
    "LSTM, last state": (lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, **FIRST), last),
    "GRU, both ways": (lambda: nn.GRU(WIDTH, WIDTH, bidirectional=True, **FIRST), states),
    "LSTM with projections": (lambda: nn.LSTM(WIDTH, 6, proj_size=WIDTH, **FIRST), states),
    "LSTM, steps first": (lambda: nn.LSTM(WIDTH, WIDTH), steps_first),
    "GRU cell": (lambda: nn.GRUCell(WIDTH, WIDTH), cell),
    "LSTM cell": (lambda: nn.LSTMCell(WIDTH, WIDTH), cell),
    "RNN cell": (lambda: nn.RNNCell(WIDTH, WIDTH), cell),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 2, **FIRST), attended),
    "attention with biases": (
        lambda: nn.MultiheadAttention(WIDTH, 2, add_bias_kv=True, add_zero_attn=True, **FIRST),
        attended,
    ),
    "attention, steps first": (lambda: nn.MultiheadAttention(WIDTH, 2), attended_first),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(WIDTH, **TRANSFORMER, **FIRST), encoded),
    "encoder layer, steps first": (
        lambda: nn.TransformerEncoderLayer(WIDTH, **TRANSFORMER),
        encoded_first,
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, **TRANSFORMER, **FIRST), 2),
        encoded,
    ),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(WIDTH, **TRANSFORMER, **FIRST), decoded),
}


@pytest.mark.sample(every=27)
@pytest.mark.parametrize("labels", [3, ROWS])
@pytest.mark.parametrize("words", [False, True], ids=["vectors", "words"])
@pytest.mark.parametrize("name", LAYERS)
def test_texts_of_the_labels(name, words, labels):
    torch.manual_seed(0)
    make, read = LAYERS[name]
    module = Labels(make(), read, labels, words=words)
    check_like_loop(case(module, torch.randn(ROWS, WIDTH)))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_packed_texts(kind):
    torch.manual_seed(0)
    module = Labels(kind(WIDTH, WIDTH, **FIRST), packed, 3, words=False)
    check_like_loop(case(module, torch.randn(ROWS, WIDTH)))
