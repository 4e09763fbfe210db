"""From a module to its wrapper, which computes per-example gradients, and their clipper."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from dptrain.clipping.ghost import GhostClipper
from dptrain.clipping.ghost_module import GhostModule
from dptrain.clipping.per_example import HookedModule, PerExampleClipper
from dptrain.sampling import PrivateLoader


def wrap_module(
    module: nn.Module,
    criterion: Any,
    parameters: list[nn.Parameter],
    *,
    mode: str,
    loss_reduction: str,
    loader: PrivateLoader,
    views: int = 1,
) -> tuple[nn.Module, GhostClipper | PerExampleClipper]:
    """The wrapped module and what clips its gradients, for a ``grad_sample_mode``.

    Args:
        module: the user's.
        criterion: the user's loss; used in ghost mode only.
        parameters: those that are trained, in the optimiser's order.
        mode: ``"hooks"``, ``"functorch"`` or ``"ghost"``.
        loss_reduction: ``"mean"`` or ``"sum"``.
        loader: knows the examples of the batch at hand.
        views: rows that the model sees of an example, one after the other.
    """
    # torch says so of Opacus's hook on the first layer, whose input needs no gradient: no news.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    if mode == "ghost":
        ghost = GhostModule(module, loss_reduction=loss_reduction)
        ghost_clipper = GhostClipper(ghost, criterion, parameters)
        ghost_clipper.at_hand = lambda: loader.current
        return ghost, ghost_clipper
    clipper = PerExampleClipper(parameters, views=views)

    def rows() -> int | None:
        clipper.batch = loader.current
        return None if loader.current is None else loader.current.rows

    wrapped = HookedModule(
        module,
        rows=rows,
        views=views,
        loss_reduction=loss_reduction,
        force_functorch=mode == "functorch",
    )
    return wrapped, clipper
