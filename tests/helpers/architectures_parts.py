"""What architectures of all kinds are put together with."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclasses.dataclass
class Start:
    """The first layers and what they are fed.

    Attributes:
        module: called with the inputs.
        inputs: of the whole batch.
        shape: of its output, without the rows.
        embedding: one that the output head may share its weight with.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    shape: Shape
    embedding: nn.Embedding | None = None


class First(nn.Module):
    """No layer at all: the first input as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Residual(nn.Module):
    """x + f(x): the very same output gradient reaches f and what is before it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Branches(nn.Module):
    """f(x) + h(x): layers that share an input and an output gradient."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


class Repeated(nn.Module):
    """One layer called several times."""

    def __init__(self, layer: nn.Module, times: int) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


class Pool(nn.Module):
    """To one vector a row, in ways that leave the output gradient expanded, strided or sparse."""

    def __init__(self, how: str, dimensions: tuple[int, ...]) -> None:
        super().__init__()
        self.how, self.dimensions = how, dimensions

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "mean":
            return x.mean(self.dimensions)
        if self.how == "first":
            for dimension in sorted(self.dimensions, reverse=True):
                x = x.select(dimension, 0)
            return x
        return x.flatten(1)

    def extra_repr(self) -> str:
        return self.how


class Model(nn.Module):
    """Stem, blocks, pooling and head; the head may share the embedding's weight."""

    def __init__(
        self, start: Start, blocks: list[nn.Module], shape: Shape, kind: str, draw: Any
    ) -> None:
        super().__init__()
        self.stem, self.blocks = start.module, nn.Sequential(*blocks)
        self.pool, self.head = nn.Identity(), nn.Identity()
        if kind != "vector":
            how = draw(st.sampled_from(["mean", "first", "flatten", "none"]))
            if how != "none":
                dimensions = (1,) if kind == "sequence" else tuple(range(2, len(shape) + 1))
                self.pool = Pool(how, dimensions)
                width = shape[-1] if kind == "sequence" else shape[0]
                numbers = int(torch.Size(shape).numel())
                shape = (numbers,) if how == "flatten" else (width,)
        tied = start.embedding is not None and draw(st.booleans())
        head = draw(st.sampled_from(["linear", "none"]))
        if tied:
            embedding = start.embedding
            last = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, draw(st.booleans()))
            last.weight = embedding.weight
            self.head = nn.Sequential(nn.Linear(shape[-1], embedding.embedding_dim), last)
        elif head == "linear" and (kind != "image" or len(shape) == 1):
            self.head = nn.Linear(shape[-1], draw(st.integers(1, 4)), bias=draw(st.booleans()))
        if not any(True for _ in self.parameters()):
            self.head = nn.Linear(shape[-1], 2)

    def forward(self, *inputs: Tensor) -> Tensor:
        x = self.blocks(self.stem(*inputs))
        # An input as it is must not be written to.
        x = x.clone() if any(x is given for given in inputs) else x
        return self.head(self.pool(x))


def followed(draw: Any, layer: nn.Module, without: frozenset[str]) -> nn.Module:
    """A layer and what is done to its output, half of the time in place."""
    inplace = "inplace" not in without
    kinds = [nn.LeakyReLU(0.2, inplace=inplace), nn.ReLU(inplace=inplace), nn.GELU(), nn.Identity()]
    return nn.Sequential(layer, draw(st.sampled_from(kinds)))


def disturb(module: nn.Module) -> None:
    """Move every parameter, so that no weight of a normalization is one and no bias zero."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.2 * torch.randn_like(p))
