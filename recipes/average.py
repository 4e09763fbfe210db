"""The exponential average of released weights, in place of the last ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel


class Average:
    """A copy of a model whose weights are averages of those that its training released.

    After n updates they are Σ_t d^(n-t) w_t / Σ_t d^(n-t): weights of before the first update have
    no part in it. They are made of what each step released, so the guarantee is that of the steps
    (De et al. 2022, arXiv 2204.13650, average so).

    Args:
        model: which is copied as it is, so before anything is hooked into it.
        decay: d, in (0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        def mixed(
            average: torch.Tensor, current: torch.Tensor, updates: torch.Tensor | int
        ) -> torch.Tensor:
            share = (1 - decay) / (1 - decay ** (int(updates) + 1))
            return torch.lerp(average, current, share)

        self._averaged = AveragedModel(model, avg_fn=mixed)

    @property
    def model(self) -> nn.Module:
        """The copy; before any update it is the model as it was."""
        return self._averaged.module

    def update(self, model: nn.Module) -> None:
        """Take in what a step released: weights after it, and buffers as they are."""
        self._averaged.update_parameters(model)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Of the copy, with the number of updates."""
        return self._averaged.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a saved state."""
        self._averaged.load_state_dict(state)
