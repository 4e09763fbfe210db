"""Adapters of peft, on small transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
from torch import nn

from tests.coverage.case import Case, first, hugging_face, images, tokens, two_texts
from tests.coverage.images import _VISION
from tests.coverage.texts import _BOTH

_BASES: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "Llama": (hugging_face("LlamaForCausalLM", "Llama"), tokens, ["q_proj", "v_proj"]),
    "GPT-2": (hugging_face("GPT2LMHeadModel", "GPT2"), tokens, ["c_attn", "c_proj"]),
    "BERT": (
        hugging_face("BertForSequenceClassification", "Bert"), tokens, ["query", "value"]
    ),
    "T5": (hugging_face("T5ForConditionalGeneration", "T5", **_BOTH), two_texts, ["q", "v"]),
    "ViT": (
        hugging_face("ViTForImageClassification", "ViT", **_VISION), images(), ["q_proj", "v_proj"]
    ),
}  # fmt: skip


def adapter(name: str, base: str, config: type, **options: Any) -> Case:
    """``base`` frozen, and the adapter of this configuration."""
    build, inputs, targets = _BASES[base]
    tuned = "prompt" in name or "prefix" in name or "p-tuning" in name
    if not tuned and "target_modules" not in options:
        options["target_modules"] = targets

    def adapted() -> nn.Module:
        # The library's own parameters stay as they are; it makes its adapters in float32.
        return peft.get_peft_model(build(), config(**options), autocast_adapter_dtype=False)

    return Case(f"{base}, {name}", "adapters", adapted, inputs, first)


_CAUSAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}

ADAPTERS = [
    adapter("LoRA", "Llama", peft.LoraConfig, r=2),
    adapter("LoRA", "GPT-2", peft.LoraConfig, r=2, fan_in_fan_out=True),
    adapter("LoRA", "BERT", peft.LoraConfig, r=2, task_type="SEQ_CLS"),
    adapter("LoRA", "T5", peft.LoraConfig, r=2),
    adapter("LoRA", "ViT", peft.LoraConfig, r=2, modules_to_save=["classifier"]),
    adapter("LoRA on the embedding", "Llama", peft.LoraConfig, r=2,
            target_modules=["embed_tokens", "q_proj"]),
    adapter("DoRA", "Llama", peft.LoraConfig, r=2, use_dora=True),
    adapter("AdaLoRA", "Llama", peft.AdaLoraConfig, init_r=3, target_r=2, total_step=10),
    adapter("VeRA", "Llama", peft.VeraConfig, r=2, target_modules=["q_proj", "o_proj"]),
    adapter("LoHa", "Llama", peft.LoHaConfig, r=2),
    adapter("LoKr", "Llama", peft.LoKrConfig, r=2),
    adapter("OFT", "Llama", peft.OFTConfig, oft_block_size=4),
    adapter("BOFT", "Llama", peft.BOFTConfig, boft_block_size=4),
    adapter("IA³", "Llama", peft.IA3Config, target_modules=["k_proj", "v_proj", "down_proj"],
            feedforward_modules=["down_proj"]),
    adapter("layer-norm tuning", "BERT", peft.LNTuningConfig, target_modules=["LayerNorm"]),
    adapter("prompt tuning", "Llama", peft.PromptTuningConfig, **_CAUSAL),
    adapter("prefix tuning", "Llama", peft.PrefixTuningConfig, **_CAUSAL),
    adapter("p-tuning", "Llama", peft.PromptEncoderConfig, encoder_hidden_size=8, **_CAUSAL),
]  # fmt: skip
