"""torch's own Transformer, its encoder and its decoder, in training and in eval mode."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.bookkeeping_runs import ROWS, backward, case, check_like_loop, run_of, take

LENGTH, WIDTH, HEADS = 6, 8, 2
SIZES = {"dim_feedforward": 10, "dropout": 0.0, "batch_first": True}


def hidden(x):
    """Padding at the end, of another length in every row."""
    lengths = 2 + (x[:, 0, 0] * 100).long().abs() % (LENGTH - 1)
    return torch.arange(x.shape[1]) >= lengths[:, None]


def causal(length):
    return nn.Transformer.generate_square_subsequent_mask(length)


class Encoder(nn.Module):
    def __init__(self, *, nested=True, norm_first=False, mask="padding", **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, norm_first=norm_first, **{**SIZES, **options}
        )
        self.encoder = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=nested
        )
        self.mask = mask

    def forward(self, x):
        options = {}
        if "padding" in self.mask:
            options["src_key_padding_mask"] = hidden(x)
        if "causal" in self.mask:
            # Of one dtype, as torch asks for.
            mask = causal(x.shape[1])
            options["mask"] = mask.isinf() if "padding" in self.mask else mask.to(x)
            options["is_causal"] = "hint" in self.mask
        return self.encoder(x, **options)


class Both(nn.Module):
    """nn.Transformer from a sequence to its own beginning."""

    def __init__(self, **options):
        super().__init__()
        self.whole = nn.Transformer(
            WIDTH, HEADS, num_encoder_layers=1, num_decoder_layers=2, **{**SIZES, **options}
        )

    def forward(self, x):
        y = x[:, :4].flip(1)
        return self.whole(
            x,
            y,
            tgt_mask=causal(y.shape[1]).to(x),
            tgt_is_causal=True,
            src_key_padding_mask=torch.zeros(x.shape[:2]).masked_fill(hidden(x), -torch.inf).to(x),
            memory_key_padding_mask=torch.zeros(x.shape[:2])
            .masked_fill(hidden(x), -torch.inf)
            .to(x),
        )


def batch():
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def checked(model, **options):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True, but")
        model = model(**options)
    for p in model.parameters():
        nn.init.normal_(p, std=0.4)
    check_like_loop(case(model, batch()))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("norm_first", "mask"),
    list(
        itertools.product(
            [True, False], ["", "padding", "causal", "causal, hint", "padding, causal"]
        )
    ),
)
def test_the_encoder(norm_first, mask):
    checked(Encoder, norm_first=norm_first, mask=mask)


@pytest.mark.parametrize(
    "options",
    [{"activation": "gelu"}, {"bias": False}, {"activation": torch.tanh}, {"nested": False}],
    ids=["gelu", "no bias", "a function", "not nested"],
)
def test_options_of_the_encoder(options):
    checked(Encoder, **options)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"bias": False}], ids=str)
def test_the_whole_transformer(options):
    checked(Both, **options)


@pytest.mark.parametrize("mask", ["", "padding", "causal"])
@pytest.mark.usefixtures("_unfollowed")
def test_in_eval_mode_the_fast_path_is_taken_and_right(mask):
    """Without gradients the encoder runs in one kernel, nested where rows end early."""
    torch.manual_seed(0)
    a = case(Encoder(mask=mask), batch())
    plain = copy.deepcopy(a.module).eval()
    private = run_of(a)
    take(private)
    private.module.eval()
    with torch.no_grad(), torch.profiler.profile() as profile:
        found = private.module(*a.inputs)
    kernels = {event.key for event in profile.key_averages()}
    assert "aten::_transformer_encoder_layer_fwd" in kernels
    with torch.no_grad():
        torch.testing.assert_close(found, plain(*a.inputs), rtol=1e-12, atol=1e-12)


def test_in_eval_mode_gradients_are_those_of_the_loop():
    checked(lambda: Encoder().eval())


class Second(nn.Module):
    """Sequences with the examples in the second dimension, which torch takes by default."""

    def __init__(self, kind, **options):
        super().__init__()
        options = {**SIZES, "batch_first": False, **options}
        if kind == "whole":
            self.inner = nn.Transformer(
                WIDTH, HEADS, num_encoder_layers=1, num_decoder_layers=2, **options
            )
        elif kind == "decoder":
            self.inner = nn.TransformerDecoder(
                nn.TransformerDecoderLayer(WIDTH, HEADS, **options), 2, norm=nn.LayerNorm(WIDTH)
            )
        else:
            self.inner = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(WIDTH, HEADS, **options), 2, norm=nn.LayerNorm(WIDTH)
            )
        if kind == "layer":
            self.inner = self.inner.layers[0]
        self.kind = kind

    def forward(self, x):
        mask = causal(x.shape[1]).to(x)
        padding = torch.zeros(x.shape[:2]).masked_fill(hidden(x), -torch.inf).to(x)
        sequence = x.transpose(0, 1)
        if self.kind in ("whole", "decoder"):
            y = x[:, :4].flip(1).transpose(0, 1)
            h = self.inner(sequence, y) if self.kind == "whole" else self.inner(y, sequence)
        else:
            h = self.inner(sequence, mask, src_key_padding_mask=padding)
        return h.transpose(0, 1)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("kind", ["layer", "encoder", "decoder", "whole"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_with_the_examples_in_the_second_dimension(kind, norm_first):
    checked(Second, kind=kind, norm_first=norm_first)


class Forgotten(nn.Module):
    """The examples are first in what it gives a layer that takes them second."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        kinds = nn.Transformer | nn.TransformerDecoderLayer
        if isinstance(self.inner, nn.MultiheadAttention):
            return self.inner(x, x, x)[0]
        if isinstance(self.inner, nn.LSTM):
            return self.inner(x)[0]
        return self.inner(x, x) if isinstance(self.inner, kinds) else self.inner(x)


