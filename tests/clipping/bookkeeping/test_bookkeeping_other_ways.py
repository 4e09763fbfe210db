"""How a model is computed does not matter to what is released, over several steps of training.

Activation checkpointing, kernels of attention, compiled code: each against the plain model, with
the same noise.
"""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from tests.helpers.bookkeeping_runs import case, check_like_loop
from tests.helpers.engine import flat, make, separated

SIZE, TOKENS, STEPS = 12, 6, 4


class Attention(nn.Module):
    """Causal, by torch's function for it, or by its formula where ``fused`` is off."""

    def __init__(self, width, heads, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Two blocks and a mean over the positions; ``reentrant`` says how blocks are checkpointed."""

    def __init__(self, fused=False, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 8)
        self.attention = nn.ModuleList(Attention(8, 2, fused) for _ in range(2))
        self.dense = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 3)
        self.reentrant = reentrant

    def block(self, number, h):
        h = h + self.attention[number](h)
        return h + self.dense[number](h)

    def forward(self, ids):
        h = self.embed(ids)
        for number in range(2):
            if self.reentrant is None:
                h = self.block(number, h)
            else:
                h = checkpoint(self.block, number, h, use_reentrant=self.reentrant)
        return self.head(h.mean(1))


def texts():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 9, (SIZE, TOKENS), generator=generator)
    return TensorDataset(ids, ids[:, 0] % 3)


def trained(module, forward=None, kernels=None, wrap=lambda module: module, **options):
    """The parameters after a few steps with noise, of batches in two parts."""
    module = module.double()
    options = {**separated(SIZE, STEPS, bands=2), **options}
    private = make(
        wrap(module), texts(), "bookkeeping", max_physical_batch_size=3, seed=2, **options
    )
    run = private.module if forward is None else forward(private.module)
    for ids, labels in private.loader:
        private.optimizer.zero_grad()
        if kernels is None:
            nn.functional.cross_entropy(run(ids), labels).backward()
        else:
            with sdpa_kernel(kernels):
                nn.functional.cross_entropy(run(ids), labels).backward()
        private.optimizer.step()
    assert private.steps_executed == STEPS
    return flat(module)


@pytest.fixture(scope="module")
def plain():
    return trained(Decoder())


@pytest.fixture
def _traced_anew():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def same(found, wanted):
    assert not torch.equal(wanted, flat(Decoder().double()))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(plain, reentrant):
    same(trained(Decoder(reentrant=reentrant)), plain)


KERNELS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_kernels_of_attention(plain, kernel):
    """Those that there are on a CPU; one that could not be used would be an error."""
    same(trained(Decoder(fused=True), kernels=[kernel]), plain)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_kernels_of_attention_and_checkpoints(plain, kernel):
    same(trained(Decoder(fused=True, reentrant=False), kernels=[kernel]), plain)


def test_a_kernel_that_is_forbidden_is_not_used():
    with pytest.raises(RuntimeError, match=r"No (available kernel|viable backend)"):
        trained(Decoder(fused=True), kernels=[SDPBackend.CUDNN_ATTENTION])


BACKENDS = [
    "eager",
    pytest.param("aot_eager", marks=pytest.mark.slow),
    pytest.param("inductor", marks=pytest.mark.slow),  # minutes of g++ the first time
]


@pytest.mark.slow
@pytest.mark.usefixtures("_traced_anew")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fused", [False, True])
def test_compiled_before_the_run(plain, backend, fused):
    model = Decoder(fused=fused)
    same(trained(model, wrap=lambda module: torch.compile(module, backend=backend)), plain)


@pytest.mark.slow
@pytest.mark.usefixtures("_traced_anew")
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_after_the_run_was_made(plain, backend):
    model = Decoder(fused=True)
    same(trained(model, forward=lambda module: torch.compile(module, backend=backend)), plain)


@pytest.mark.slow
@pytest.mark.usefixtures("_traced_anew")
def test_compiled_in_place(plain):
    model = Decoder()
    model.compile(backend="eager")
    same(trained(model), plain)


@pytest.mark.slow
@pytest.mark.usefixtures("_traced_anew")
def test_compiled_with_checkpoints(plain):
    model = Decoder(reentrant=False)
    same(trained(model, wrap=lambda module: torch.compile(module, backend="eager")), plain)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_those_of_one_example_at_a_time(fused):
    check_like_loop(case(Decoder(fused=fused), torch.randint(0, 9, (5, TOKENS))))
