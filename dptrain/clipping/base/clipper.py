"""What all ways to clipped sums share: from norms to factors, with what is remembered of them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn

from dptrain.clipping.base.styles import FLAT, ClippingStyle
from dptrain.clipping.base.weights import clip_factors, total_norms
from dptrain.sampling import MicroBatch

_log = logging.getLogger(__name__)

Admit = Callable[[torch.Tensor], torch.Tensor]
"""From norms to factors in [0, 1], one for each example."""


class GradientClipper(ABC):
    """Forms one clipped sum of the per-example gradients of a microbatch for each parameter.

    Args:
        parameters: the trainable parameters.
        style: how a gradient is clipped.
        groups: the number of each parameter's group in that style; ``None``: one for all.

    Attributes:
        batch: the one that gradients were computed for last.
        nonfinite_examples: how many were left out so far because their norm was not finite.
        norms: ‖s ⊙ g_i‖₂ of the last microbatch, before clipping, shape (examples,), padding
            included; ``None`` before the first. Private data, for the trainer's eyes.
    """

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

    @abstractmethod
    def clipped_sum(
        self,
        *,
        max_grad_norm: float,
        weights: torch.Tensor,
        scales: Sequence[torch.Tensor | None] | None = None,
        admit: Admit | None = None,
        loss_scale: float = 1.0,
    ) -> list[torch.Tensor | None]:
        """One clipped sum per parameter (``None`` where a parameter took no part), consumed.

        Args:
            max_grad_norm: R > 0.
            weights: shape (examples,), one weight per example of the microbatch; 0 for padding.
            scales: s, positive, a tensor of its shape for each parameter (``None``: 1); what they
                depend on must be public.
            admit: from the norms of what examples contribute, shape (examples,), to factors in
                [0, 1] on the clipped gradients; ``None``: all 1.
            loss_scale: S > 0, what the loss was multiplied by; undone before anything else.

        Raises:
            RuntimeError: if the backward passes of this batch do not give one gradient an example.
        """

    @abstractmethod
    def discard(self) -> None:
        """Forget gradients of a batch that will not be used."""

    def _factors(
        self,
        norms: torch.Tensor,
        max_grad_norm: float,
        weights: torch.Tensor,
        admit: Admit | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Factors, shape (examples, groups), and which examples are finite, shape (examples,).

        The second is ``None`` where all are: then no row has to be taken out of a sum.

        Args:
            norms: of the groups' gradients, shape (examples, groups).
            max_grad_norm: R > 0.
            weights: shape (examples,); 0 for padding, which counts nowhere.
            admit: from the norms of what examples contribute to factors in [0, 1] on the clipped
                gradients; ``None``: all 1.
        """
        self.norms = total_norms(norms)
        weights = weights.to(norms)
        factors, finite = clip_factors(norms, max_grad_norm, weights, admit, self.style)
        if bool(finite.all()):
            return factors, None
        self.nonfinite_examples += int((~finite & (weights != 0)).sum())
        return factors, finite


def tell_of_no_gradient() -> None:
    """Log that a backward pass between two batches is none of the run's."""
    _log.warning(
        "a backward pass went through the private module after optimizer.step() and before the "
        "next batch of the private loader: it is no part of the run, whose parameters are trained "
        "by the loader's batches alone. Gradients of its inputs, and of other modules, are right; "
        "to train the module on other data as well, end the run with private.detach()"
    )


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
