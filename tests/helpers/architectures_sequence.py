"""Stems and blocks on vectors (rows, d) and sequences (rows, T, d)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.helpers.architectures_attention import ATTENTION_BLOCKS
from tests.helpers.architectures_parts import (
    Branches,
    First,
    Repeated,
    Residual,
    Shape,
    Start,
    followed,
)

Made = tuple[nn.Module, Shape]


class Tokens(nn.Module):
    """Token embeddings and, added by broadcasting, those of positions and of one segment.

    Positions come as ids of their own for every row, or as one row of ids (1, T), or as 1-D ids
    (T,), which all examples share: their gradients are sums over the batch, unless told apart.
    """

    def __init__(
        self, tokens: nn.Embedding, length: int, positions: str, bag: nn.EmbeddingBag | None
    ) -> None:
        super().__init__()
        self.tokens, self.positions, self.bag = tokens, positions, bag
        if positions != "none":
            self.places = nn.Embedding(length + 2, tokens.embedding_dim)
            self.segments = nn.Embedding(2, tokens.embedding_dim)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids)
        if self.bag is not None:
            h = h + self.bag(ids)[:, None]
        if self.positions == "none":
            return h
        places = torch.arange(ids.shape[1])
        if self.positions == "row":
            places = places[None]
        elif self.positions == "own":
            places = places[None].expand_as(ids)
        return h + self.places(places) + self.segments(torch.zeros_like(ids))

    def extra_repr(self) -> str:
        return f"positions={self.positions}"


STEMS = ["features", "tokens", "own positions", "shared row of positions", "flat positions"]
_POSITIONS = {
    "tokens": "none",
    "own positions": "own",
    "shared row of positions": "row",
    "flat positions": "flat",
}


def sequence_stem(draw: Any, rows: int, kind: str, name: str, without: frozenset[str]) -> Start:
    """Features or embedded ids; a vector a row, or ``T`` of them."""
    width = draw(st.integers(1, 6))
    length = draw(st.integers(1, 6))
    # 1-D ids as many as there are rows could as well be an id for every row: nobody can tell from
    # the layer's call, so that is tried elsewhere.
    while name == "flat positions" and length in (1, rows):
        length += 1
    if name == "features":
        shape = (width,) if kind == "vector" else (length, width)
        x = torch.randn(rows, *shape)
        if kind == "sequence" and draw(st.booleans()):
            x = torch.randn(rows, width, length).transpose(1, 2)
        return Start(First(), (x,), shape)
    vocabulary = draw(st.integers(2, 7))
    paddings = [None] if "padding_idx" in without else [None, 0, vocabulary - 1]
    padding = draw(st.sampled_from(paddings))
    embedding = nn.Embedding(vocabulary, width, padding_idx=padding)
    if kind == "vector":
        # Even ids, of which no two follow one another: few 1-D ids in a row may as well be the
        # positions that all examples share, and are refused.
        ids = 2 * torch.randint(0, -(-vocabulary // 2), (rows,))
        return Start(embedding, (ids,), (width,), embedding)
    ids = torch.randint(0, vocabulary, (rows, length))
    bag = None
    if "bag" not in without and draw(st.integers(0, 3)) == 0:
        bag = nn.EmbeddingBag(
            vocabulary,
            width,
            mode=draw(st.sampled_from(["sum", "mean", "max"])),
            padding_idx=draw(st.sampled_from([None, 1])),
        )
    stem = Tokens(embedding, length, _POSITIONS[name], bag)
    return Start(stem, (ids,), (length, width), embedding)


class _Bilinear(nn.Module):
    """A bilinear layer of an input and a function of it."""

    def __init__(self, layer: nn.Bilinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.cos())


class _Transposed(nn.Module):
    """A layer over channels, (rows, C, T), in a sequence (rows, T, C)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class _Across(nn.Module):
    """One layer shared between two places: every position, and a vector for the whole row."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(x.mean(1))[:, None]


def _linear(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    out = draw(st.integers(1, 6))
    layer = nn.Linear(shape[-1], out, bias=draw(st.booleans()))
    return followed(draw, layer, without), (*shape[:-1], out)


def _hugging_face(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    out = draw(st.integers(1, 6))
    return nn.Sequential(_Contiguous(), followed(draw, Conv1D(out, shape[-1]), without)), (
        *shape[:-1],
        out,
    )


class _Contiguous(nn.Module):
    """What GPT-2's layers ask for: they view their input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous()


