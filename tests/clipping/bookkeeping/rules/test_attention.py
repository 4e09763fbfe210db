"""nn.MultiheadAttention: torch's own outputs, and gradients of one example at a time."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, Poisson, PrivacyEngine
from dptrain.clipping.bookkeeping.uses.arranged import Stacked
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.clipping.bookkeeping.uses.use import Materialized
from dptrain.testing import check_layer_rule
from tests.helpers.clipping_oracle import (
    assert_norms,
    assert_sums,
    flat_factors,
    reduced,
    reference,
)

ROWS, QUERIES, KEYS, WIDTH, HEADS = 3, 5, 4, 6, 2


def make(model, x, y):
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0),
        data=TensorDataset(x, y),
        scheme=Poisson(probability=1.0, dataset_size=len(x), steps=1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        gradients=Gradients(mode="bookkeeping"),
    )


def assert_equals_loop(model, x):
    """Outputs, norms and clipped sums of a float64 model, in bookkeeping mode."""
    torch.manual_seed(3)
    for p in model.parameters():
        with torch.no_grad():
            p.normal_(std=0.7)
    model, x, y = model.double(), x.double(), torch.randn(len(x)).double() * 3
    plain = copy.deepcopy(model)
    wanted = reference(model, (x,), y)
    private = make(model, x, y)
    for inputs, targets in private.loader:
        output = private.module(inputs)
        torch.testing.assert_close(output, plain(inputs), rtol=1e-12, atol=1e-12)
        reduced(output, targets, "mean").backward()
        clipper, bound = private.optimizer.clipper, float(wanted.norms.median())
        weights = torch.tensor([1.0, 0.5, 1.0])
        sums = clipper.clipped_sum(max_grad_norm=bound, weights=weights)
        assert_norms(clipper.norms, wanted, 1e-10)
        assert_sums(sums, wanted, flat_factors(wanted.norms, bound, weights), 1e-10)
        break


class Attending(nn.Module):
    """Attention over the sequence, or from it to a memory of another length and width."""

    def __init__(self, attention, *, memory=False, other_values=False, **options):
        super().__init__()
        self.attention, self.options = attention, options
        self.before = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, attention.kdim) if memory else None
        self.values = nn.Linear(WIDTH, attention.vdim) if other_values else None

    def forward(self, x):
        options = {k: v(x) if callable(v) else v for k, v in self.options.items()}
        x = self.before(x)
        key = x if self.keys is None else self.keys(x[:, :KEYS])
        value = key if self.values is None else self.values(x[:, -KEYS:])
        if not self.attention.batch_first:
            same = key is x and value is key
            query, key, value = (t.transpose(0, 1) for t in (x, key, value))
            key, value = (query, query) if same else (key, value)
        else:
            query = x
        h, weights = self.attention(query, key, value, **options)
        h = h if self.attention.batch_first else h.transpose(0, 1)
        return h if weights is None else torch.cat([h.flatten(1), weights.flatten(1)], 1)


def attention(**options):
    return nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options})


def batch():
    return torch.randn(ROWS, QUERIES, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("bias", "appended", "need_weights", "batch_first"),
    list(itertools.product([True, False], repeat=4)),
)
def test_self_attention(bias, appended, need_weights, batch_first):
    layer = attention(
        bias=bias, add_bias_kv=appended, add_zero_attn=appended, batch_first=batch_first
    )
    model = Attending(layer, need_weights=need_weights, average_attn_weights=appended)
    assert_equals_loop(model, batch())


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("widths", "other_values"),
    [
        ({}, False),
        ({}, True),
        ({"kdim": 4, "vdim": 4}, False),
        ({"kdim": 4, "vdim": 3}, True),
        ({"bias": False}, True),
        ({"bias": False, "kdim": 4}, True),
        ({"add_bias_kv": True, "kdim": 4, "vdim": 4}, False),
        ({"batch_first": False}, False),
    ],
)
def test_attention_to_a_memory(widths, other_values):
    model = Attending(attention(**widths), memory=True, other_values=other_values)
    assert_equals_loop(model, batch())


def causal(length):
    return torch.ones(length, length).triu(1).bool()


def hidden(x):
    found = x[..., 0] > 0.2  # another in every row; one key at least is seen
    found[:, 0] = False
    return found


def of_each_row_and_head(x):
    found = (x[:, None] @ x.mT[:, None]).expand(-1, HEADS, -1, -1)
    return found.flatten(0, 1) * torch.linspace(0.5, 1, HEADS).to(x).repeat(len(x))[:, None, None]


MASKS = {
    "padding": {"key_padding_mask": hidden},
    "padding of floats": {"key_padding_mask": lambda x: x[..., 0]},
    "causal": {"attn_mask": causal(QUERIES)},
    "causal hint": {"attn_mask": causal(QUERIES), "is_causal": True},
    "causal hint and padding": {
        "attn_mask": causal(QUERIES),
        "is_causal": True,
        "key_padding_mask": hidden,
    },
    "floats": {"attn_mask": torch.linspace(-1, 1, QUERIES**2).double().view(QUERIES, QUERIES)},
    "each row's and head's": {"attn_mask": of_each_row_and_head},
    "both": {"attn_mask": of_each_row_and_head, "key_padding_mask": lambda x: x[..., 0]},
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("appended", [True, False])
def test_masks(mask, need_weights, appended):
    layer = attention(add_bias_kv=appended, add_zero_attn=appended)
    model = Attending(layer, need_weights=need_weights, **MASKS[mask])
    assert_equals_loop(model, batch())


NAMES = ["in_proj_weight", "in_proj_bias", "bias_k", "out_proj.weight", "out_proj.bias"]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("trained", [*([name] for name in NAMES), NAMES[1::3], NAMES[2:]])
def test_what_is_frozen(trained, memory):
    layer = attention(add_bias_kv=True)
    for name, p in layer.named_parameters():
        p.requires_grad_(name in trained)
    assert_equals_loop(Attending(layer, memory=memory), batch())


@pytest.mark.parametrize("trained", ["bias", "weight"])
def test_biases_alone_keep_no_activations(trained):
    layer = attention()
    for name, p in layer.named_parameters():
        p.requires_grad_(name.endswith(trained))
    private = make(layer, batch(), batch())
    inputs, _ = next(iter(private.loader))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        private.module(inputs, inputs, inputs, need_weights=False)[0].sum().backward()
    assert any(t.data_ptr() == inputs.data_ptr() for t in kept) == (trained == "weight")


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_layers_of_torch(norm_first):
    options = {
        "dim_feedforward": 7,
        "dropout": 0.0,
        "batch_first": True,
        "norm_first": norm_first,
    }

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(WIDTH, HEADS, **options), 2, enable_nested_tensor=False
            )
            self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, **options)

        def forward(self, x):
            memory = self.encoder(x, src_key_padding_mask=hidden(x))
            target = x[:, 1:]
            mask = causal(target.shape[1])
            return self.decoder(target, memory, tgt_mask=mask, tgt_is_causal=True)

    assert_equals_loop(Both(), batch())


class Twice(nn.Module):
    """One layer over the sequence, over a memory, and over the sequence again."""

    def __init__(self, first):
        super().__init__()
        self.attention, self.first = attention(), first

    def forward(self, x):
        for over in self.first:
            key = x if over == "self" else x[:, :KEYS].cos()
            x = x + self.attention(x, key, key, need_weights=False)[0]
        return x


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    "calls", [("self", "self"), ("self", "memory"), ("memory", "self"), ("memory", "memory")]
)
@pytest.mark.parametrize("length", [1, QUERIES, 40])  # 40: gradients are materialised
def test_a_layer_that_is_used_twice(calls, length):
    x = torch.randn(ROWS, length, WIDTH, generator=torch.Generator().manual_seed(1))
    assert_equals_loop(Twice(calls), x)


def test_dropout_is_torchs():
    """The probability, not the draws: weights over the keys are dropped and scaled up."""
    layer = attention(dropout=0.25)
    private = make(layer, batch(), batch())
    x = torch.randn(200, 30, WIDTH)
    next(iter(private.loader))
    weights = private.module(x, x, x)[1].detach()
    assert float((weights == 0).double().mean()) == pytest.approx(0.25**HEADS, abs=0.005)
    assert float(weights.mean()) * 30 == pytest.approx(1.0, abs=0.01)
    layer.eval()
    assert bool((private.module(x, x, x)[1] != 0).all())


def test_what_is_not_one_row_an_example_is_refused():
    layer = attention()
    private = make(layer, batch(), batch())
    inputs, _ = next(iter(private.loader))
    with pytest.raises(RuntimeError, match=r"shapes \[\(5, 6\).*three dimensions"):
        private.module(inputs[0], inputs[0], inputs[0])
    with pytest.raises(RuntimeError, match=r"shapes .*one row per example"):
        private.module(inputs, inputs[:1], inputs[:1])
    wrong = torch.zeros(1, QUERIES).bool()
    with pytest.raises(RuntimeError, match=r"key_padding_mask has shape \(1, 5\), expected one of"):
        private.module(inputs, inputs, inputs, key_padding_mask=wrong)
    with pytest.raises(RuntimeError, match=r"attn_mask has shape \(1, 5\)"):
        private.module(inputs, inputs, inputs, attn_mask=wrong)
    with pytest.raises(ValueError, match="is_causal=True requires attn_mask"):
        private.module(inputs, inputs, inputs, is_causal=True)
    one = inputs.flatten(0, 1)[None, :ROWS]  # the examples attend to one another
    with pytest.raises(RuntimeError, match="was called with 1 rows in a batch of"):
        private.module(one, one, one)[0].sum().backward()


@pytest.mark.parametrize("length", [1, ROWS, QUERIES])
def test_examples_that_attend_to_one_another_are_refused(length):
    """batch_first=False in a model that has the rows first."""
    layer = attention(batch_first=False)
    x = batch()[:, :length]
    private = make(layer, x, x)
    inputs, _ = next(iter(private.loader))
    with pytest.raises(RuntimeError, match=r"batch_first=False|(rows in|gradients for) a batch of"):
        private.module(inputs, inputs, inputs)[0].sum().backward()


def test_what_is_shared_between_blocks_of_rows():
    torch.manual_seed(0)
    rights = [torch.randn(4, t, 3).double() for t in (5, 2)]
    lefts = [torch.randn(4, t, h).double() for t, h in ((5, 2), (2, 6))]
    use = Stacked([OuterProducts(*each) for each in zip(lefts, rights, strict=True)])
    exact = torch.cat(
        [torch.einsum("btm,btn->bmn", *e) for e in zip(lefts, rights, strict=True)], 1
    )
    factors = torch.rand(4).double()
    other = torch.randn(4, 8, 3).double()
    packed = OuterProducts(torch.randn(4, 3, 8).double(), torch.randn(4, 3, 3).double())

    def assert_is(use, right):
        assert (use.rows, *use.shape) == tuple(right.shape)
        torch.testing.assert_close(use.per_example(1, 3), right[1:3])
        torch.testing.assert_close(use.norms(), right.flatten(1).norm(dim=1))
        f = factors[: use.rows]
        torch.testing.assert_close(use.weighted_sum(f), torch.einsum("b,bmn->mn", f, right))

    index = torch.tensor([3, 1, 0])
    assert_is(use, exact)
    assert_is(use.select(index), exact[index])
    assert_is(use.compact(), exact)
    assert_is(use.merged(use), 2 * exact)
    assert_is(use.merged(packed), exact + packed.per_example(0, 4))
    assert use.merged(Materialized(other)) is None  # then gradients are formed, a few at a time
    formed = Stacked([Materialized(part) for part in exact.split([2, 6], dim=1)])
    assert_is(formed.merged(Materialized(other)), exact + other)
    folded = use.folded(2)
    torch.testing.assert_close(folded.per_example(0, 2), exact.unflatten(0, (2, 2)).sum(1))
    torch.testing.assert_close(
        folded.norms(), exact.unflatten(0, (2, 2)).sum(1).flatten(1).norm(dim=1)
    )


@pytest.mark.slow
def test_the_rule_by_itself():
    for options in ({}, {"bias": False}, {"add_bias_kv": True}, {"kdim": 4, "vdim": 3}):
        layer = attention(**options)
        for p in layer.parameters():
            nn.init.normal_(p)
        key, value = torch.randn(4, 3, layer.kdim), torch.randn(4, 3, layer.vdim)
        check_layer_rule(layer, (torch.randn(4, 5, WIDTH), key, value))
