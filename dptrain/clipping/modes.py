"""Attachment of what forms a module's per-example gradients, and their clipper."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from dptrain.clipping.base.styles import ClippingStyle
from dptrain.clipping.base.unknown_device import check_products
from dptrain.clipping.bookkeeping import BookkeepingClipper, Taps, check_layers, uncompiled
from dptrain.clipping.opacus.per_example import HookedModule, PerExampleClipper
from dptrain.clipping.owners import OwnerWatch
from dptrain.clipping.probe import AtHand, RowProbe
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
            "Gradients: mode='ghost' is not supported. It clips by the norms of one backward "
            "pass but releases the gradients of a second one, and rounding alone can take these "
            "past max_grad_norm. Use Gradients(mode='bookkeeping'), which is faster, computes "
            "norms and sums from the same pass, and works with your own loop and criterion"
        )
    if mode not in MODES:
        hint = did_you_mean(mode, MODES)
        raise ValueError(f"Gradients: mode={mode!r}: {hint}one of {MODES}, or None for the fastest")


def choose_mode(mode: str | None, module: nn.Module) -> str:
    """The mode asked for; bookkeeping for ``None``.

    Raises:
        ValueError: for bookkeeping of a module with parameters that it cannot handle.
    """
    if mode not in (None, "bookkeeping"):
        return mode
    if (why := check_layers(module)) is not None:
        raise ValueError(f"Gradients(mode='bookkeeping'): {why}, or use Gradients(mode='hooks')")
    return "bookkeeping"


def own_attributes(mode: str) -> frozenset[str]:
    """Names of the attributes that a mode keeps in the user's layers."""
    return HookedModule.own_attributes if mode != "bookkeeping" else frozenset()


class Attached(NamedTuple):
    """A module in a private run.

    Attributes:
        module: what is called: in mode bookkeeping the user's own, in the others Opacus's.
        own: the user's own.
        clipper: of its gradients.
        probe: looks at what the module is called with.
        owners: follows some of the steps, where that can be and it is told of batches.
        detach: leaves the user's module as it was, when called.
    """

    module: nn.Module
    own: nn.Module
    clipper: BookkeepingClipper | PerExampleClipper
    probe: RowProbe | None
    owners: OwnerWatch | None
    detach: Callable[[], Any]


def attach(
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
    seed: int = 0,
    together: Callable[[bool], contextlib.AbstractContextManager[Any]] | None = None,
) -> Attached:
    """The module with what forms per-example gradients in one of the modes, and their clipper.

    Args:
        module: the user's.
        parameters: those that are trained, in the optimizer's order.
        mode: one of ``MODES``.
        style: how gradients are clipped.
        groups: the number of each parameter's group in that style.
        loss_reduction: ``"mean"`` or ``"sum"``.
        loader: knows the examples of the batch at hand.
        views: rows that the model sees of an example, one after the other.
        probe: when it is checked that the module keeps the examples apart, one of ``PROBES``.
        seed: of the choice of steps that are followed (``OwnerWatch``).
        together: where other processes have parts of the module (mode bookkeeping), a context for
            runs of it by the probe (``RowProbe``).
    """
    for device in {p.device for p in parameters}:
        check_products(device)
    owners = OwnerWatch(uncompiled(module), views=views, seed=seed, once=probe == "first")
    # Of a divided module no rank runs all operators.
    told = None if probe == "off" or together is not None else owners

    def fed() -> AtHand | None:
        batch = loader.unused
        if batch is None:
            return None
        return AtHand(
            examples=len(batch.indices),
            rows=batch.rows * views,
            views=views,
            reduction=loss_reduction,
        )

    if mode == "bookkeeping":
        book = BookkeepingClipper(
            parameters,
            at_hand=functools.partial(getattr, loader, "unused"),
            between=lambda: loader.between,
            loss_reduction=loss_reduction,
            views=views,
            style=style,
            groups=groups,
            owners=owners,
        )
        taps = Taps(module, book, fed=fed, when=probe, together=together, owners=owners)
        return Attached(module, module, book, taps.probe, told, taps.detach)
    _say_whose(mode)
    # torch says so of Opacus's hook on the first layer, whose input needs no gradient: no news.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    clipper = PerExampleClipper(
        parameters,
        views=views,
        style=style,
        groups=groups,
        names={p: name for name, p in module.named_parameters()},
        current=functools.partial(getattr, loader, "unused"),
    )
    wrapped = HookedModule(
        module,
        at_hand=clipper.at_hand,
        between=lambda: loader.between,
        views=views,
        fed=fed,
        when=probe,
        loss_reduction=loss_reduction,
        owners=owners,
        force_functorch=mode == "functorch",
    )
    return Attached(wrapped, module, clipper, wrapped.probe, told, wrapped.detach)


@functools.cache
def _say_whose(mode: str) -> None:
    """Warn that the module is Opacus's: once, and not for every run of a sweep."""
    _log.warning(
        "in mode %r, private.module is Opacus's wrapper around your module, with another class and "
        "other names in its state_dict. Your own module is the one you gave make_private, and "
        "private.detach() returns it; in mode 'bookkeeping', private.module is your own module",
        mode,
    )
