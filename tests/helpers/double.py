"""Models of recipes in double precision, for runs of several modes that have to agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Double(nn.Module):
    """The model in float64; what it is fed may be float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x.double())
        return out


def doubled(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A function that builds the model in float64, the same one otherwise.

    Modes add up in different orders, as processors do. In float32 that moves an input of a ReLU by
    1e-7 and, where it lies as close to 0 as that, its gradient from 0 to 1: two runs then go apart.
    In float64 it would have to lie within 1e-16.
    """

    def of(*args: Any, **kwargs: Any) -> nn.Module:
        return Double(build(*args, **kwargs))

    return of
