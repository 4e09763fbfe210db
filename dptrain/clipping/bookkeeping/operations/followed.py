"""The rule of layers that have none: their parameters are followed through their operations."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from dptrain.clipping.bookkeeping.operations.operation import Unhandled
from dptrain.clipping.bookkeeping.operations.session import LayerSession
from dptrain.clipping.bookkeeping.rules.exchanged import Exchanged, uncached
from dptrain.clipping.bookkeeping.rules.generic import GenericRule, UnknownRule
from dptrain.clipping.bookkeeping.rules.rule import Forward, Inputs, LayerRule, Observe
from dptrain.clipping.bookkeeping.shared.row_plan import RowPlan


class OperationsRule(UnknownRule):
    """Any layer: what its parameters do is seen operation by operation (``Tracked``).

    docs/theory/clipping.md#thm-followed; ``test_equals_the_loop``.

    The layer's forward runs once, as it is. A broadcast sum or product, a matrix product, a
    convolution, a look-up or a normalization has its gradients for the price that the layers of
    that name pay; the vector-Jacobian product of any other operation is run again for each example.
    Also for bare parameters of modules that hold other layers, which keep their own rules.

    Args:
        name: of it in the user's module.
        shared: the layer's own rule, if this is for calls on what all examples share, so that no
            tensor there has rows of the batch, whatever its size.
    """

    follows = True
    plan: RowPlan

    def __init__(self, name: str = "", *, shared: LayerRule | None = None) -> None:
        super().__init__(name)
        self.shared, self.plan = shared, RowPlan()

    @override
    def holders(self, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return super().holders(layer) if self.shared is None else self.shared.holders(layer)

    @override
    def again(self) -> GenericRule:
        return GenericRule(self.name or "(the module itself)", self.others)

    @override
    def run(self, observe: Observe, forward: Forward, args: Inputs, kwargs: dict[str, Any]) -> Any:
        """Followed; where that is in vain, and passes over few rows do not look for more, again."""
        try:
            return self.observed(observe, functools.partial(forward, **kwargs), args)
        except Unhandled as error:
            if error.layer is not observe.layer or (error.of_rows and self.plan.settled):
                raise
        if self.plan.tentative:
            with observe.detached():
                return forward(*args, **kwargs)
        observe.use(self.again())
        return observe.rule.run(observe, forward, args, kwargs)

    @override
    def forward(self, layer: nn.Module, forward: Forward, inputs: Inputs, observe: Observe) -> Any:
        rows = observe.rows()
        if rows is None:  # no batch is at hand: the backward pass will be refused
            return forward(*inputs)
        session = LayerSession(observe, self.plan, rows, self.past_their_own())
        own = observe.parameters()

        def tracked(name: str, p: nn.Parameter) -> torch.Tensor:
            return session.parameter(own[name]) if name in own else p

        session.without_rows = self.shared is not None
        try:
            with Exchanged(self.holders(layer), tracked), uncached():
                return forward(*inputs)
        finally:
            session.without_rows = False


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
                "it computes one prompt for all examples with recurrent layers, for which "
                "per-example gradients of a prompt are not supported: use "
                "encoder_reparameterization_type='MLP'"
            )
        return None


class MergedAttentionRule(PromptRule):
    """LoRA on ``nn.MultiheadAttention``: every call puts sums into its weights, and back."""

    @override
    def refusal(self, layer: nn.Module) -> str | None:
        return (
            "LoRA on nn.MultiheadAttention replaces the layer's parameters by sums in every "
            "call, for which per-example gradients are not supported: apply LoRA to the "
            "nn.Linear layers of an attention built from those"
        )


def adapter_rule(layer: nn.Module) -> LayerRule | None:
    """The rule of a module of peft's, where it has one."""
    for (place, name), rule in _RULES.items():
        kind = getattr(sys.modules.get(place), name, None)
        if kind is not None and type(layer) is kind:
            return rule()
    return None


_RULES: dict[tuple[str, str], type[PromptRule]] = {
    ("peft.tuners.prompt_tuning.model", "PromptEmbedding"): PromptRule,
    ("peft.tuners.p_tuning.model", "PromptEncoder"): PromptRule,
    ("peft.tuners.lora.layer", "MultiheadAttention"): MergedAttentionRule,
}
