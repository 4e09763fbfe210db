"""Runs of the real engine whose releases are attacked, and the engine as it was before the grid.

Of every release there is what an observer has: the numbers, σR and B̄, the grid, and the weights
before. What the run was about (who was in a batch, the sums) is beside it, to count who is right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import BandMF, Gradients, MinSep, NoiseOptions, Poisson, PrivacyEngine
from tests.oracles.float_noise import FloatNoise
from tests.oracles.membership_game import Game
from tests.oracles.reachable import (
    FLOAT32,
    Forward,
    noisy_sum,
    stepped,
    sum_on_grid,
    unreachable,
    whole,
)

RELEASE = "dptrain.noise.streams.flat.FlatStream.release"


@contextlib.contextmanager
def in_floating_point() -> Iterator[None]:
    """The engine releases sums plus float32 noise, added in floating point."""
    made: dict[int, FloatNoise] = {}

    def release(stream: Any, sums: Any, deviation: float) -> list[torch.Tensor]:
        like = next(stream)  # counts the step
        if id(stream) not in made:
            column = np.trim_zeros(stream.strategy.first_column(stream.steps), "b")
            made[id(stream)] = FloatNoise(
                column,
                seed=stream.normals.seed,
                secure=stream.normals.secure,
            )
        totals = [
            torch.zeros(row.shape) if total is None else total
            for total, row in zip(sums, like, strict=True)
        ]
        return made[id(stream)].release(totals, deviation)

    with mock.patch(RELEASE, release):
        yield


@dataclasses.dataclass(frozen=True)
class Seen:
    """What was seen of one step: a word a row.

    Attributes:
        numbers: shape (words, numbers of a word).
        touched: of these words there was one in the batch, shape (words,).
        floats: what a word of which there was none would show, as a function of float32 noise.
        grid: the same of whole numbers.
        bits: of the grid.
    """

    numbers: torch.Tensor
    touched: torch.Tensor
    floats: Forward
    grid: Forward
    bits: int

    def not_floats(self, slack: int = 0) -> torch.Tensor:
        """How many numbers of a word no float32 noise brings about alone, shape (words,)."""
        return unreachable(self.numbers, self.floats, FLOAT32, slack).sum(dim=1)

    def not_on_grid(self, slack: int = 0) -> torch.Tensor:
        """The same, of noise that is whole numbers."""
        return unreachable(self.numbers, self.grid, whole(self.bits), slack).sum(dim=1)


class Sentences(nn.Module):
    """A mean of embeddings, and a number."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(x).mean(dim=1)).squeeze(1)


def _options(sigma: float, seed: int, secure: bool) -> dict[str, Any]:
    return {
        "noise_multiplier": sigma,
        "max_grad_norm": 1.0,
        "noise": NoiseOptions(secure=secure),
        "seed": None if secure else seed,
    }


def embedding_rows(
    sigma: float,
    *,
    seed: int,
    secure: bool = False,
    bands: int = 1,
    steps: int = 2,
    examples: int = 160,
    words: int = 400,
    width: int = 128,
    batch: int = 32,
) -> list[Seen]:
    """The noisy mean gradients of an embedding, of sentences of three words."""
    torch.manual_seed(seed)
    net = Sentences(words, width)
    x, y = torch.randint(0, words, (examples, 3)), torch.randn(examples)
    scheme: Any = Poisson(probability=batch / examples, dataset_size=examples, steps=steps)
    strategy = {}
    if bands > 1:
        scheme = MinSep.for_batch_size(
            batch_size=batch, dataset_size=examples, min_sep=bands, steps=steps
        )
        strategy = {"strategy": BandMF(bands=bands)}
    private = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data=TensorDataset(x, y),
        scheme=scheme,
        **strategy,
        **_options(sigma, seed, secure),
    )
    model, optimizer, loader = private
    released: list[torch.Tensor] = []
    optimizer.attach_step_hook(lambda _: released.append(model.words.weight.grad.clone()))
    found, none = [], torch.zeros(words, width)
    divisor, bits = optimizer.expected_batch_size, optimizer.noise.grid_bits
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
        found.append(
            Seen(
                numbers=released[-1],
                touched=_named(a, words),
                floats=noisy_sum(none, sigma, divisor),
                grid=sum_on_grid(none, sigma, bits, divisor),
                bits=bits,
            )
        )
    return found


def opacus_rows(
    sigma: float,
    *,
    seed: int,
    secure: bool = False,
    steps: int = 2,
    examples: int = 160,
    words: int = 400,
    width: int = 128,
    batch: int = 32,
) -> list[Seen]:
    """As ``embedding_rows``, by Opacus's optimizer; ``secure`` is its ``secure_mode``.

    The generator is torch's in both modes: what is looked at is the arithmetic.
    """
    torch.manual_seed(seed)
    net = GradSampleModule(Sentences(words, width))
    x, y = torch.randint(0, words, (examples, 3)), torch.randn(examples)
    optimizer = DPOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1),
        noise_multiplier=sigma,
        max_grad_norm=1.0,
        expected_batch_size=batch,
        secure_mode=secure,
    )
    released: list[torch.Tensor] = []
    optimizer.attach_step_hook(lambda _: released.append(net._module.words.weight.grad.clone()))
    found, none = [], torch.zeros(words, width)
    for _ in range(steps):
        taken = torch.rand(examples) < batch / examples
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            nn.functional.mse_loss(net(x[taken]), y[taken]).backward()
        optimizer.step()
        floats = noisy_sum(none, sigma, batch)
        found.append(Seen(released[-1], _named(x[taken], words), floats, floats, bits=0))
    return found


