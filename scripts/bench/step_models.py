"""The models of the step-time bench, each with one batch of random data and its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from recipes.models import vgg

CLASSES = 10
Inputs = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with the batch that it is trained on.

    Attributes:
        name: as it is asked for.
        title: as it is printed.
        batch: rows of the batch.
        build: the module, in training mode, on the CPU.
        inputs: from (rows, generator) to the module's keyword arguments; a module whose only
            argument is positional has it under ``"x"``.
        classes: of the labels.
    """

    name: str
    title: str
    batch: int
    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Inputs]
    classes: int = CLASSES

    def data(self, rows: int | None = None) -> tuple[Inputs, torch.Tensor]:
        """One batch of inputs and labels, the same at every call."""
        generator = torch.Generator().manual_seed(1)
        rows = self.batch if rows is None else rows
        labels = torch.randint(0, self.classes, (rows,), generator=generator)
        return self.inputs(rows, generator), labels

    def module(self) -> nn.Module:
        """The module, with the same weights at every call."""
        torch.manual_seed(0)
        return self.build().train()


def call(module: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Logits, shape (rows, classes)."""
    if "x" in inputs:
        logits: torch.Tensor = module(inputs["x"])
    else:
        logits = module(**inputs).logits
    return logits


def with_position_ids(inputs: Inputs) -> Inputs:
    """The inputs of a BERT with a row of position ids for each example, shape (rows, tokens).

    Left out, the model looks up one row and shares it among all examples, which Opacus's rules
    take for a batch of one.
    """
    if "input_ids" not in inputs:
        return inputs
    rows, tokens = inputs["input_ids"].shape
    positions = torch.arange(tokens, device=inputs["input_ids"].device)
    return {**inputs, "position_ids": positions.expand(rows, tokens).contiguous()}


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES)
    )


def _vgg() -> nn.Module:
    return vgg(in_channels=3, classes=CLASSES)


def _bert(**sizes: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(num_labels=2, **sizes))


def _bert_tiny() -> nn.Module:
    return _bert(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with GroupNorm, and the input added to them."""

    def __init__(self, before: int, width: int, stride: int, groups: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.GroupNorm(groups, width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, before, h, w) to (rows, width, h / stride, w / stride)."""
        h = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


def resnet18(classes: int = CLASSES) -> nn.Module:
    """ResNet-18 (He et al. 2016) for 32×32 images: a 3×3 stem, GroupNorm for BatchNorm."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.GroupNorm(32, 64),
        nn.ReLU(),
    ]
    before = 64
    for width in (64, 128, 256, 512):
        for stride in (1 if width == 64 else 2, 1):
            layers.append(ResidualBlock(before, width, stride))
            before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)]
    return nn.Sequential(*layers)


def _images(rows: int, generator: torch.Generator) -> Inputs:
    return {"x": torch.randn(rows, 3, 32, 32, generator=generator)}


def _features(rows: int, generator: torch.Generator) -> Inputs:
    return {"x": torch.randn(rows, 784, generator=generator)}


def _tokens(rows: int, generator: torch.Generator) -> Inputs:
    # From 1 on: 0 is the padding token, whose row of the embedding is not trained.
    ids = torch.randint(1, 30_522, (rows, 128), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("vgg", "VGG 32×32", 256, _vgg, _images),
        Case("bert", "BERT-tiny, 128 tokens", 64, _bert_tiny, _tokens, classes=2),
        Case("mlp", "MLP 784-512-512-10", 1024, _mlp, _features),
        Case("resnet18", "ResNet-18 (GroupNorm) 32×32", 512, resnet18, _images),
        Case("bert-base", "BERT-base, 128 tokens", 64, _bert, _tokens, classes=2),
    )
}
ON_CPU = ("vgg", "bert", "mlp")


def default_models(device: str) -> list[str]:
    """The large two are for a GPU."""
    return list(CASES) if device.startswith("cuda") else list(ON_CPU)


class Rows(torch.utils.data.Dataset[Any]):
    """As many row numbers as the batch has; the collate function holds the batch itself.

    So that between two timed steps no example is copied, which would cost a private side the
    contents of the caches, and the ordinary one nothing.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.fingerprint = f"{rows} rows of random data"

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> int:
        return row


def tensors(inputs: Inputs, labels: torch.Tensor) -> TensorDataset:
    """As a data set, for a loader that is not ours."""
    return TensorDataset(*inputs.values(), labels)
