"""A layer with a parameter of its own, and the rule for its per-example gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dptrain import register_layer


class Shift(nn.Module):
    """Adds a vector to the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x + offset."""
        return x + self.offset


def _per_example(
    layer: nn.Module, inputs: tuple[Any, ...], gradient: torch.Tensor
) -> Mapping[str, torch.Tensor]:
    return {"offset": gradient.flatten(1, -2).sum(1) if gradient.dim() > 2 else gradient}


register_layer(Shift, _per_example)
