"""Gradient checkpointing where Opacus's hooks form the gradients: right, or refused by name."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.bookkeeping_runs import ROWS, backward, case, check, run_of
from tests.helpers.clipping_oracle import reference
from tests.helpers.engine import (
    everything_every_step,
    images,
    make,
    reference_sum,
    released,
    small_net,
    train,
)

hooked = pytest.mark.parametrize("mode", ["hooks", "functorch"])
both = pytest.mark.parametrize("reentrant", [False, True])


class Blocks(nn.Module):
    """Blocks that share their last layer, each with a part that is checkpointed in another way."""

    def __init__(self, blocks=3):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.shared = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4), self.shared)
            for _ in range(blocks)
        )
        self.how = None

    def forward(self, ids):
        h = self.embed(ids)
        for number, block in enumerate(self.blocks):
            h = h + (block(h) if self.how is None else self.how[number](block, h))
        return self.shared(h).mean(1)


def once(reentrant):
    return lambda block, h: checkpoint(block, h, use_reentrant=reentrant)


def nested(outer, inner):
    def call(block, h):
        def body(h):
            for layer in block:
                h = once(inner)(layer, h)
            return h

        return once(outer)(body, h)

    return call


def plain(block, h):
    return block(h)


WAYS = {
    "non-reentrant": [once(False)] * 3,
    "reentrant": [once(True)] * 3,
    "one of each": [once(False), plain, once(True)],
    "the last plain": [once(True), once(False), plain],
    "non-reentrant in non-reentrant": [nested(False, False)] * 3,
    "reentrant in non-reentrant": [nested(False, True)] * 3,
    "non-reentrant in reentrant": [nested(True, False)] * 3,
    "reentrant in reentrant": [nested(True, True)] * 3,
}


@pytest.mark.sample(every=16)
@hooked
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_blocks_of_a_model(mode, way, reduction):
    """Each parameter's norms and sums are the loop's over the module without checkpoints."""
    module = Blocks()
    a = case(module, torch.randint(0, 7, (ROWS, 3)))
    wanted = reference(module, a.inputs, a.targets)
    module.how = WAYS[way]
    private = run_of(a, mode=mode, reduction=reduction)
    backward(private)
    assert all(p.grad_sample is not None for p in private.optimizer.params)
    check(private, wanted)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits[:, -1]


@both
def test_llama(reentrant):
    """By transformers' own switch; 16 of its 21 parameters had no gradient at all."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
    )
    module = Logits(LlamaForCausalLM(sizes)).train()
    a = case(module, torch.randint(0, 20, (ROWS, 6)), dtype=torch.float32)  # as its norms are
    wanted = reference(module, a.inputs, a.targets)
    module.model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    private = run_of(a, mode="hooks")
    backward(private)
    assert all(p.grad_sample is not None for p in private.optimizer.params)
    check(private, wanted)


class Twice(nn.Module):
    """A layer is called twice and the loss sees one of the calls."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        self.first(x + 1)
        return self.last(self.first(x))


@hooked
def test_gradients_that_were_left_half_way_are_refused_by_name(mode):
    """Opacus waits for the other call's: the parameters trained on noise alone, silently."""
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    data = torch.utils.data.TensorDataset(x, y)
    private = make(Twice(), data, mode, scheme=everything_every_step(6, 1))
    with pytest.raises(RuntimeError, match=r"'first.weight', 'first.bias'.*torch.no_grad\(\)"):
        train(private)
    assert private.steps_executed == 0


@hooked
def test_a_forward_pass_of_an_abandoned_batch_leaves_the_next_ones_right(mode):
    """Its gradients were waited for in all later steps."""
    data = images(8)
    expected = reference_sum(small_net(), data, range(8), 0.5)
    private = make(
        small_net(),
        data,
        mode,
        scheme=everything_every_step(8, 1),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
    )
    for x, _ in private.loader:
        private.module(x)
        break
    train(private)
    torch.testing.assert_close(released(private, 8), expected, rtol=1e-5, atol=2e-6)
