"""Modules of peft that are more than the layers within them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn
from typing_extensions import override

from dptrain.clipping.bookkeeping.operations.rule import OperationsRule
from dptrain.clipping.bookkeeping.rules.rules import LayerRule


class PromptRule(OperationsRule):
    """A prompt of shape (1, tokens, width), followed through all that makes it."""

    recurses = True

    @override
    def holders(self, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield from layer.named_modules(remove_duplicate=False)

    @override
    def refusal(self, layer: nn.Module) -> str | None:
        if any(isinstance(m, nn.RNNBase) for m in layer.modules()):
            return (
                "it makes one prompt for all examples by recurrent layers, whose operations cannot "
                "be followed; use encoder_reparameterization_type='MLP'"
            )
        return None


class MergedAttentionRule(PromptRule):
    """LoRA on ``nn.MultiheadAttention``: every call puts sums into its weights, and back."""

    @override
    def refusal(self, layer: nn.Module) -> str | None:
        return (
            "LoRA on nn.MultiheadAttention exchanges the layer's parameters in every call for sums "
            "that no rule can follow; give it the nn.Linear layers of an attention made of those"
        )


def adapter_rule(layer: nn.Module) -> LayerRule | None:
    """The rule of a module of peft's, where it has one."""
    for (place, name), rule in _RULES.items():
        kind = getattr(sys.modules.get(place), name, None)
        if kind is not None and type(layer) is kind:
            return rule(layer)
    return None


_RULES: dict[tuple[str, str], type[PromptRule]] = {
    ("peft.tuners.prompt_tuning.model", "PromptEmbedding"): PromptRule,
    ("peft.tuners.p_tuning.model", "PromptEncoder"): PromptRule,
    ("peft.tuners.lora.layer", "MultiheadAttention"): MergedAttentionRule,
}
