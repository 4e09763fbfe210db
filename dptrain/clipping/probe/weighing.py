"""What outputs are weighed by where a module is tried out: gradients to take back through it."""

from __future__ import annotations

from collections.abc import Sequence

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


def weigh_rows(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], rows: int
) -> None:
    """Multiply the gradients of a row by a number that follows from all that was made of the row.

    A loss may put together what a row's outputs hold, so that a number that is another row's moves
    the gradients of all of them. The factor is 1 and half the mean cosine of the angles between
    what outputs have of the row and a random direction: within [½, 3/2], whatever their size.

    Args:
        outputs: with their rows first, or without any.
        gradients: of their shapes, changed in place.
        rows: that the module was run on.
    """
    generator = torch.Generator().manual_seed(1)
    by_rows = [k for k, y in enumerate(outputs) if y.dim() and len(y) == rows]
    cosines = torch.zeros(rows)
    for k in by_rows:
        y = outputs[k].detach().reshape(rows, -1)
        y = y.to(torch.promote_types(y.dtype, torch.float32)).nan_to_num(0.0, 0.0, 0.0)
        v = torch.randn(y.shape[1], generator=generator).to(y)
        lengths = (y.norm(dim=1) * v.norm()).clamp(min=torch.finfo(y.dtype).tiny)
        cosines += ((y @ v) / lengths).cpu().float()
    for g in (gradients[k] for k in by_rows):
        factors = (1 + cosines / (2 * len(by_rows))).to(g)
        g.mul_(factors.view(-1, *[1] * (g.dim() - 1)))


def take_back(outputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Backward from those outputs that have a graph, if there are any."""
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
