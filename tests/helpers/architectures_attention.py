"""Attention: built from Linears, and torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tests.helpers.architectures_parts import Residual, Shape

Made = tuple[nn.Module, Shape]


class SelfAttention(nn.Module):
    """Heads by scaled_dot_product_attention, from three Linears or one that is cut in three."""

    def __init__(self, width: int, heads: int, *, bias: bool, fused: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        if fused:
            self.all = nn.Linear(width, 3 * width, bias=bias)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.fused = fused
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.all(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        h = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(h.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, causal={self.causal}"


class TorchAttention(nn.Module):
    """nn.MultiheadAttention over a sequence itself, or over a memory made of it."""

    def __init__(
        self,
        attention: nn.MultiheadAttention,
        memory: nn.Module | None,
        *,
        mask: bool,
        need_weights: bool,
        average: bool,
    ) -> None:
        super().__init__()
        self.attention, self.memory = attention, memory
        self.values = None
        if memory is not None and attention.vdim != attention.kdim:
            self.values = nn.Linear(attention.kdim, attention.vdim)
        self.mask, self.need_weights, self.average = mask, need_weights, average

    def forward(self, x: Tensor) -> Tensor:
        key = x if self.memory is None else self.memory(x)
        value = key if self.values is None else self.values(key)
        hidden = None
        if self.mask:  # depends on the row; one key at least is seen
            hidden = x[..., 0] > 0.3
            hidden[:, 0] = False
        h, weights = self.attention(
            x,
            key,
            value,
            key_padding_mask=hidden,
            need_weights=self.need_weights,
            average_attn_weights=self.average,
        )
        if weights is None:
            return h
        seen = weights[..., :1] if self.average else weights[..., :1].sum(1)
        return h + seen

    def extra_repr(self) -> str:
        return f"mask={self.mask}, need_weights={self.need_weights}, average={self.average}"


def _heads(draw: Any, width: int) -> int:
    return draw(st.sampled_from([h for h in (1, 2, 3) if width % h == 0]))


def _attention(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    layer = SelfAttention(
        shape[-1],
        _heads(draw, shape[-1]),
        bias=draw(st.booleans()),
        fused=draw(st.booleans()),
        causal=draw(st.booleans()),
    )
    return (Residual(layer) if draw(st.booleans()) else layer), shape


def _torch_attention(draw: Any, shape: Shape, without: frozenset[str]) -> Made:
    width = shape[-1]
    cross = draw(st.booleans())
    kdim = draw(st.integers(1, 5)) if cross else width
    vdim = draw(st.sampled_from([kdim, kdim + 1])) if cross else width
    attention = nn.MultiheadAttention(
        width,
        _heads(draw, width),
        bias=draw(st.booleans()),
        kdim=kdim,
        vdim=vdim,
        batch_first=True,
    )
    layer = TorchAttention(
        attention,
        nn.Sequential(nn.Linear(width, kdim), nn.Tanh()) if cross else None,
        mask=draw(st.booleans()),
        need_weights=draw(st.booleans()),
        average=draw(st.booleans()),
    )
    return (Residual(layer) if draw(st.booleans()) else layer), shape


ATTENTION_BLOCKS: dict[str, Callable[[Any, Shape, frozenset[str]], Made]] = {
    "attention of linears": _attention,
    "torch attention": _torch_attention,
}
