"""The user's module with taps on its layers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

import torch
from opacus.grad_sample import AbstractGradSampleModule
from torch import nn

from dptrain.clipping.bookkeeping.rules.generic import GenericRule
from dptrain.clipping.bookkeeping.rules.layers import register_imported
from dptrain.clipping.bookkeeping.rules.rules import LayerRule, layers_with_rules, refusals
from dptrain.clipping.bookkeeping.tap import Book, LayerTap
from dptrain.clipping.mixing_layers import refuse_training_mode
from dptrain.clipping.probe import AtHand, RowProbe, Witness

B = TypeVar("B", bound=Book)


def check_layers(module: nn.Module) -> str | None:
    """What keeps a module from bookkeeping: the first such layer, why, and the remedy."""
    register_imported()
    found = {**refusals(module, _otherwise), **_computed_before_calls(module)}
    if not found:
        return None
    name, why = next(iter(found.items()))
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        f"layer {name!r}{more}: {why}; dptrain.register_layer() takes a rule for it, or freeze its "
        "parameters with requires_grad_(False)"
    )


def _otherwise(name: str, layer: nn.Module) -> LayerRule:
    """The rule of a layer that has none of its own."""
    return GenericRule(name or "(the module itself)")


_LEAK = (
    "parameter {name!r} is used outside the layer that owns it (through torch.nn.functional, say, "
    "or in a penalty on the weights), which no rule for per-example gradients knows: call the "
    "layer, use the optimizer's weight_decay, or Gradients(mode='hooks'), which leaves such "
    "gradients out"
)


class BookkeepingModule(AbstractGradSampleModule, Generic[B]):
    """Runs the user's module; in the backward pass its layers report to the book.

    One forward and one backward pass with any loss (Bu et al. 2022, arXiv 2210.00038;
    docs/theory/clipping.md#thm-bookkeeping; ``test_every_layer``): autograd propagates the output
    gradients, and no parameter is part of its graph. A gradient that reaches a parameter
    nevertheless comes from a use that no rule knows, and is refused.

    Args:
        m: the user's module; compiled ones run compiled between the layers that have a rule.
        open_book: makes what layers report to, of the probe.
        fed: what the module is fed at the moment; ``None``: there is no probe.
        when: one of ``PROBES``.
        loss_reduction: ``"mean"`` or ``"sum"``.

    Attributes:
        book: what ``open_book`` made.
        probe: looks at what the module is called with, where there is one.
    """

    own_attributes: ClassVar[frozenset[str]] = frozenset()  # nothing in the module changes

    def __init__(
        self,
        m: nn.Module,
        *,
        open_book: Callable[[RowProbe | None], B],
        fed: Callable[[], AtHand | None] | None = None,
        when: str = "shapes",
        loss_reduction: str = "mean",
    ) -> None:
        compiled = getattr(m, "_orig_mod", None)
        super().__init__(m if compiled is None else compiled, loss_reduction=loss_reduction)
        if compiled is not None:
            object.__setattr__(self, "_compiled", m)  # not a submodule: names stay the user's
        _forget_traces(m)
        # Not a parameter, so that no state dict and no optimiser sees it.
        device = next(p.device for p in self._module.parameters() if p.requires_grad)
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self.probe: RowProbe | None = None
        if fed is not None:
            self.probe = RowProbe(
                self._module, self.reporting_to, fed, when=when, settle=self.settling
            )
        self.book = book = open_book(self.probe)
        self._taps = [
            LayerTap(layer, rule, book, self._anchor)
            for layer, rule in layers_with_rules(self._module, _otherwise).values()
        ]
        self._elsewhere = False  # whether layers report to another book than the run's
        self._leaks = [
            p.register_post_accumulate_grad_hook(functools.partial(self._refuse, name))
            for name, p in self._module.named_parameters()
            if p.requires_grad
        ]
        self._leaks += refuse_training_mode(self._module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's forward; before it the probe, where there is one, of what it may do."""
        run: Any = getattr(self, "_compiled", self._module)
        if self.probe is None or self._elsewhere:
            return run(*args, **kwargs)
        self._begin(args, kwargs)
        output: Any = None
        try:
            output = run(*args, **kwargs)
        finally:
            self._end(output)
        return output

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and drop what the layers reported of the batch at hand."""
        super().zero_grad(set_to_none)
        for tap in self._taps:
            tap.book.discard()

    @torch.compiler.disable
    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.probe is not None
        self.probe.begin(args, kwargs)

    @torch.compiler.disable
    def _end(self, output: Any) -> None:
        assert self.probe is not None
        self.probe.end(output)

    @contextlib.contextmanager
    def reporting_to(self, book: Book) -> Iterator[None]:
        """Have the layers report to another book meanwhile, of rows that are no part of the run."""
        books, elsewhere = [tap.book for tap in self._taps], self._elsewhere
        try:
            self._elsewhere = True
            for tap in self._taps:
                tap.book = book
            yield
        finally:
            self._elsewhere = elsewhere
            for tap, own in zip(self._taps, books, strict=True):
                tap.book = own

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """Have embeddings note meanwhile, in passes over few rows, what all examples share."""
        shared = [tap.sharing for tap in self._taps if tap.sharing is not None]
        for rows in shared:
            rows.watch()
        try:
            yield
        finally:
            for rows in shared:
                rows.settle()

    def _refuse(self, name: str, p: torch.Tensor) -> None:
        p.grad = None  # not clipped
        if not isinstance(self._taps[0].book, Witness):  # the real pass will raise it
            raise RuntimeError(_LEAK.format(name=name))

    def remove_hooks(self) -> None:
        """Leave the user's module as it was."""
        for tap in self._taps:
            tap.remove()
        for leak in self._leaks:
            leak.remove()
        self._taps, self._leaks = [], []
        _forget_traces(self._module)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, for averaged weights or a file, computes the same and reports nothing."""
        state = super().__getstate__() | {
            "_taps": [],
            "_leaks": [],
            "_anchor": None,
            "probe": None,
            "book": None,
        }
        state.pop("_compiled", None)
        return state


def tapped_layer(module: nn.Module) -> str | None:
    """The name of a layer that reports to some run, or ``None``."""
    layers = module.named_modules()
    return next((name for name, m in layers if isinstance(vars(m).get("forward"), LayerTap)), None)


def _computed_before_calls(module: nn.Module) -> dict[str, str]:
    """Layers with weights that torch.nn.utils computes from others in a forward pre-hook."""
    found: dict[str, str] = {}
    for name, layer in module.named_modules():
        for own, p in layer.named_parameters(recurse=False):
            weight = own.removesuffix("_g").removesuffix("_orig")  # weight_norm; the others
            if p.requires_grad and weight != own and weight in vars(layer):
                found[name] = (
                    f"{weight!r} is computed from {own!r} before every call (weight_norm, "
                    "spectral_norm or pruning of torch.nn.utils), past the layer's rule"
                )
    return found


def _forget_traces(module: nn.Module) -> None:
    """Have compiled modules traced anew: a trace from before the taps would go past them."""
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl for m in module.modules()):
        torch.compiler.reset()
