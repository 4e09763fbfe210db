"""What outputs are weighed by where a module is tried out: gradients to take back through it."""

from __future__ import annotations

import torch


def weigh(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The gradient of Σ w·y − cos y by y, in y's dtype; 0 where y is not finite.

    w + sin y is bounded, and changes with y wherever that is. It is written down at once: autograd
    would hold six tensors of the size of y on the way to it, and what a decoder returns is the
    largest tensor there is.

    Args:
        y: an output.
        w: of its shape.
    """
    y = y.detach()
    found = y.to(torch.promote_types(y.dtype, torch.float32)).sin()
    return found.add_(w.to(found)).masked_fill_(~y.isfinite(), 0.0).to(y.dtype)


def take_back(outputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Backward from those outputs that have a graph, if there are any."""
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
