"""Lengths of the training examples' gradients, for whoever tunes the bound; not for release."""

from __future__ import annotations

import torch

PREFIX = "debug/"


class DebugNorms:
    """Gradient norms of one logical step, over its microbatches."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def add(self, norms: torch.Tensor | None, weights: torch.Tensor) -> None:
        """Count a microbatch's norms, shape (rows,); padding rows have weight 0."""
        if norms is None:
            return
        norms = norms.detach().cpu().double()
        self._parts.append(norms[(weights > 0) & torch.isfinite(norms)])

    def values(self, max_grad_norm: float) -> dict[str, float]:
        """The median of finite norms, and the share above R; nothing if there are none.

        Norms are those of whole gradients, also where layers or groups are clipped by themselves.
        """
        norms = torch.cat(self._parts) if self._parts else torch.empty(0)
        if not len(norms):
            return {}
        return {
            f"{PREFIX}median_norm": float(norms.quantile(0.5)),
            f"{PREFIX}share_above_bound": float((norms > max_grad_norm).double().mean()),
        }
