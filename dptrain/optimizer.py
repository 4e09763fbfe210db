"""The optimiser wrapper: clipped sums in, correlated noise added, one release a logical step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from opacus.optimizers import DPOptimizer

from dptrain.ledger import StepLedger, checksum
from dptrain.mechanism import MatrixMechanism
from dptrain.noise.stream import NoiseStream
from dptrain.sampling import PrivateLoader


class Clipper(Protocol):
    """Where clipped sums come from; see :mod:`dptrain.clipping`."""

    nonfinite_examples: int

    def clipped_sum(
        self, *, max_grad_norm: float, weights: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """One clipped sum per parameter for the current microbatch, consumed."""

    def discard(self) -> None:
        """Forget gradients of a batch that will not be used."""


class PrivateOptimizer(DPOptimizer):
    """Wraps a torch optimiser; ``step()`` is called once for every batch the loader yields.

    On the last microbatch of logical step t the wrapped optimiser is given
    ``(Σ_i clip(g_i, R) + σ R (C^-1 Z)_t) / B̄`` (no division for a sum-reduced loss) and steps; on
    earlier microbatches the clipped sums are only added up. Which row is whose, its weight and
    "last of this step" are read from the batch itself.

    Attributes:
        max_grad_norm: R; may be changed between steps (a public schedule), the noise follows it.
        steps_executed: number of noisy updates so far.
        at_step_boundary: whether the last call of :meth:`step` completed a logical step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        mechanism: MatrixMechanism,
        max_grad_norm: float,
        loss_reduction: str,
        noise: NoiseStream,
        clipper: Clipper,
        loader: PrivateLoader,
        ledger: StepLedger,
    ) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=mechanism.noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=mechanism.scheme.expected_batch_size,  # B̄ = N p0, never rounded
            loss_reduction=loss_reduction,
        )
        self.noise = noise
        self.clipper = clipper
        self.loader = loader
        self.ledger = ledger
        self.steps_executed = 0
        self.at_step_boundary = True
        self._parts_done = 0
        self._boundary_hooks: list[Callable[[], None]] = []

    def attach_boundary_hook(self, hook: Callable[[], None]) -> None:
        """Call ``hook()`` after every completed logical step."""
        self._boundary_hooks.append(hook)

    def restart_at(self, steps_executed: int) -> None:
        """Continue with step ``steps_executed`` (from 0), as after a checkpoint was loaded."""
        self.steps_executed = steps_executed
        self.at_step_boundary = True
        self._reset_sums()
        self.clipper.discard()

    def bounds(self) -> tuple[float, torch.Tensor]:
        """R and the weights of the current batch's rows, shape (rows,).

        Raises:
            RuntimeError: if no batch has been taken from the private loader.
        """
        if self.loader.current is None:
            raise RuntimeError("take a batch from the private loader before the backward pass")
        return self.max_grad_norm, torch.from_numpy(self.loader.current.weights)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; the clipped sum of a step that is under way stays."""
        self.clipper.discard()
        self.original_optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Use the current batch; on the last microbatch of a logical step, release and update.

        Raises:
            RuntimeError: if there is no unused batch, the planned steps have all run, or the
                backward pass of this batch cannot be clipped to R (see :mod:`dptrain.clipping`).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batch = self.loader.current
        if batch is None:
            raise RuntimeError(
                "optimizer.step() without an unused batch: take one from the private loader, run "
                "one backward pass, then call step() once"
            )
        if batch.part == 0:
            self._reset_sums()  # also drops what an abandoned attempt at this step had summed
        if batch.step != self.steps_executed or batch.part != self._parts_done:
            raise RuntimeError(
                f"batch {batch.step}/{batch.part} came when {self.steps_executed}/"
                f"{self._parts_done} was due (step/microbatch); iterate over the private loader "
                "that belongs to this optimiser"
            )
        max_grad_norm, weights = self.bounds()
        sums = self.clipper.clipped_sum(max_grad_norm=max_grad_norm, weights=weights)
        for p, total in zip(self.params, sums, strict=True):
            if total is not None:
                p.summed_grad = total if p.summed_grad is None else p.summed_grad.add_(total)
        self._parts_done += 1
        self.loader.report_microbatch()
        self.at_step_boundary = batch.last
        if batch.last:
            self._release()
            self.original_optimizer.step()
            self.steps_executed += 1
            self._reset_sums()
            self.loader.complete_step()
            for hook in self._boundary_hooks:
                hook()
        return loss

    def add_noise(self) -> None:
        """Leave in ``p.grad`` the noisy sum of the step that is under way."""
        scale = self.noise_multiplier * self.max_grad_norm
        for p, row in zip(self.params, next(self.noise), strict=True):
            if p.summed_grad is None:
                noisy = row.mul(scale)
            else:
                noisy = p.summed_grad.add_(row.view_as(p), alpha=scale)
            p.grad = noisy.to(p.dtype)

    def scale_grad(self) -> None:
        """Divide by the public constant B̄ where the loss is a mean."""
        if self.loss_reduction == "mean":
            for p in self.params:
                p.grad.div_(self.expected_batch_size)

    def _release(self) -> None:
        self.add_noise()
        self.scale_grad()
        if self.step_hook is not None:
            self.step_hook(self)
        self.ledger.record(self.steps_executed, checksum([p.grad for p in self.params]))

    def _reset_sums(self) -> None:
        self._parts_done = 0
        for p in self.params:
            p.summed_grad = None

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimiser's state; the run's state is ``private.state_dict()``."""
        return self.original_optimizer.state_dict()
