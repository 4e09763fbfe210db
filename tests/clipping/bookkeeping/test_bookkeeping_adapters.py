"""Few trainable parameters: LoRA and other adapters of peft, biases alone."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peft
import pytest
import torch
from torch import nn

from tests.clipping.bookkeeping.test_bookkeeping_hugging_face import (
    MODELS,
    assert_equals_loop,
    build,
    make,
    texts,
)
from tests.helpers.bookkeeping_runs import ROWS, case, check_like_loop

TARGETS = {
    "BERT, classes": ["query", "value"],
    "BERT, masked": ["query", "value", "dense"],
    "RoBERTa, masked": ["key", "lm_head.dense"],
    "DistilBERT, classes": ["q_lin", "lin1"],
    "GPT-2": ["c_attn", "c_proj"],  # Conv1D, whose weight lies the other way round
    "GPT-2, classes": ["c_attn", "c_fc"],
}


def adapted(name, config):
    model = build(name)
    # The library's own parameters stay double; it makes its adapters in float32.
    model.model = peft.get_peft_model(model.model, config, autocast_adapter_dtype=False)
    torch.manual_seed(5)
    for p in model.parameters():
        if p.requires_grad:  # LoRA's B starts at zero, where A has no gradient
            with torch.no_grad():
                p.normal_(std=0.4)
    return model.double()


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "bias": "lora_only"}])
def test_lora(name, options):
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS[name], **options)
    model = adapted(name, config)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert any("lora_A" in n for n in trained)
    assert not any(n.endswith("base_layer.weight") for n in trained)
    assert_equals_loop(model, texts())


@pytest.mark.parametrize("name", ["BERT, classes", "GPT-2, classes"])
def test_lora_with_a_trained_head(name):
    save = {"BERT, classes": "classifier", "GPT-2, classes": "score"}[name]
    config = peft.LoraConfig(r=2, target_modules=TARGETS[name][:1], modules_to_save=[save])
    assert_equals_loop(adapted(name, config), texts())


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", MODELS)
def test_biases_alone(name):
    model = build(name)
    for n, p in model.named_parameters():
        p.requires_grad_(n.endswith("bias"))
    assert_equals_loop(model, texts())


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", ["BERT, masked", "GPT-2"])
@pytest.mark.parametrize("trained", ["bias", "weight"])
def test_biases_alone_keep_no_inputs(name, trained):
    """Of Linear layers, whose inputs are kept for the weights and nothing else."""
    model = build(name)
    for n, p in model.named_parameters():
        p.requires_grad_(n.endswith(trained))
    outputs = []  # kept alive, or their addresses would be used again
    for layer in model.modules():
        # What a normalization returned is the input of linear layers only.
        if isinstance(layer, nn.LayerNorm):
            layer.register_forward_hook(lambda _, i, out: outputs.append(out.detach()))
    private = make(model, texts())
    ids, mask, _ = next(iter(private.loader))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        private.module(ids, mask)
    found = {t.data_ptr() for t in outputs} & {t.data_ptr() for t in kept}
    assert outputs
    assert bool(found) == (trained == "weight")


def lora(**options):
    return lambda: peft.LoraConfig(r=2, lora_alpha=4, **options)


def p_tuning(kind):
    return peft.PromptEncoderConfig(
        task_type="SEQ_CLS",
        num_virtual_tokens=3,
        encoder_hidden_size=5,
        encoder_reparameterization_type=kind,
    )


BERT, GPT2 = "BERT, classes", "GPT-2, classes"
# What is trained lies in dictionaries, in layers of peft's own, or in what computes a prefix.
ADAPTERS = {
    "LoRA, embedding": (BERT, lora(target_modules=["word_embeddings"]), "lora_embedding_A"),
    "LoRA, embedding and layers": (
        BERT,
        lora(target_modules=["word_embeddings", "query"]),
        "lora_",
    ),
    "LoRA, GPT-2's embedding": (GPT2, lora(target_modules=["wte"]), "lora_embedding_B"),
    "IA3": (
        BERT,
        lambda: peft.IA3Config(
            target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]
        ),
        "ia3_l",
    ),
    "DoRA": (BERT, lora(target_modules=["query"], use_dora=True), "lora_magnitude_vector"),
    "DoRA, Conv1D": (
        GPT2,
        lora(target_modules=["c_attn"], use_dora=True, fan_in_fan_out=True),
        "lora_magnitude_vector",
    ),
    "prompt": (
        GPT2,
        lambda: peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
        "prompt_encoder.default.embedding",
    ),
    "prompt of as many tokens as rows": (
        BERT,
        lambda: peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4),
        "prompt_encoder.default.embedding",
    ),
    "p-tuning": (BERT, lambda: p_tuning("MLP"), "prompt_encoder.default.mlp_head"),
    "prefix": (
        GPT2,
        lambda: peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
        "prompt_encoder",
    ),
    "prefix, projected": (
        GPT2,
        lambda: peft.PrefixTuningConfig(
            task_type="SEQ_CLS",
            num_virtual_tokens=3,
            prefix_projection=True,
            encoder_hidden_size=5,
        ),
        "prompt_encoder.default.transform",
    ),
    "AdaLoRA": (
        BERT,
        lambda: peft.AdaLoraConfig(target_modules=["query"], init_r=3, target_r=2, total_step=10),
        "lora_E",
    ),
    "VeRA": (BERT, lambda: peft.VeraConfig(target_modules=["query"], r=3), "vera_lambda_b"),
    "LoHa": (BERT, lambda: peft.LoHaConfig(target_modules=["query"], r=3), "hada_w1_a"),
    "LoKr": (BERT, lambda: peft.LoKrConfig(target_modules=["query"], r=3), "lokr_w1"),
    "OFT": (BERT, lambda: peft.OFTConfig(target_modules=["key"], r=0, oft_block_size=2), "oft_R"),
    "HRA": (BERT, lambda: peft.HRAConfig(target_modules=["query"], r=2), "hra_u"),
    "norms": (BERT, lambda: peft.LNTuningConfig(target_modules=["LayerNorm"]), "ln_tuning_layers"),
}


@pytest.mark.sample(every=25)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters(adapter):
    name, config, trained = ADAPTERS[adapter]
    model = adapted(name, config())
    assert any(trained in n for n, p in model.named_parameters() if p.requires_grad)
    assert_equals_loop(model, texts())


def test_fourier_transforms_in_single_precision():
    """As peft forms them, whatever the model's own precision."""
    config = peft.FourierFTConfig(target_modules=["query"], n_frequency=5)
    ids, mask, _ = texts()
    check_like_loop(case(adapted(BERT, config), ids, mask, dtype=torch.float32))


def test_prompts_by_recurrent_layers_are_refused_by_name():
    with pytest.raises(ValueError, match=r"layer 'model.prompt_encoder.default'.*'MLP'"):
        make(adapted(BERT, p_tuning("LSTM")), texts())


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=str)
def test_lora_on_convolutions(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Conv1d(4, 3, 2, stride=2), nn.Flatten())
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], **options)
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for p in model.parameters():
        nn.init.normal_(p, std=0.4)
    check_like_loop(case(model, torch.randn(ROWS, 2, 9)))


def test_lora_on_torchs_attention_is_refused():
    """It puts sums into the layer's weights, which the layer's rule would take for parameters."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    config = peft.LoraConfig(r=2, target_modules=["attention"])
    model = peft.get_peft_model(Model(), config)
    x = torch.randn(4, 3, 4)
    with pytest.raises(ValueError, match=r"attention'.*LoRA on nn.MultiheadAttention"):
        make(model, (x, x))
