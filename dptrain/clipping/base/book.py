"""Interface of the object that the layers of a module report to."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


class Book:
    """Takes in the calls of layers on a batch of rows; as it stands here, of no batch, and none."""

    def rows(self) -> int | None:
        """Rows that the model sees of the batch at hand; ``None`` without a batch."""
        return None

    def idle(self) -> bool:
        """True if the batch at hand has no examples, so that nothing is to be made of its rows."""
        return False

    def at_hand(self) -> Any:
        """The batch, or ``None``: a backward pass has to find what its forward pass found."""
        return None

    def record(
        self, uses: Mapping[nn.Parameter, Any], since: Any, doubt: str | None = None
    ) -> None:
        """Take in uses of parameters by a layer that ran when ``since`` was at hand.

        With a doubt, refuse them, at the latest for that.
        """

    def discard(self) -> None:
        """Forget what was recorded of the batch at hand."""

    def hidden(self) -> None:
        """Note that a layer ran without gradients: a backward pass may run it again with them."""

    def replays(self, costs: Any) -> None:
        """Note that a layer was run again, and what that has taken."""

    def unseen(self) -> contextlib.AbstractContextManager[Any] | None:
        """A context for what is done in a backward pass, and is no part of the user's program.

        ``None`` where nothing follows the program.
        """
        return None

    def doubt(self, layer: nn.Module) -> str | None:
        """The reason against gradients of a call that is being made, for ``record``."""
        return None

    def saw(self, layer: nn.Module, inputs: Sequence[Any], gradient: torch.Tensor) -> bool:
        """Look at a call of a layer before uses are made of it; True if none are to be made."""
        return False
