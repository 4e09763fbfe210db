"""Clipped sums by ghost clipping: the loss and the clipper; see also the ghost module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dptrain.clipping.clipper import GradientClipper, check_same_batch
from dptrain.clipping.ghost_module import GhostModule
from dptrain.clipping.rows import check_rows
from dptrain.clipping.styles import FLAT, ClippingStyle
from dptrain.sampling import MicroBatch


class GhostLoss:
    """The per-example losses of a batch; :meth:`backward` leaves the clipped sum in ``p.grad``.

    Losses of one batch may be added to each other and scaled by numbers. Anything else (a
    regulariser on the parameters, say) would reach ``p.grad`` without being clipped and is
    refused; use the optimiser's ``weight_decay``.
    """

    def __init__(self, per_example: torch.Tensor, clipper: GhostClipper) -> None:
        self.per_example = per_example
        self._clipper = clipper

    def detach(self) -> torch.Tensor:
        """The reduced loss as a scalar tensor."""
        return self._clipper.reduce(self.per_example).detach()

    def item(self) -> float:
        """The reduced loss as a number."""
        return float(self.detach())

    def __mul__(self, factor: float) -> GhostLoss:
        if not isinstance(factor, int | float):
            raise TypeError(f"a ghost loss is scaled by a number, not {type(factor).__name__}")
        return GhostLoss(self.per_example * factor, self._clipper)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> GhostLoss:
        return self * (1.0 / divisor)

    def __add__(self, other: GhostLoss) -> GhostLoss:
        if not isinstance(other, GhostLoss):
            raise TypeError(
                f"a ghost loss is added to a ghost loss, not to {type(other).__name__}: what is "
                "added here would escape clipping"
            )
        return GhostLoss(self.per_example + other.per_example, self._clipper)

    def __repr__(self) -> str:
        return f"GhostLoss({self.item():.6g}, rows={len(self.per_example)})"

    def backward(self) -> None:
        """Two passes: per-example norms, then the gradient of Σ_i w_i f_i loss_i, f_i the style's.

        Raises:
            RuntimeError: if this is the second backward pass for one batch, or the losses are not
                one per row of the batch.
        """
        self._clipper.backward(self.per_example)


class GhostClipper(GradientClipper):
    """Wraps the criterion, runs the two passes, hands the clipped sum to the optimiser.

    Args:
        module: the ghost module.
        criterion: a loss module or function with a ``reduction`` attribute.
        parameters: the trainable parameters.
        style: one with a single group: the second pass has one factor for a whole gradient.

    Attributes:
        bounds: returns (R, weights of the rows of the current microbatch); set by the engine.
        at_hand: returns the batch that the user holds; set by ``wrap_module``.
    """

    bounds: Callable[[], tuple[float, torch.Tensor]]
    at_hand: Callable[[], MicroBatch | None]

    def __init__(
        self,
        module: GhostModule,
        criterion: Any,
        parameters: Sequence[nn.Parameter],
        *,
        style: ClippingStyle = FLAT,
    ) -> None:
        super().__init__(parameters, style=style)
        self.module = module
        self.criterion = criterion
        self._ready = False

    def __call__(self, *args: Any, **kwargs: Any) -> GhostLoss:
        """The criterion's per-example losses; sequence losses are reduced within each example."""
        reduction = self.criterion.reduction
        self.criterion.reduction = "none"
        try:
            losses = self.criterion(*args, **kwargs)
        finally:
            self.criterion.reduction = reduction
        if losses.dim() == 0:
            raise RuntimeError(
                "the criterion ignores reduction='none': ghost mode needs a loss per row"
            )
        if losses.dim() > 1:
            flat = losses.flatten(1)
            losses = flat.mean(1) if self.module.loss_reduction == "mean" else flat.sum(1)
        return GhostLoss(losses, self)

    def reduce(self, losses: torch.Tensor) -> torch.Tensor:
        """Mean or sum over the rows, as the user's criterion has it."""
        return losses.mean() if self.module.loss_reduction == "mean" else losses.sum()

    def backward(self, losses: torch.Tensor) -> None:
        """See :meth:`GhostLoss.backward`."""
        if self._ready:
            raise RuntimeError(
                "two backward passes were made for one batch; each would be clipped on its own "
                "and an example would count several times: add the losses, call backward once"
            )
        max_grad_norm, weights = self.bounds()
        self.batch = self.at_hand()
        check_same_batch(self.module.since, self.batch)
        check_rows(len(losses), len(weights))
        norms = self.module.first_pass(self.reduce(losses), len(weights))
        for p in self.parameters:  # what the first pass left is not clipped
            p.grad = None
        factors, finite = self._factors(norms[:, None], max_grad_norm, weights)
        factors = factors[:, 0].to(losses)
        if finite is None:
            finite = torch.ones(len(weights), dtype=torch.bool)
        kept = torch.where(finite.to(losses.device), losses, losses.new_zeros(()))
        self.module.second_pass((factors * kept).sum(), finite)
        self._ready = True

    def clipped_sum(
        self,
        *,
        max_grad_norm: float,
        weights: torch.Tensor,
        scales: Sequence[torch.Tensor | None] | None = None,
    ) -> list[torch.Tensor | None]:
        """One clipped sum per parameter (``None`` where a parameter took no part), consumed.

        Raises:
            RuntimeError: if there was no backward pass for this batch, or there are scales: the
                norms of the first pass are of gradients as they are.
        """
        if scales is not None:
            raise RuntimeError(
                "ghost norms are of unscaled gradients: use grad_sample_mode='hooks' with an "
                "optimiser that scales them"
            )
        if not self._ready:
            raise RuntimeError(
                "no backward pass was made for this batch: in ghost mode use the criterion that "
                "make_private returned and call backward() on its result"
            )
        sums = [p.grad for p in self.parameters]
        self.discard()
        return sums

    def discard(self) -> None:
        """Forget gradients of a batch that will not be used."""
        self._ready = False
        for p in self.parameters:
            p.grad = None
