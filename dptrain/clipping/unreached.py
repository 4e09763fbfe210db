"""Trainable parameters that learn nothing, as no call of the module ever reaches them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

_NAMED = 5  # parameters that are named one by one

_log = logging.getLogger(__name__)


class Unreached:
    """Warns, after the first step, of parameters that get noise and nothing else.

    Noise is added to every trainable parameter, whether examples have gradients of it or not. A
    head that is not called, an adapter that is not active, or layers that ran without gradients
    would otherwise be drowned in it without a word. What counts is whether a gradient came, not
    whether it was zero: those of LoRA's first matrix all are, as long as the second one is.

    Args:
        names: of the parameters in the user's module.
    """

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        self._names = names
        self._told = False

    def look(
        self, parameters: Sequence[torch.Tensor], sums: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Those that no gradient came of in a step, to be told of if no other process had one.

        Args:
            parameters: that are trained.
            sums: their clipped sums, ``None`` where no call reached one.
        """
        if self._told:
            return []
        pairs = zip(parameters, sums, strict=True)
        return [p for p, total in pairs if total is None and p.requires_grad]

    def tell(self, missing: Sequence[torch.Tensor]) -> None:
        """Warn of these, once in a run."""
        if self._told:
            return
        self._told = True
        if not missing:
            return
        names = [self._names.get(p, f"of shape {tuple(p.shape)}") for p in missing]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        _log.warning(
            "no gradient reached %d trainable parameter%s in the first step: %s%s. They learn "
            "nothing, and every step adds noise to them: freeze them with requires_grad_(False) "
            "before the optimizer is made. If they should learn, check that you call the module "
            "that holds them, that adapters are active, and that nothing is detached or "
            "computed under no_grad() on the way. If layers take part in some steps only (layer "
            "drop, experts, several heads), this may be as intended",
            len(names),
            "s" if len(names) > 1 else "",
            ", ".join(repr(name) for name in names[:_NAMED]),
            more,
        )
