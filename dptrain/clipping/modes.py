"""From a module to its wrapper, which computes per-example gradients, and their clipper."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from dptrain.clipping.base.styles import ClippingStyle
from dptrain.clipping.bookkeeping import BookkeepingClipper, BookkeepingModule, check_layers
from dptrain.clipping.opacus.per_example import HookedModule, PerExampleClipper
from dptrain.clipping.probe import AtHand
from dptrain.core import checks, did_you_mean
from dptrain.sampling import PrivateLoader

MODES = ("bookkeeping", "hooks", "functorch")

_log = logging.getLogger(__name__)


def check_mode_name(mode: Any) -> None:
    """Refuse what is no mode.

    Raises:
        TypeError: if it is no text.
        ValueError: if it is another one.
    """
    checks.text("mode", mode, owner="Gradients")
    if mode == "ghost":
        raise ValueError(
            "Gradients: mode='ghost' is no mode: it clips by the norms of one backward pass and "
            "releases the sums of another, which is any gradient that got there, and rounding "
            "alone takes them past max_grad_norm; use Gradients(mode='bookkeeping'), which is "
            "faster and forms sums from what it takes norms of, with the loop of every mode "
            "(module, optimizer, loader, and your own criterion)"
        )
    if mode not in MODES:
        hint = did_you_mean(mode, MODES)
        raise ValueError(f"Gradients: mode={mode!r}: {hint}one of {MODES}, or None for the fastest")


def choose_mode(mode: str | None, module: nn.Module) -> str:
    """The mode asked for; of ``None`` bookkeeping.

    Raises:
        ValueError: for bookkeeping of a module with parameters that it cannot handle.
    """
    if mode not in (None, "bookkeeping"):
        return mode
    if (why := check_layers(module)) is not None:
        raise ValueError(f"Gradients(mode='bookkeeping'): {why}; or use Gradients(mode='hooks')")
    return "bookkeeping"


def own_attributes(mode: str) -> frozenset[str]:
    """What a mode keeps in the user's layers."""
    kind = BookkeepingModule if mode == "bookkeeping" else HookedModule
    return kind.own_attributes


def wrap_module(
    module: nn.Module,
    parameters: list[nn.Parameter],
    *,
    mode: str,
    style: ClippingStyle,
    groups: Sequence[int],
    loss_reduction: str,
    loader: PrivateLoader,
    views: int = 1,
    probe: str = "shapes",
) -> tuple[BookkeepingModule | HookedModule, BookkeepingClipper | PerExampleClipper]:
    """The wrapped module and what clips its gradients, in one of the modes.

    Args:
        module: the user's.
        parameters: those that are trained, in the optimiser's order.
        mode: one of ``MODES``.
        style: how gradients are clipped.
        groups: the number of each parameter's group in that style.
        loss_reduction: ``"mean"`` or ``"sum"``.
        loader: knows the examples of the batch at hand.
        views: rows that the model sees of an example, one after the other.
        probe: when it is checked that the module keeps the examples apart, one of ``PROBES``.
    """

    def fed() -> AtHand | None:
        batch = loader.current
        if batch is None:
            return None
        return AtHand(examples=len(batch.indices), rows=batch.rows * views, views=views)

    # torch says so of Opacus's hook on the first layer, whose input needs no gradient: no news.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    if mode == "bookkeeping":
        booked = BookkeepingModule(
            module,
            open_book=lambda probe: BookkeepingClipper(
                parameters,
                at_hand=lambda: loader.current,
                loss_reduction=loss_reduction,
                views=views,
                style=style,
                groups=groups,
                probe=probe,
            ),
            fed=fed,
            when=probe,
            loss_reduction=loss_reduction,
        )
        return booked, booked.book
    clipper = PerExampleClipper(
        parameters,
        views=views,
        style=style,
        groups=groups,
        names={p: name for name, p in module.named_parameters()},
        current=lambda: loader.current,
    )
    wrapped = HookedModule(
        module,
        at_hand=clipper.at_hand,
        views=views,
        fed=fed,
        when=probe,
        loss_reduction=loss_reduction,
        force_functorch=mode == "functorch",
    )
    return wrapped, clipper
