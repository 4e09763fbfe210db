"""Gradient norms of rows that are not trained on, for accounting and analysis."""

from __future__ import annotations

import torch

from dptrain.clipping.ghost import GhostLoss
from dptrain.clipping.ghost_module import GhostModule


def per_example_norms(module: GhostModule, loss: GhostLoss) -> torch.Tensor:
    """‖g_i‖₂ of every row's own loss at the module's current parameters, before clipping.

    For rows of any origin, between the steps of a run in ghost mode, whose gradients and batches
    stay as they are:

    >>> norms = per_example_norms(private.module, private.criterion(private.module(x), y))

    Norms of training data are private, and looking at them is free only while nothing that is
    released depends on them.

    Args:
        module: the run's, in training mode.
        loss: of the rows, from the run's criterion; neither added to another nor scaled.

    Returns:
        Shape (rows,), detached.

    Raises:
        RuntimeError: if the norms do not cover all that the loss does with the parameters, as in
            training.
    """
    losses = loss.per_example
    kept = [(p, p.grad) for p in module.parameters()]
    for p, _ in kept:
        p.grad = None  # the backward pass would add to what is kept
    try:
        reduced = losses.mean() if module.loss_reduction == "mean" else losses.sum()
        return module.first_pass(reduced, len(losses)).detach()
    finally:
        module._forget()
        for p, grad in kept:
            p.grad = grad