def _reused(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    width = shape[-1]
    layer = nn.Linear(width, width, bias=draw(st.booleans()))

    def tied() -> nn.Module:
        other = nn.Linear(width, width)
        other.weight = layer.weight
        return nn.Sequential(layer, nn.Tanh(), other)

    kinds: list[Callable[[], nn.Module]] = [
        lambda: Repeated(layer, draw(st.integers(2, 3))),
        lambda: Repeated(nn.LayerNorm(width), 2),
        lambda: Residual(followed(draw, layer, without)),
        lambda: Branches(layer, nn.Linear(width, width)),
        tied,
    ]
    if "one layer in two modules" not in without:
        kinds.append(lambda: nn.Sequential(layer, nn.Tanh(), Residual(layer)))
    if len(shape) == 2:
        kinds.append(lambda: _Across(layer))
        kinds.append(lambda: _Across(nn.LayerNorm(width)))
    return draw(st.sampled_from(kinds))(), shape


def _layer_norm(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    over = shape if draw(st.booleans()) else shape[-1:]
    affine = draw(st.integers(0, 3)) > 0
    bias = "layer norm without bias" in without or draw(st.booleans())
    layer = nn.LayerNorm(over, elementwise_affine=affine, bias=bias)
    return followed(draw, layer, without), shape


def _rms_norm(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    over = shape if draw(st.booleans()) else shape[-1:]
    affine = draw(st.integers(0, 3)) > 0
    return followed(draw, nn.RMSNorm(over, elementwise_affine=affine), without), shape


def _bilinear(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    out = draw(st.integers(1, 4))
    layer = nn.Bilinear(shape[-1], shape[-1], out, bias=draw(st.booleans()))
    return followed(draw, _Bilinear(layer), without), (*shape[:-1], out)


def _prelu(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    """With one parameter, or one for each entry of the first dimension behind the rows."""
    return followed(draw, nn.PReLU(draw(st.sampled_from([1, shape[0]]))), without), shape


def _channels(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    """Layers over channels, on a transposed sequence."""
    length, width = shape
    groups = draw(st.sampled_from([g for g in (1, 2, 3) if width % g == 0]))
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Conv1d(width, width, 3, padding=1, groups=groups)
    ]
    if groups < length * width:
        kinds.append(lambda: nn.GroupNorm(groups, width))
    if length > 1:
        kinds.append(lambda: nn.InstanceNorm1d(width, affine=True))
    return followed(draw, _Transposed(draw(st.sampled_from(kinds))()), without), shape


class _Outputs(nn.Module):
    """A recurrent layer's states after each step, and its final ones added to them."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.layer.batch_first else x.transpose(0, 1)
        output, states = self.layer(x)
        output = output if self.layer.batch_first else output.transpose(0, 1)
        final = states[0] if isinstance(states, tuple) else states
        return output + final[-1].mean(1)[:, None, None]


def _recurrent(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    kind = draw(st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]))
    width, both = draw(st.integers(1, 4)), draw(st.booleans())
    layer = kind(
        shape[1],
        width,
        num_layers=draw(st.integers(1, 2)),
        bidirectional=both,
        bias=draw(st.booleans()),
        batch_first=draw(st.booleans()),
    )
    return _Outputs(layer), (shape[0], width * (2 if both else 1))


VECTOR_BLOCKS: dict[str, Callable[[Any, Shape, frozenset[str]], Made]] = {
    "linear": _linear,
    "linear reused": _reused,
    "hugging face conv1d": _hugging_face,
    "layer norm": _layer_norm,
    "rms norm": _rms_norm,
    "bilinear": _bilinear,
    "prelu": _prelu,
}
SEQUENCE_BLOCKS: dict[str, Callable[[Any, Shape, frozenset[str]], Made]] = {
    "linear over positions": _linear,
    "linear reused over positions": _reused,
    "hugging face conv1d over positions": _hugging_face,
    "layer norm over positions": _layer_norm,
    "rms norm over positions": _rms_norm,
    "bilinear over positions": _bilinear,
    "prelu over positions": _prelu,
    "layers over channels": _channels,
    "torch recurrent": _recurrent,
    **ATTENTION_BLOCKS,
}
__all__ = ["SEQUENCE_BLOCKS", "STEMS", "VECTOR_BLOCKS", "sequence_stem"]
