"""What all ways to clipped sums share: from norms to factors, with what is remembered of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from dptrain.clipping.base.styles import FLAT, ClippingStyle
from dptrain.clipping.base.weights import clip_factors, total_norms
from dptrain.sampling import MicroBatch


class GradientClipper:
    """The common part of the clippers.

    Args:
        parameters: the trainable parameters.
        style: how a gradient is clipped.
        groups: the number of each parameter's group in that style; ``None``: one for all.

    Attributes:
        admit: from the norms of what examples contribute to factors in [0, 1] on the clipped
            gradients; ``None``: all 1.
        batch: the one that gradients were computed for last.
        nonfinite_examples: how many were left out so far because their norm was not finite.
        norms: ‖s ⊙ g_i‖₂ of the last microbatch, before clipping, shape (examples,), padding
            included; ``None`` before the first. Private data, for the trainer's eyes.
    """

    admit: Callable[[torch.Tensor], torch.Tensor] | None = None
    batch: MicroBatch | None = None
    norms: torch.Tensor | None = None

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        style: ClippingStyle = FLAT,
        groups: Sequence[int] | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.style = style
        self.groups = [0] * len(self.parameters) if groups is None else list(groups)
        self.nonfinite_examples = 0

    def _factors(
        self, norms: torch.Tensor, max_grad_norm: float, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Factors, shape (examples, groups), and which examples are finite, shape (examples,).

        The second is ``None`` where all are: then no row has to be taken out of a sum.

        Args:
            norms: of the groups' gradients, shape (examples, groups).
            max_grad_norm: R > 0.
            weights: shape (examples,); 0 for padding, which counts nowhere.
        """
        self.norms = total_norms(norms)
        weights = weights.to(norms)
        factors, finite = clip_factors(norms, max_grad_norm, weights, self.admit, self.style)
        if bool(finite.all()):
            return factors, None
        self.nonfinite_examples += int((~finite & (weights != 0)).sum())
        return factors, finite


def check_same_batch(since: MicroBatch | None, batch: MicroBatch | None) -> None:
    """Refuse a backward pass of which the forward pass saw another batch.

    Args:
        since: the batch that was at hand in the forward pass.
        batch: the one at hand now.

    Raises:
        RuntimeError: saying what to do; the gradients would be released as another batch's.
    """
    if since is not batch:
        raise RuntimeError(
            "this backward pass is of a forward pass from before the batch at hand was taken from "
            "the private loader: its gradients would be released as another batch's; for every "
            "batch, run forward and backward pass, then optimizer.step()"
        )
