"""Gradient checkpointing: the forward pass is made again in the backward pass, and reports then."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForSequenceClassification

from tests.helpers.bookkeeping_runs import ROWS, backward, case, check, check_like_loop, run_of
from tests.helpers.clipping_oracle import reference

both = pytest.mark.parametrize("reentrant", [False, True])


class Blocks(nn.Module):
    """Blocks that share their last layer, checkpointed if ``reentrant`` says how."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.shared = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4), self.shared)
            for _ in range(3)
        )
        self.reentrant = None

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            if self.reentrant is None:
                h = h + block(h)
            else:
                h = h + checkpoint(block, h, use_reentrant=self.reentrant)
        return h.mean(1)


@both
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_blocks_of_a_model(reentrant, reduction):
    module = Blocks()
    a = case(module, torch.randint(0, 7, (ROWS, 3)))
    wanted = reference(module, a.inputs, a.targets)
    module.reentrant = reentrant
    private = run_of(a, reduction=reduction)
    backward(private)
    check(private, wanted)


@both
def test_bert(reentrant):
    """By transformers' own switch; rows of different lengths."""
    torch.manual_seed(0)
    sizes = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = BertForSequenceClassification(sizes)

        def forward(self, ids, mask):
            return self.bert(input_ids=ids, attention_mask=mask).logits

    mask = (torch.arange(6) < torch.tensor([6, 2, 4, 1, 5])[:, None]).long()
    module = Logits().train()
    a = case(module, torch.randint(0, 20, (ROWS, 6)), mask)
    wanted = reference(module, a.inputs, a.targets)
    calls = []
    module.bert.bert.encoder.layer[0].attention.register_forward_hook(lambda *_: calls.append(1))
    module.bert.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    private = run_of(a, probe="off")  # which calls hooks too
    backward(private)
    assert len(calls) == 2  # or nothing was checkpointed
    check(private, wanted)


@pytest.mark.sample(every=3)
@both
def test_inputs_of_layers_are_not_kept_between_the_passes(reentrant):
    module = Blocks()
    a = case(module, torch.randint(0, 7, (ROWS, 3)))
    module.reentrant = reentrant
    private = run_of(a, probe="off")  # which calls hooks too
    seen = []
    module.blocks[1][3].register_forward_hook(
        lambda _layer, inputs, _output: seen.append(weakref.ref(inputs[0]))
    )
    (ids,) = next(iter(private.loader))[:1]
    output = private.module(ids.flatten(0, 1))
    gc.collect()
    assert [ref() for ref in seen] == [None]
    output.sum().backward()
    assert len(seen) == 2


class Inner(nn.Module):
    """What all examples share is made of parameters here."""

    def __init__(self, run):
        super().__init__()
        self.run, self.bias = run, nn.Linear(1, 1)
        self.a, self.b = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3, 4))
        self.table = nn.Parameter(torch.randn(2 * ROWS - 1))

    def forward(self, h):
        return self.run(self, h)


class Shared(nn.Module):
    """Such a layer, checkpointed if ``reentrant`` says how."""

    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner = nn.Linear(4, 4), Inner(run)
        self.reentrant = None

    def forward(self, x):
        h = self.first(x)
        if self.reentrant is None:
            return self.inner(h).mean(1)
        return checkpoint(self.inner, h, use_reentrant=self.reentrant).mean(1)


def _places(h):
    where = torch.arange(ROWS)
    return where[:, None] - where


SHARED = {
    "a product of parameters": lambda m, h: h + h @ (m.a @ m.b),
    "a normalized one": lambda m, h: h @ (m.a / m.a.norm()),
    "softmax": lambda m, h: (h @ m.a) @ m.b.softmax(-1),
    "a bias by a layer": lambda m, h: (
        (h @ h.transpose(1, 2) + m.bias(_places(h).to(h)[..., None]).squeeze(-1)) @ h
    ),
    # As many positions as rows: only passes over other numbers of rows tell which is which.
    "a table, as large as the batch": lambda m, h: nn.functional.scaled_dot_product_attention(
        h, h, h, m.table[_places(h) + ROWS - 1]
    ),
}


@pytest.mark.sample(every=3)
@both
@pytest.mark.parametrize("name", SHARED)
def test_parameters_within(name, reentrant):
    module = Shared(SHARED[name])
    a = case(module, torch.randn(ROWS, ROWS, 4))
    wanted = reference(module, a.inputs, a.targets)
    module.reentrant = reentrant
    private = run_of(a)
    backward(private)
    check(private, wanted)


@both
def test_a_part_of_a_layer_with_parameters_of_its_own(reentrant):
    """The second run of it is no call of the layer."""

    def run(m, h):
        return checkpoint(lambda h: h + h @ (m.a @ m.b), h, use_reentrant=reentrant)

    private = run_of(case(Shared(run), torch.randn(ROWS, ROWS, 4)))
    named = (
        r"parameter '[ab]' of layer 'inner'"
        if reentrant
        else r"layer 'inner': the forward of this layer uses activation checkp"
    )
    with pytest.raises(RuntimeError, match=named):
        backward(private)


def test_dropout_is_the_same_in_both_passes():
    """One draw of a mask for all rows, so that the loop can have the same one."""

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

        def inner(self, x):
            mask = nn.functional.dropout(torch.ones(8, dtype=x.dtype), 0.5)
            return self.last(torch.tanh(self.first(x)) * mask)

        def forward(self, x):
            torch.manual_seed(3)
            return checkpoint(self.inner, x, use_reentrant=False)

    check_like_loop(case(Dropped(), torch.randn(ROWS, 4)))
