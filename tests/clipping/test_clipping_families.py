"""Layers and models that are not simple: right, against one example at a time, or refused."""

import functools

import pytest
import torch
import transformers
from opacus.layers.dp_rnn import DPLSTMCell
from torch import nn

from tests.helpers.bookkeeping_runs import ROWS, backward, case, check, check_like_loop, run_of
from tests.helpers.clipping_oracle import reference

hooked = pytest.mark.parametrize("mode", ["hooks", "functorch"])


class Pairs(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 3)
        self.pairs = nn.Bilinear(3, 4, 5, bias=bias)
        self.last = nn.Linear(5, 2)

    def forward(self, x):
        h = self.pairs(torch.tanh(self.first(x)), x)
        return self.last(h.flatten(1, -2).sum(1) if h.dim() > 2 else h)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_bilinear_layers_are_right_in_bookkeeping_mode(shape, bias, reduction):
    check_like_loop(case(Pairs(bias), torch.randn(ROWS, *shape)), reduction=reduction)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_bilinear_layers_are_right_with_a_part_of_them_frozen(frozen):
    module = Pairs()
    getattr(module.pairs, frozen).requires_grad_(False)
    check_like_loop(case(module, torch.randn(ROWS, 3, 4)))


@hooked
def test_bilinear_layers_are_refused_by_name_in_other_modes(mode):
    private = run_of(case(Pairs(), torch.randn(ROWS, 4)), mode=mode)
    with pytest.raises(RuntimeError, match=r"layer 'pairs', a Bilinear, .* 2 tensors.*bookkeeping"):
        backward(private)


class Cell(nn.Module):
    """Two time steps of a recurrent cell."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.last = kind(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state) if state is not None else self.cell(step, self.zero(x))
        return self.last(state[0] if isinstance(state, tuple) else state)

    def zero(self, x):
        h = x.new_zeros(len(x), 3)
        return (h, h) if isinstance(self.cell, nn.LSTMCell | DPLSTMCell) else h


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_are_trained_in_bookkeeping_mode(kind):
    check_like_loop(case(Cell(kind), torch.randn(ROWS, 2, 4)))


@hooked
def test_lstm_cells_are_refused_at_once_in_other_modes(mode):
    with pytest.raises(ValueError, match=r"layer 'cell': .*opacus\.layers\.dp_rnn\.DPLSTMCell"):
        run_of(case(Cell(nn.LSTMCell), torch.randn(ROWS, 2, 4)), mode=mode)


@hooked
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.RNNCell])
def test_cells_with_a_state_are_refused_by_name_in_other_modes(mode, kind):
    """Opacus would leave the state out of their gradients, and train something else."""
    private = run_of(case(Cell(kind), torch.randn(ROWS, 2, 4)), mode=mode)
    with pytest.raises(RuntimeError, match=rf"layer 'cell', a {kind.__name__}, .* 2 tensors"):
        backward(private)


def test_the_lstm_cell_that_the_refusals_name_is_right():
    a = case(Cell(functools.partial(DPLSTMCell, bias=True)), torch.randn(ROWS, 2, 4))
    wanted = reference(a.module, a.inputs, a.targets)
    private = run_of(a, mode="hooks")
    backward(private)
    check(private, wanted)


class Logits(nn.Module):
    """A transformers model with the output that a loss is taken of."""

    def __init__(self, model, output, **inputs):
        super().__init__()
        self.model, self.output, self.inputs = model, output, inputs

    def forward(self, x):
        name = self.model.main_input_name
        logits = self.model(**{name: x}, **self.inputs).logits
        return self.output(logits)


def _sizes(**more):
    return {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        **more,
    }


def opt():
    config = transformers.OPTConfig(
        **_sizes(ffn_dim=12, dropout=0.0, word_embed_proj_dim=8, pad_token_id=1)
    )
    return Logits(transformers.OPTForCausalLM(config), lambda y: y[:, -1], use_cache=False)


def bart():
    config = transformers.BartConfig(
        vocab_size=20,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=12,
        decoder_ffn_dim=12,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        max_position_embeddings=16,
        dropout=0.0,
        pad_token_id=1,
    )
    model = transformers.BartForConditionalGeneration(config)
    return Logits(model, lambda y: y[:, -1], use_cache=False)


def deberta():
    config = transformers.DebertaConfig(
        **_sizes(
            intermediate_size=12,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            pooler_hidden_size=8,
        )
    )
    return Logits(transformers.DebertaForSequenceClassification(config), lambda y: y)


def deberta_v2():
    config = transformers.DebertaV2Config(
        **_sizes(
            intermediate_size=12,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_biased_input=False,
            pooler_hidden_size=8,
        )
    )
    return Logits(transformers.DebertaV2ForSequenceClassification(config), lambda y: y)


def gemma2():
    config = transformers.Gemma2Config(
        **_sizes(intermediate_size=12, num_key_value_heads=1, head_dim=4, sliding_window=4)
    )
    return Logits(transformers.Gemma2ForCausalLM(config), lambda y: y[:, -1], use_cache=False)


def swin():
    config = transformers.SwinConfig(
        image_size=8,
        patch_size=2,
        embed_dim=4,
        depths=[2, 1],
        num_heads=[1, 2],
        window_size=2,
        drop_path_rate=0.0,
        num_labels=2,
    )
    return Logits(transformers.SwinForImageClassification(config), lambda y: y)


# With layers that see positions, or parts of images, where the examples should be.
FAMILIES = {
    "OPT": (opt, ["fc1", "fc2", "final_layer_norm"]),
    "BART": (bart, []),
    "DeBERTa": (deberta, ["pos_proj", "pos_q_proj"]),
    "DeBERTa-v2": (deberta_v2, ["query_proj", "key_proj", "encoder.LayerNorm"]),
    "Gemma2": (gemma2, []),
    "Swin": (swin, ["attention"]),
}


def inputs(module):
    if module.model.main_input_name == "pixel_values":
        return torch.randn(ROWS, 3, 8, 8)
    return torch.randint(3, 20, (ROWS, 6))


def family(name):
    torch.manual_seed(0)
    module = FAMILIES[name][0]().train()
    return case(module, inputs(module), dtype=torch.float32)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_right_or_refused_by_layer_and_remedy(name, mode):
    """No foreign error: what trains has the loop's norms and sums, in the first batch as well."""
    a = family(name)
    wanted = reference(a.module, a.inputs, a.targets)
    try:
        private = run_of(a, mode=mode)
        backward(private)
    except (ValueError, RuntimeError) as error:
        refusal = str(error)
    else:
        private.optimizer.watch.check()
        check(private, wanted)
        return
    assert "\n" not in refusal
    assert "layer '" in refusal or "per-example gradients for a batch" in refusal
    assert "requires_grad_(False)" in refusal or "one row per example" in refusal


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_right_where_layers_that_see_the_examples_are_trained(name):
    """The remedy that the refusals name: the others are frozen."""
    a = family(name)
    plain = (nn.Linear, nn.LayerNorm, nn.Conv2d)
    others = (m for m in a.module.modules() if type(m) not in plain)
    frozen = {p for m in others for p in m.parameters(recurse=False)}
    for layer_name, layer in a.module.named_modules():
        if any(part in layer_name for part in FAMILIES[name][1]):
            frozen.update(layer.parameters())
    for p in frozen:
        p.requires_grad_(False)
    assert sum(p.requires_grad for p in a.module.parameters()) > 5
    wanted = reference(a.module, a.inputs, a.targets)
    private = run_of(a, mode="bookkeeping")
    backward(private)
    private.optimizer.watch.check()
    check(private, wanted)