def _named(a: torch.Tensor, words: int) -> torch.Tensor:
    """Of which words there is one, of those that are counted from 0."""
    return torch.zeros(words, dtype=torch.bool).index_fill_(0, a.flatten().unique(), True)


def sgd(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    """A learning rate of 1/2, which keeps the bits of a gradient."""
    return torch.optim.SGD(weights, lr=0.5)


def adam(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    """As everybody has it."""
    return torch.optim.Adam(weights, lr=0.01)


def damped_adam(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    """With an ε that gradients are small beside."""
    return torch.optim.Adam(weights, lr=0.01, eps=1.0)


def classifier(words: int, dtype: torch.dtype) -> tuple[nn.Module, nn.Parameter]:
    """A linear classifier of word counts that begins with zeros, and its weights, (60, words).

    A frozen bias makes gradients of the classes different numbers.
    """
    net = nn.Linear(words, 60, dtype=dtype)
    nn.init.zeros_(net.weight)
    nn.init.normal_(net.bias)
    net.bias.requires_grad_(False)
    return net, net.weight


def adapted(words: int, dtype: torch.dtype) -> tuple[nn.Module, nn.Parameter]:
    """A frozen classifier with an adapter of rank 64 by peft, and the adapter's first matrix.

    The matrix that is zero at first is the first one, as in peft's adapters of embeddings, so that
    its columns have gradients in the first step.
    """
    import peft

    net = peft.get_peft_model(
        nn.Sequential(nn.Linear(words, 60, bias=False, dtype=dtype)),
        peft.LoraConfig(r=64, lora_alpha=64, target_modules=["0"]),
    )
    layer = net.base_model.model[0]
    first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        first.zero_()
        second.normal_(std=0.1)
    return net, first


def published_weights(
    sigma: float,
    *,
    seed: int,
    make: Callable[[int, torch.dtype], tuple[nn.Module, nn.Parameter]] = classifier,
    step: Callable[[list[torch.Tensor]], torch.optim.Optimizer] = sgd,
    dtype: torch.dtype = torch.float32,
    secure: bool = False,
    steps: int = 2,
    examples: int = 160,
    words: int = 600,
    batch: int = 32,
) -> list[Seen]:
    """The weights after each step, of documents of few words; an optimizer with a state: one step.

    The observer knows the weights before, the optimizer and its learning rate.
    """
    torch.manual_seed(seed)
    net, weight = make(words, dtype)
    x = (torch.rand(examples, words) < 0.004).to(dtype)
    y = torch.randint(0, 60, (examples,))
    trained = [p for p in net.parameters() if p.requires_grad]
    private = PrivacyEngine().make_private(
        module=net,
        optimizer=step(trained),
        data=TensorDataset(x, y),
        scheme=Poisson(probability=batch / examples, dataset_size=examples, steps=steps),
        **_options(sigma, seed, secure),
    )
    model, optimizer, loader = private
    found, before = [], weight.detach().clone()
    divisor, bits = optimizer.expected_batch_size, optimizer.noise.grid_bits
    none = torch.zeros(weight.shape, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
        after = weight.detach().clone()

        def transposed(release: Forward, before: torch.Tensor = before) -> Forward:
            forward = stepped(release, before, step)
            return lambda codes: forward(codes.T.contiguous()).T

        found.append(
            Seen(
                numbers=after.T,
                touched=(a != 0).any(dim=0),
                floats=transposed(noisy_sum(none, sigma, divisor)),
                grid=transposed(sum_on_grid(none, sigma, bits, divisor)),
                bits=bits,
            )
        )
        before = after
    return found


def membership(
    sigma: float,
    *,
    dtype: torch.dtype,
    seed: int,
    secure: bool = False,
    bound: float = 0.7,
    numbers: int = 500,
    releases: int = 40,
) -> Game:
    """A linear regression with a learning rate of zero, of 64 examples, all of them in each step.

    Without the example means with an example whose gradient is zero in its place.
    """
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(64, numbers, dtype=dtype, generator=rng) / numbers**0.5
    y = torch.randn(64, dtype=dtype, generator=rng)
    sums, released, bits = [], [], 0
    for present in (False, True):
        data = x.clone(), y.clone()
        if not present:
            data[0][0], data[1][0] = 0.0, 0.0
        net = nn.Linear(numbers, 1, bias=False, dtype=dtype)
        nn.init.zeros_(net.weight)
        private = PrivacyEngine().make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
            data=TensorDataset(*data),
            scheme=Poisson(probability=1.0, dataset_size=64, steps=releases // 2),
            gradients=Gradients(loss="sum"),
            **{**_options(sigma, seed + present, secure), "max_grad_norm": bound},
        )
        model, optimizer, loader = private
        bits = optimizer.noise.grid_bits
        seen: list[torch.Tensor] = []
        told: list[torch.Tensor] = []
        _listen(optimizer, told, seen)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a).squeeze(1), b, reduction="sum").backward()
            optimizer.step()
        assert all(torch.equal(each, told[0]) for each in told)
        sums.append(told[0])
        released.append(torch.stack(seen))
    return Game((sums[0], sums[1]), (released[0], released[1]), sigma * bound, bits)


def _listen(optimizer: Any, told: list[torch.Tensor], seen: list[torch.Tensor]) -> None:
    """Take down the sum of every step, for the hypotheses, and what is released of it."""
    release = optimizer.add_noise

    def add_noise() -> None:
        told.append(optimizer.params[0].summed_grad.flatten().clone())
        release()
        seen.append(optimizer.params[0].grad.flatten().clone())

    optimizer.add_noise = add_noise
