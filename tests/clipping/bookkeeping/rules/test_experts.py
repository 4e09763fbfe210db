"""Mixtures of experts of Hugging Face, against the loop; and what of them mixes the examples."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from dptrain.clipping.bookkeeping.rules import rule_of
from dptrain.clipping.bookkeeping.rules.experts import ExpertsRule
from tests.clipping.bookkeeping.test_bookkeeping_hugging_face import (
    PAD,
    VOCABULARY,
    Logits,
    assert_equals_loop,
    make,
    texts,
)
from tests.helpers.bookkeeping_runs import ROWS, backward, case, check_like_loop, run_of

SIZES = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
}
MOE = {"num_experts": 4, "moe_intermediate_size": 6}
FAMILIES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {**MOE, "shared_expert_intermediate_size": 6},
    "Qwen3Moe": MOE,
    "Olmoe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4},  # with biases, and the weights the other way round
    "MiniMax": {"num_local_experts": 4},
}
# Whose routers compute in float32, whatever the model does.
IN_FLOAT32 = {
    "DeepseekV3": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
        "moe_intermediate_size": 6, "q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 4,
    },
    "Glm4Moe": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
        "moe_intermediate_size": 6,
    },
}  # fmt: skip


def build(family, implementation="eager", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")
    options = {**SIZES, **{**FAMILIES, **IN_FLOAT32}[family], **options}
    model = getattr(transformers, f"{family}ForCausalLM")(config(**options))
    model.set_experts_implementation(implementation)
    for p in model.parameters():
        nn.init.normal_(p, std=0.4)
    return model


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_one_row_at_a_time(family):
    model = Logits(build(family)).double().train()
    kinds = [type(rule_of(layer)) for layer in model.modules()]
    assert kinds.count(ExpertsRule) == 2
    assert_equals_loop(model, texts())


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("family", IN_FLOAT32)
def test_in_single_precision(family):
    ids, mask, _ = texts()
    check_like_loop(case(Logits(build(family)), ids, mask, dtype=torch.float32))


def by_examples(x):
    return x.flatten(0, 1)


def to_examples(x):
    return x.unflatten(0, (-1, 4))


class Mixture(nn.Module):
    """A router and its experts over all tokens, in the order that is given."""

    def __init__(self, implementation="eager", *, to=by_examples, back=to_examples, several=2):
        super().__init__()
        config = transformers.MixtralConfig(
            hidden_size=6, intermediate_size=5, num_local_experts=3, num_experts_per_tok=several
        )
        config._experts_implementation = implementation
        self.router, self.experts = nn.Linear(6, 3), MixtralExperts(config)
        for p in self.experts.parameters():
            nn.init.normal_(p, std=0.5)
        self.to_tokens, self.back, self.several = to, back, several

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(self.several, -1)
        x, weights, index = (self.to_tokens(part) for part in (x, weights, index))
        return self.back(self.experts(x, index, weights))


def tokens():
    return torch.randn(ROWS, 4, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("several", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_experts_by_themselves(several, dtype):
    torch.manual_seed(0)
    check_like_loop(case(Mixture(several=several), tokens(), dtype=dtype))


def test_other_implementations_of_the_same():
    torch.manual_seed(0)
    model = Mixture("batched_mm")
    assert isinstance(rule_of(model.experts), ExpertsRule)
    check_like_loop(case(model, tokens(), dtype=torch.float32))
    # That one takes no numbers in double precision, nor layouts as small as these.
    assert isinstance(rule_of(Mixture("grouped_mm").experts), ExpertsRule)
    assert rule_of(Mixture("somebody's").experts) is None


def test_tokens_of_one_position_after_the_other_are_refused():
    """In their order an example's rows are tokens of several."""
    torch.manual_seed(0)
    model = Mixture(
        to=lambda x: x.transpose(0, 1).flatten(0, 1),
        back=lambda x: x.unflatten(0, (4, -1)).transpose(0, 1),
    )
    with pytest.raises(RuntimeError, match=r"layer 'experts' for one example changed when another"):
        backward(run_of(case(model, tokens())))


def test_another_number_of_tokens_is_refused():
    torch.manual_seed(0)
    model = Mixture(
        to=lambda x: x.flatten(0, 1)[:-1],
        back=lambda x: to_examples(nn.functional.pad(x, (0, 0, 0, 1))),
    )
    with pytest.raises(
        RuntimeError, match=r"MixtralExperts.* 19 tokens .* the same number of tokens"
    ):
        backward(run_of(case(model, tokens())))


class Balanced(nn.Module):
    """With the loss that spreads the tokens of a batch over the experts."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        output = self.model(input_ids=ids, attention_mask=mask, output_router_logits=True)
        return output.logits, output.aux_loss


def test_a_balancing_loss_is_refused():
    """It multiplies shares of the whole batch: what one example gets depends on the others."""
    model = Balanced(build("Mixtral")).double().train()
    private = make(model, texts())
    ids, mask, _ = next(iter(private.loader))
    with pytest.raises(RuntimeError, match="mixes the examples after this layer"):
        private.module(ids, mask)


class Experts(nn.Module):
    """Of linear layers, each called with the tokens that are routed to it."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            y[mask] = expert(x[mask])
        return y + self.router(x).sum(-1, keepdim=True)


def test_layers_that_are_given_some_tokens_are_refused_by_name():
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match=r"layer 'experts\.\d'"):
        backward(run_of(case(Experts(), tokens())))
