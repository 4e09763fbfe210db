"""What the ranks of a run divide among them: the noise, and the optimizer where that is right."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn

from dptrain.clipping.base import summing_dtype
from dptrain.distributed import Ranks
from dptrain.engine.optimizers import SlicedOptimizer, laid_out_like, whole_because
from dptrain.noise import shard_pieces

logger = logging.getLogger(__name__)


class Shards:
    """This rank's slice of the flattened parameters, and what it does with it in a step.

    The clipped sums are reduced so that each rank gets its slice of them, to which it adds the
    slice of the noise that it draws and keeps. Then either the optimizer steps on slices of the
    parameters, which are gathered, or the noisy sums are gathered and every rank's optimizer steps
    on all. Both are the traffic of one all-reduce. Noise is a function of seed, step and position:
    what is released is what one process releases, up to the order in which floats are added
    (``test_ranks_with_slices_release_what_one_process_does``).

    All ranks know the seed, and each could draw all of the noise: the slices save memory, and are
    no secret that ranks keep from one another.

    Args:
        ranks: the processes of the run, several.
        parameters: that are trained, as the noise is for them.
        optimizer: the user's, where it steps on slices; else ``None``.

    Attributes:
        pieces: for each rank, the first entry and one past the last of each flattened parameter.
        sliced: the optimizer of the slices, or ``None``.
        sums: this rank's pieces of the clipped sums of the step that is being released.
    """

    def __init__(
        self,
        ranks: Ranks,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._ranks = ranks
        like = shaped_like_sums(parameters)
        self.pieces = [
            shard_pieces(like, rank=rank, world=ranks.world_size)
            for rank in range(ranks.world_size)
        ]
        self.sliced: SlicedOptimizer | None = None
        if optimizer is not None:
            self.sliced = SlicedOptimizer(optimizer, parameters, self.pieces[ranks.rank])
        self.sums: list[torch.Tensor] = []

    @classmethod
    def of(
        cls,
        ranks: Ranks,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        what: str,
    ) -> Self | None:
        """The shards that ``NoiseOptions.shard`` asks for; ``None`` where nothing is divided."""
        if ranks.world_size == 1 or what == "off":
            return None
        reason = None if what == "noise" else whole_because(optimizer)
        if reason and ranks.rank == 0:
            logger.warning(
                "the ranks divide the noise, and each has the whole state of the optimizer: %s. "
                "NoiseOptions(shard='noise') asks for that",
                reason,
            )
        return cls(ranks, parameters, None if reason or what == "noise" else optimizer)

    def add_up(self, parameters: Sequence[Any]) -> None:
        """Take ``p.summed_grad`` off the parameters; this rank's pieces of all ranks' are kept."""
        tensors = [p.summed_grad for p in parameters]
        self.sums = self._ranks.scatter_sums(tensors, parameters, self.pieces)
        for p in parameters:
            p.summed_grad = None

    def add_noise(
        self,
        parameters: Sequence[Any],
        rows: Sequence[torch.Tensor],
        deviation: float,
        scales: Sequence[torch.Tensor | None] | None,
    ) -> None:
        """Leave the noisy sum in the gradients of what the optimizer steps on.

        Args:
            parameters: that are trained.
            rows: this rank's noise of the step.
            deviation: that it is multiplied by.
            scales: that the sums are divided by, of the whole parameters.
        """
        noisy = [
            total.add_(row.view_as(total), alpha=deviation)
            for total, row in zip(self.sums, rows, strict=True)
        ]
        self.sums = []
        if self.sliced is not None:
            for p in parameters:
                p.grad = None  # whatever was there is neither clipped nor noised
            for piece, values in zip(self.sliced.parameters, noisy, strict=True):
                piece.grad = laid_out_like(piece, values.to(piece.dtype))
            return
        whole = [torch.empty(p.shape, dtype=summing_dtype(p), device=p.device) for p in parameters]
        self._ranks.gather_pieces(noisy, whole, self.pieces)
        for p, values, scale in zip(
            parameters, whole, scales or [None] * len(parameters), strict=True
        ):
            noisy_sum = values if scale is None else values.div_(scale)
            p.grad = laid_out_like(p, noisy_sum.to(p.dtype))

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update the parameters, which are then the same on all ranks."""
        assert self.sliced is not None
        self.sliced.step()
        self._ranks.gather_pieces(self.sliced.parameters, parameters, self.pieces)

    def detach(self) -> None:
        """The optimizer is the user's again."""
        self.sums = []
        if self.sliced is not None:
            self.sliced.detach()


def shaped_like_sums(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of the shapes and devices of parameters and the dtypes of their sums, of no size."""
    return [
        torch.empty((), dtype=summing_dtype(p), device=p.device).expand(p.shape) for p in parameters
    ]