FORGOTTEN = {
    "TransformerEncoderLayer 'inner.layers.1'": lambda: Second("encoder").inner,
    "TransformerEncoderLayer 'inner'": lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 10),
    "TransformerDecoderLayer 'inner'": lambda: nn.TransformerDecoderLayer(WIDTH, HEADS, 10),
    "Transformer 'inner'": lambda: Second("whole").inner,
    "MultiheadAttention 'inner'": lambda: nn.MultiheadAttention(WIDTH, HEADS),
    "LSTM 'inner'": lambda: nn.LSTM(WIDTH, WIDTH),
}


@pytest.mark.parametrize("length", [LENGTH, ROWS])
@pytest.mark.parametrize("name", FORGOTTEN)
def test_batch_first_that_was_forgotten_is_named(name, length):
    torch.manual_seed(0)
    private = run_of(case(Forgotten(FORGOTTEN[name]()), torch.randn(ROWS, length, WIDTH)))
    with pytest.raises(RuntimeError) as error:
        backward(private)
    assert f"{name} is made with batch_first=False" in str(error.value)
    assert "use batch_first=True" in str(error.value)


def test_as_many_positions_as_examples_in_the_second_dimension():
    torch.manual_seed(0)
    model = Second("encoder")
    x = torch.randn(LENGTH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    check_like_loop(case(model, x))
    assert not any(m.batch_first for m in model.modules() if isinstance(m, nn.MultiheadAttention))


@pytest.mark.parametrize("whole", [True, False])
def test_checkpoints_with_the_examples_in_the_second_dimension(whole):
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Second("encoder").inner
            if not whole:
                self.inner.layers = nn.ModuleList(Wrapped(layer) for layer in self.inner.layers)

        def forward(self, x):
            x = x.transpose(0, 1)
            h = checkpoint(self.inner, x, use_reentrant=False) if whole else self.inner(x)
            return h.transpose(0, 1)

    class Wrapped(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.self_attn = layer, layer.self_attn

        def forward(self, x, **options):
            del options["src_mask"]
            return checkpoint(self.layer, x, use_reentrant=False, **options)

    checked(Recomputed)


def test_dropout_is_each_examples_own():
    """Another in every row, and drawn once: the same numbers make the output and its gradients."""
    torch.manual_seed(0)
    a = case(Encoder(dropout=0.5), batch()[:1].expand(ROWS, -1, -1).contiguous())
    private = run_of(a)
    inputs, _ = take(private)
    output = private.module(*inputs)
    assert not torch.allclose(output[0], output[1])
    output.flatten(1).square().sum().backward()
    clipper = private.optimizer.clipper
    assert len(clipper.unclipped_norms(ROWS).unique()) == ROWS
