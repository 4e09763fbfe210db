"""Networks of the step-time bench that no library has as they are here."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

GROUPS = 32


class MnistCnn(nn.Module):
    """The convolutional network of Opacus's MNIST example: 26,010 parameters, 28×28 images."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, 2)
        self.fc1 = nn.Linear(32 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, 1, 28, 28) to (rows, classes)."""
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2, 1)
        logits: torch.Tensor = self.fc2(torch.relu(self.fc1(x.flatten(1))))
        return logits


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with GroupNorm, and the input added to them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.GroupNorm(GROUPS, width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, before, h, w) to (rows, width, h / stride, w / stride)."""
        h = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


def resnet(blocks: int, classes: int) -> nn.Module:
    """ResNet (He et al. 2016) for 32×32 images: a 3×3 stem, GroupNorm for BatchNorm.

    Args:
        blocks: in each of the four stages: 1 for ResNet-10, 2 for ResNet-18.
        classes: of the labels.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, 64),
        nn.ReLU(),
    ]
    before = 64
    for width in (64, 128, 256, 512):
        for number in range(blocks):
            stride = 2 if number == 0 and width > 64 else 1
            layers.append(ResidualBlock(before, width, stride))
            before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)]
    return nn.Sequential(*layers)


class LstmTagger(nn.Module):
    """A tag for every token, by an LSTM over embeddings."""

    def __init__(self, vocabulary: int, tags: int, *, embedded: int = 128, width: int = 256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedded)
        self.lstm = nn.LSTM(embedded, width, batch_first=True)
        self.output = nn.Linear(width, tags)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(rows, tokens) to (rows, tokens, tags)."""
        logits: torch.Tensor = self.output(self.lstm(self.embedding(input_ids))[0])
        return logits


class TimedBlock(nn.Module):
    """A residual block of a UNet, to which an embedding of the time is added (Ho et al. 2020)."""

    def __init__(self, before: int, width: int, time: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, before)
        self.conv1 = nn.Conv2d(before, width, 3, padding=1)
        self.time = nn.Linear(time, width)
        self.norm2 = nn.GroupNorm(8, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = nn.Conv2d(before, width, 1) if before != width else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """(rows, before, h, w) and (rows, time) to (rows, width, h, w)."""
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        out: torch.Tensor = self.conv2(F.silu(self.norm2(h))) + self.shortcut(x)
        return out


class PixelAttention(nn.Module):
    """Self-attention between pixels, one head, with 1×1 convolutions for projections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, width, h, w), as the input."""
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        out: torch.Tensor = x + self.out(h.reshape(x.shape))
        return out


class UNet(nn.Module):
    """A small UNet of diffusion models (Ho et al. 2020): the noise in an image at a time.

    Three resolutions with two blocks each way, attention in the middle, 32, 64 and 128 channels.
    """

    def __init__(self, channels: int = 3, widths: tuple[int, ...] = (32, 64, 128)) -> None:
        super().__init__()
        self.frequencies = widths[0]
        time = 4 * widths[0]
        self.time = nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        before = widths[0]
        for width in widths:
            self.down.append(TimedBlock(before, width, time))
            self.shrink.append(nn.Conv2d(width, width, 3, 2, padding=1))
            before = width
        self.middle = TimedBlock(before, before, time)
        self.attention = PixelAttention(before)
        for width in reversed(widths):
            self.grow.append(nn.Conv2d(before, width, 3, padding=1))
            self.up.append(TimedBlock(2 * width, width, time))
            before = width
        self.norm = nn.GroupNorm(8, before)
        self.out = nn.Conv2d(before, channels, 3, padding=1)

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """(rows, channels, h, w) and times in [0, 1], shape (rows,), to the images' shape."""
        half = self.frequencies // 2
        powers = torch.arange(half, device=times.device) / half
        angles = 1000 * times[:, None] * torch.exp(-math.log(1e4) * powers)
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        h, kept = self.stem(images), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            h = block(h, time)
            kept.append(h)
            h = shrink(h)
        h = self.attention(self.middle(h, time))
        for grow, block in zip(self.grow, self.up, strict=True):
            h = grow(F.interpolate(h, scale_factor=2.0))
            h = block(torch.cat([h, kept.pop()], dim=1), time)
        out: torch.Tensor = self.out(F.silu(self.norm(h)))
        return out
