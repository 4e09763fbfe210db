"""Operations of autograd whose backward pass tells the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Report = Callable[[tuple[torch.Tensor, ...], torch.Tensor], None]
"""Function of the tensors that were kept, and of the gradient."""


class Reported(torch.autograd.Function):
    """The identity; its backward pass reports the gradient."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, anchor: torch.Tensor, report: Report, *kept: torch.Tensor
    ) -> torch.Tensor:
        """Interface of autograd."""
        ctx.report = report
        ctx.save_for_backward(*kept)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Interface of autograd."""
        saved = ctx.saved_tensors
        _report(ctx, saved, gradient)
        passed = gradient if ctx.needs_input_grad[0] else None
        return (passed, None, None, *[None] * len(saved))


class ReportedRows(torch.autograd.Function):
    """A parameter with a row for each example; the backward pass reports the rows' gradients."""

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, anchor: torch.Tensor, report: Report, rows: int
    ) -> torch.Tensor:
        """Interface of autograd."""
        ctx.report = report
        return parameter.expand(rows, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Interface of autograd."""
        _report(ctx, (), gradient)
        return None, None, None, None


def _report(ctx: Any, saved: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: Gradients(mode='bookkeeping') cannot form per-example gradients "
            "of a gradient penalty, or of another derivative of a gradient. Remove it, or "
            "estimate it by the difference of two forward passes"
        )
    # torch.autograd.grad by an input (for adversarial examples, say) is not about parameters: the
    # leaf that stands for them is not asked for then.
    if torch._C._will_engine_execute_node(ctx.next_functions[1][0]):
        ctx.report(saved, gradient)
