"""Models as people write them themselves."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.coverage.case import LENGTH, ROWS, VOCABULARY, Case, Inputs, first, generator, tokens


class Norm(nn.Module):
    """A layer norm with an optional bias, which torch's had not for long."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(x).unflatten(2, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(width, bias=True), Norm(width, bias=False)
        self.attention = CausalAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class NanoGPT(nn.Module):
    """A decoder in a hundred lines, its head tied to the embedding."""

    def __init__(self, *, positions: str = "layer", width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions: nn.Module | nn.Parameter
        if positions == "layer":
            self.positions = nn.Embedding(LENGTH, width)
        else:
            self.positions = nn.Parameter(0.1 * torch.randn(1, LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.norm = Norm(width, bias=True)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        if isinstance(self.positions, nn.Module):
            where = self.positions(torch.arange(length, device=input_ids.device))
        else:
            where = self.positions[:, :length]
        x = self.tokens(input_ids) + where
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TinyViT(nn.Module):
    """A class token, positions, layer scale and a learned temperature as bare parameters."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width))
        self.scale = nn.Parameter(torch.full((width,), 0.1))
        self.temperature = nn.Parameter(torch.zeros(()))
        self.block = Block(width, 2)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions
        tokens = tokens + self.scale * self.block(tokens)
        return self.head(tokens[:, 0]) * self.temperature.exp()


class Residual(nn.Module):
    """A convolutional block of a diffusion model, told the time."""

    def __init__(self, into: int, out: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, into), nn.GroupNorm(2, out)
        self.conv1 = nn.Conv2d(into, out, 3, padding=1)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(width, out)
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(time)[..., None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class SpatialAttention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.into, self.out = nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(self.norm(x).flatten(2)).transpose(1, 2).chunk(3, 2)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2)).view_as(x)


class UNet(nn.Module):
    """Predicts the noise of a noisy image and its time."""

    def __init__(self, channels: int = 8, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down1 = Residual(channels, channels, width)
        self.shrink = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.down2 = Residual(channels, 2 * channels, width)
        self.attention = SpatialAttention(2 * channels)
        self.middle = Residual(2 * channels, 2 * channels, width)
        self.up2 = Residual(4 * channels, channels, width)
        self.grow = nn.ConvTranspose2d(channels, channels, 4, stride=2, padding=1)
        self.up1 = Residual(2 * channels, channels, width)
        self.last = nn.Sequential(
            nn.GroupNorm(2, channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, padding=1)
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(-math.log(1e4) * torch.arange(self.width // 2).to(x) / (self.width // 2))
        angles = t[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        a = self.down1(self.first(x), time)
        b = self.down2(self.shrink(a), time)
        h = self.middle(self.attention(b), time)
        h = self.grow(self.up2(torch.cat([h, b], 1), time))
        return self.last(self.up1(torch.cat([h, a], 1), time))


class Tagger(nn.Module):
    """A label for each word, by a recurrent layer in both directions."""

    def __init__(self, kind: type[nn.RNNBase], *, packed: bool = False) -> None:
        super().__init__()
        self.packed = packed
        self.words = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.recurrent = kind(8, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.labels = nn.Linear(12, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        if self.packed:
            lengths = attention_mask.sum(1).cpu()
            rows = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=False
            )
            out, _ = nn.utils.rnn.pad_packed_sequence(
                self.recurrent(rows)[0], batch_first=True, total_length=x.shape[1]
            )
        else:
            out, _ = self.recurrent(x)
        return self.labels(out)


class TorchTransformer(nn.Module):
    """torch's own encoder and decoder layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.body = nn.Transformer(
            width, 2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=24, dropout=0.0,
            batch_first=True,
        )  # fmt: skip
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, outputs: Tensor) -> Tensor:
        hidden = attention_mask == 0
        causal = torch.ones(outputs.shape[1], outputs.shape[1], dtype=torch.bool).triu(1)
        decoded = self.body(
            self.words(input_ids), self.words(outputs), tgt_mask=causal,
            src_key_padding_mask=hidden, memory_key_padding_mask=hidden,
        )  # fmt: skip
        return self.head(decoded)


class WeightNormalized(nn.Module):
    """A convolutional net whose weights are parametrized."""

    def __init__(self) -> None:
        super().__init__()
        normalized = nn.utils.parametrizations.weight_norm
        self.body = nn.Sequential(
            normalized(nn.Conv2d(3, 4, 3)), nn.ELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.head = normalized(nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def _images() -> Inputs:
    return {"x": torch.randn(ROWS, 3, 32, 32, generator=generator())}


def _ids() -> Inputs:
    return {"input_ids": tokens()["input_ids"]}


def _noisy() -> Inputs:
    return {
        "x": torch.randn(ROWS, 3, 8, 8, generator=generator()),
        "t": torch.tensor([1.0, 17.0, 400.0]),
    }


def _pairs() -> Inputs:
    outputs = torch.randint(3, VOCABULARY, (ROWS, 5), generator=generator())
    return {**tokens(), "outputs": outputs}


_GROUP = "written by oneself"
OWN = [
    Case("nanoGPT", _GROUP, NanoGPT, _ids, first, quick=True),
    Case(
        "nanoGPT, bare positions", _GROUP, lambda: NanoGPT(positions="bare"), _ids, first,
        quick=True,
    ),
    Case("small ViT, bare parameters", _GROUP, TinyViT, _images, first),
    Case("diffusion UNet", _GROUP, UNet, _noisy, first),
    Case("LSTM tagger", _GROUP, lambda: Tagger(nn.LSTM), tokens, first),
    Case("LSTM tagger, packed", _GROUP, lambda: Tagger(nn.LSTM, packed=True), tokens, first),
    Case("GRU tagger", _GROUP, lambda: Tagger(nn.GRU), tokens, first),
    Case("RNN tagger", _GROUP, lambda: Tagger(nn.RNN), tokens, first),
    Case("torch.nn.Transformer", _GROUP, TorchTransformer, _pairs, first),
    Case("weight-normalized CNN", _GROUP, WeightNormalized, _images, first),
]  # fmt: skip
